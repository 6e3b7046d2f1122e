"""Files that torch.save wrote, looked at before torch.load believes them: they may be damaged, or anybody's."""

import pickletools
import re
import zipfile

# What a checkpoint's pickle names. torch.load lets more pass, such as bytearray, which allocates what it is told to.
NAMES = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage")
PICKLE_LIMIT, TUPLE_LIMIT = 2**24, 10**5  # bytes and tuples; a tensor is about 150 and 4


def check(path):
    """Raises ValueError unless a file is torch.save's: checksums right, records uncompressed, names ours."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its records are compressed")
        if len({record.filename for record in records}) < len(records):
            raise ValueError("it has two records of one name")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        if damaged := archive.testzip():  # torch.load checks none
            raise ValueError(f"the checksum of {damaged} is wrong")
        [pickle] = [record for record in records if record.filename.endswith("data.pkl")]
        if pickle.file_size > PICKLE_LIMIT:
            raise ValueError(f"its pickle has {pickle.file_size} bytes")
        check_pickle(archive.read(pickle))


def check_pickle(content):
    """Raises ValueError for a pickle that no checkpoint has.

    A tuple as a key is hashed with all that is in it: for ever where each holds the one before twice, which ours never
    do, and past the end of the stack where a million are nested.
    """
    tuples, before, n = set(), "", 0
    for opcode, value, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and not NAMES.fullmatch(value):
            raise ValueError(f"it names {value}, which no checkpoint does")
        if opcode.name.endswith("BINGET") and value in tuples:
            raise ValueError("it uses a tuple twice")
        if not opcode.name.endswith("BINPUT"):
            before = opcode.name
        elif before.startswith("TUPLE"):
            tuples.add(value)
        n += opcode.name.startswith("TUPLE")
    if n > TUPLE_LIMIT:
        raise ValueError(f"its pickle has {n} tuples")

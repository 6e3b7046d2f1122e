"""Layout of a checkpoint file: converts a nested dict to safetensors and back, with a digest over everything.

The safetensors library is not used. To read, it opens a path twice, so that a file that is replaced in between seems
damaged. Its save_file() does not sync a file before renaming it, so a power cut can leave an empty one; if killed, it
leaves behind an orphaned temporary file; its files are readable by their owner only; and it reports a full disk
without an errno.
"""

import contextlib
import errno
import hashlib
import json
import math
import mmap
from pathlib import Path

import torch

from nanoladder import files
from nanoladder.errors import BadInput

FORMAT_VERSION = 5
OF_THE_FILE = (None, errno.ENOENT, errno.EIO)  # errors of a file that is not whole
MOST_TENSORS = 144  # of a block: it has at most 14 weights, each with up to 8 tensors of the optimizer
MAX_HEADER = 100_000_000  # bytes; the safetensors library's limit


class Damaged(BadInput):
    """Raised for a file that is not a complete nanoladder checkpoint or a complete model in another format."""


@contextlib.contextmanager
def reading(path, kind="a checkpoint of nanoladder"):
    """Turns any error raised while reading a file into a one-line Damaged: a damaged file can fail in many ways.

    If the file may be good and this process cannot read it now, raises BadInput, so that no older one is used instead.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in OF_THE_FILE):
            reason = getattr(error, "strerror", None) or "out of memory"
            raise BadInput(
                f"{path} cannot be read ({reason}); expected a readable file, and memory to map it"
            ) from None
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged or not {kind} ({reason.splitlines()[0]:.300})") from None


def write_checkpoint(file, values, shapes, tensors):
    """Writes a checkpoint in one pass over its tensors. Raises OSError.

    shapes, tensors: as for write_tensors, sorted by name. values: everything else, by key.
    """
    metadata = {key: json.dumps(value) for key, value in values.items()}
    sha256 = header_digest(metadata, shapes)
    unknown = metadata | {"sha256": "0" * 2 * sha256.digest_size}  # placeholder of the digest's length
    write_tensors(file, shapes=shapes, tensors=adding_to(sha256, tensors), metadata=unknown)
    text, _ = header(shapes, metadata | {"sha256": sha256.hexdigest()})
    file.seek(0)
    file.write(text)


def write_slices(file, slices):
    """Writes a file of slices, {name: CPU tensor}; its metadata has a digest of each. Raises OSError.

    Returns the digest of the header, which covers all others.
    """
    unknown = dict.fromkeys(slices, "0" * 64)
    write_tensors(file, shapes=slices, tensors=slices.items(), metadata=unknown)
    text, _ = header(slices, {name: sha256_of(raw(tensor)) for name, tensor in slices.items()})
    file.seek(0)
    file.write(text)
    return sha256_of(text)


def write_tensors(file, shapes, tensors, metadata):
    """Writes a safetensors file. Raises OSError.

    shapes: {name: tensor}; the tensors need no values. tensors: an iterable of (name, CPU tensor); only one at a time
    has to be in memory. metadata: {name: text}.
    """
    text, offsets = header(shapes, metadata)
    file.write(text)
    for name, tensor in tensors:
        file.seek(offsets[name])
        file.write(raw(tensor))


def header(shapes, metadata):
    """Returns the header of a safetensors file, as bytes, and {name: offset of the tensor in the file}."""
    entries, end = {"__metadata__": metadata}, 0
    for name in sorted(shapes, key=lambda name: (-shapes[name].element_size(), name)):  # keeps all aligned
        begin, end = end, end + shapes[name].nbytes
        entry = {"dtype": dtype_name(shapes[name].dtype), "shape": list(shapes[name].shape)}
        entries[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return text, {name: len(text) + entries[name]["data_offsets"][0] for name in shapes}


def dtype_name(dtype):
    """A dtype's name in safetensors: torch.float32 -> F32, torch.bfloat16 -> BF16, torch.uint8 -> U8."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("float", "f").replace("uint", "u").replace("int", "i").upper()


FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8
DTYPES = {dtype_name(dtype): dtype for dtype in (*FLOATS, *INTEGERS, torch.bool)}


def read_tensors(path):
    """Returns a safetensors file's tensors, {name: memory-mapped tensor}, and its metadata, {name: text}.

    Opens the path once: both belong to one file, even if the path is replaced meanwhile. Raises OSError, or ValueError
    unless the file is complete.
    """
    files.size(path)  # raises for a pipe, which would block
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(content[:8], "little")
    if start > min(len(content), MAX_HEADER):
        raise ValueError("its header is incomplete")
    entries = json.loads(content[8:start])
    metadata, tensors, end = entries.pop("__metadata__", {}), {}, 0
    n_blocks = sum(name.endswith("fc.weight") for name in entries)
    if len(entries) > MOST_TENSORS * (1 + n_blocks):  # else they would be read for seconds, and then refused
        raise ValueError(f"it has {len(entries):,} tensors for {n_blocks} blocks")
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise ValueError(f"its {name} is of dtype {entry['dtype']}; expected one of {', '.join(DTYPES)}")
        count, begin = math.prod(entry["shape"]), end
        end += count * dtype.itemsize
        if entry["data_offsets"] != [begin, end] or end > len(content) - start:
            raise ValueError(f"its {name} of shape {entry['shape']} is not where its header says")
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin) if count else torch.empty(0)
        tensors[name] = flat.to(dtype).view(entry["shape"])
    if start + end != len(content):
        raise ValueError(f"it has {len(content):,} bytes, where its header says {start + end:,}")
    return tensors, metadata


def read(path: Path | str) -> dict:
    """Returns the dict of a checkpoint in a single file. Arguments and errors: as for read_flat."""
    return unflatten(*read_flat(path))


def read_flat(path: Path | str) -> tuple[dict[str, torch.Tensor], dict]:
    """Returns a checkpoint's tensors, {path in its dict: memory-mapped tensor}, and its other values, {key: value}.

    Raises OSError or ValueError unless the file is a whole checkpoint of this version.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise ValueError(f"its format is {metadata.get('format_version', 'another')}, not {FORMAT_VERSION}")
    if metadata.pop("sha256", None) != digest(metadata, tensors):
        raise ValueError("its contents do not match its SHA-256")
    return tensors, {key: json.loads(text) for key, text in metadata.items()}


def digest(metadata, tensors):
    """Hexadecimal SHA-256 of a file's contents: metadata, then the tensors' names, dtypes, shapes and bytes.

    It does not depend on the order or offsets of entries in the file.
    """
    sha256 = header_digest(metadata, tensors)
    for _ in adding_to(sha256, sorted(tensors.items())):
        pass
    return sha256.hexdigest()


def sha256_of(content):
    """Hexadecimal SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def header_digest(metadata, shapes):
    """Returns the SHA-256 of everything but the tensors' bytes, which adding_to() adds."""
    facts = [(name, str(shapes[name].dtype), list(shapes[name].shape)) for name in sorted(shapes)]
    return hashlib.sha256(json.dumps([sorted(metadata.items()), facts]).encode())


def adding_to(sha256, tensors):
    """Yields the (name, CPU tensor) pairs of an iterable sorted by name, adding each tensor's bytes to the digest."""
    for name, tensor in tensors:
        sha256.update(raw(tensor))
        yield name, tensor


def raw(tensor):
    """Returns the bytes of a CPU tensor as a NumPy array, without a copy if the tensor is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


# -- conversion between a nested dict and (tensors by path, other values)


def flatten(state):
    """Splits a checkpoint's dict into the file's tensors, {name: tensor}, and the dict of all other values."""
    tensors = dict(state["model"])
    return tensors, split({key: value for key, value in state.items() if key != "model"}, "", tensors)


def split(tree, path, tensors):
    """Moves the tensors of nested dicts to `tensors`, named by their paths. Returns the dicts without them."""
    left = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{path}{key}"] = value
        else:
            left[key] = split(value, f"{path}{key}/", tensors) if isinstance(value, dict) else value
    return left


def unflatten(tensors, values):
    """Inverts flatten()."""
    state = {"model": {}, **values}
    for name, tensor in tensors.items():
        *path, last = name.split("/")
        node = state
        for key in path or ["model"]:
            node = node.setdefault(key, {})
        node[last] = tensor
    return state

"""The layout of a checkpoint file: a nested dict as safetensors and back, with a digest over everything.

Reading is the library's. Writing is not: its save_file() leaves a temporary file of its own behind when it is killed,
makes files that only their owner may read, and reports a full disk without an errno.
"""

import hashlib
import json

import torch
from safetensors import safe_open

FORMAT_VERSION = 2
TEXTS = ("config", "progress", "scaler", "optimizer")  # parts that are JSON in the metadata
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_LIMIT = 2**22  # bytes of JSON; a tensor takes about 150


def serialize(state, file):
    """Writes a checkpoint's dict to an open file."""
    tensors, metadata = flatten(state)
    metadata["sha256"] = digest(metadata, tensors)
    header, end = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        entry = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(raw(tensors[name]))


def read(path):
    """A file's metadata, {name: text}, and tensors, which are mapped: their pages are read when they are used.

    Raises ValueError or SafetensorError if it is no safetensors file or not as it was written.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(HEADER_LIMIT, path.stat().st_size - 8):
            raise ValueError(f"its header would be {size:,} bytes")
        header = file.read(size)
    with safe_open(path, framework="pt") as file:  # holds the header against the format and the size of the file
        parse(header)  # names nothing twice
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = metadata.pop("sha256", None)
    if expected is None:
        raise ValueError("it has no sha256")
    if digest(metadata, tensors) != expected:
        raise ValueError("its contents do not have the SHA-256 that it states")
    return metadata, tensors


def parse(text):
    """The value of a JSON text. Raises ValueError or RecursionError if it is none, or an object has a key twice."""

    def unique(pairs):
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("it has a key twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def digest(metadata, tensors):
    """SHA-256, in hexadecimal, of all that a file says: metadata, then names, dtypes, shapes and bytes of the tensors.

    Neither the order nor the place of anything in the file counts.
    """
    names = sorted(tensors)
    facts = [sorted(metadata.items()), [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]]
    sha256 = hashlib.sha256(json.dumps(facts).encode())
    for name in names:
        sha256.update(raw(tensors[name]))
    return sha256.hexdigest()


def raw(tensor):
    """The bytes of a tensor on the CPU, as an array; not copied if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


# -- a nested dict, and tensors by name with texts


def flatten(state):
    """The tensors of a checkpoint's dict by their names in the file, and its metadata without sha256."""
    tensors = dict(state["model"])
    values = {**state, "optimizer": split(state["optimizer"], "optimizer", tensors)}
    split(state["generators"], "generators", tensors)
    return tensors, {key: json.dumps(values[key]) for key in ("format_version", *TEXTS)}


def split(tree, path, tensors):
    """Adds the tensors of nested dicts to `tensors`, named by their paths. Returns what is left of the dicts."""
    left = {}
    for key, value in tree.items():
        name = f"{path}.{key}"
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            left[key] = split(value, name, tensors) if isinstance(value, dict) else value
    return left


def unflatten(metadata, tensors):
    """The dict that flatten() took apart. Raises ValueError if a part is missing or a tensor has no place."""
    if missing := [key for key in TEXTS if key not in metadata]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    state = {"format_version": FORMAT_VERSION, **{key: parse(metadata[key]) for key in TEXTS}}
    if wrong := [key for key in TEXTS if not isinstance(state[key], dict)]:
        raise ValueError(f"its {wrong[0]} is not a JSON object")
    state |= {"model": {}, "generators": {}}
    learned = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "generators":
            state["generators"][rest] = tensor
        elif kind == "optimizer":
            learned[rest] = tensor
        else:
            state["model"][name] = tensor
    for path, tensor in learned.items():
        put(state["optimizer"], path, tensor, state["model"])
    return state


def put(tree, path, tensor, weights):
    """Puts a tensor of path <weight>.<state> or <weight>.<state>.<part> into {weight: {state: value or {part: value}}}.

    Raises ValueError if there is no such weight, or the place is taken.
    """
    keys = path.split(".")
    for depth in (1, 2):
        weight = ".".join(keys[:-depth])
        if weight in weights:
            break
    else:
        raise ValueError(f"its optimizer.{path} is of no weight")
    node = tree
    for key in [weight, *keys[-depth:-1]]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ValueError(f"its optimizer.{path} has no place")
    if keys[-1] in node:
        raise ValueError(f"its optimizer.{path} is there twice")
    node[keys[-1]] = tensor

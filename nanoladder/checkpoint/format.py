"""Layout of a checkpoint file: converts a nested dict to safetensors and back, with a digest over everything.

The safetensors library reads files but does not write them: when killed, its save_file() leaves a temporary file
behind; it creates files that only their owner can read; and it reports a full disk without an errno.
"""

import hashlib
import json
from contextlib import contextmanager

import torch
from safetensors import safe_open

FORMAT_VERSION = 3
TEXTS = ("config", "tokenizer", "progress", "scaler", "optimizer")  # parts stored as JSON in the metadata
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
HEADER_LIMIT = 2**24  # bytes of JSON; about 150 per tensor, of which a block with AdamW has about 30


def serialize(state, file):
    """Writes a checkpoint's dict to an open binary file. Raises OSError."""
    tensors, metadata = flatten(state)
    write_tensors(file, tensors, {**metadata, "sha256": digest(metadata, tensors)})


def write_tensors(file, tensors, metadata):
    """Writes a safetensors file of {name: CPU tensor} and metadata, {name: text}. Raises OSError."""
    header, end = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all aligned
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        entry = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(raw(tensors[name]))


@contextmanager
def opened(path):
    """Yields a file opened by safetensors, and its metadata, {name: text}.

    Raises OSError, or ValueError or SafetensorError if the file is not valid safetensors.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(HEADER_LIMIT, path.stat().st_size - 8):
            raise ValueError("it does not begin as a safetensors file does")
        header = file.read(size)
    with safe_open(path, framework="pt") as file:  # validates the header against the format and the file's size
        parse(header)  # rejects duplicate names
        yield file, file.metadata() or {}


def read(path):
    """Returns a file's metadata, {name: text}, and its memory-mapped tensors, {name: tensor}.

    Raises as opened() does, and ValueError if the digest is wrong.
    """
    with opened(path) as (file, metadata):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = metadata.pop("sha256", None)
    if expected is None:
        raise ValueError("it has no sha256")
    if digest(metadata, tensors) != expected:
        raise ValueError("its contents do not match its SHA-256")
    return metadata, tensors


def parse(text):
    """Parses JSON. Raises ValueError for invalid JSON or a duplicate key, RecursionError for deep nesting."""

    def unique(pairs):
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("it has a key twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def digest(metadata, tensors):
    """Hexadecimal SHA-256 of a file's contents: metadata, then the tensors' names, dtypes, shapes and bytes.

    It does not depend on the order or offsets of entries in the file.
    """
    names = sorted(tensors)
    facts = [sorted(metadata.items()), [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]]
    sha256 = hashlib.sha256(json.dumps(facts).encode())
    for name in names:
        sha256.update(raw(tensors[name]))
    return sha256.hexdigest()


def raw(tensor):
    """Returns the bytes of a CPU tensor as a NumPy array, without a copy if the tensor is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


# -- conversion between a nested dict, and tensors by name with JSON texts


def flatten(state):
    """Splits a checkpoint's dict into the file's tensors, {name: tensor}, and its metadata without sha256."""
    tensors = dict(state["model"])
    values = {**state, "optimizer": split(state["optimizer"], "optimizer", tensors)}
    split(state["generators"], "generators", tensors)
    return tensors, {key: json.dumps(values[key]) for key in ("format_version", *TEXTS)}


def split(tree, path, tensors):
    """Moves the tensors of nested dicts to `tensors`, named by their paths. Returns the dicts without them."""
    left = {}
    for key, value in tree.items():
        name = f"{path}.{key}"
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            left[key] = split(value, name, tensors) if isinstance(value, dict) else value
    return left


def unflatten(metadata, tensors):
    """Inverts flatten(). Raises ValueError if a part is missing or a tensor's name is invalid."""
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
    """Inserts a tensor of path <weight>.<state>[.<part>] into {weight: {state: value or {part: value}}}.

    Raises ValueError if there is no such weight, or the entry already exists.
    """
    keys = path.split(".")
    for depth in (1, 2):
        weight = ".".join(keys[:-depth])
        if weight in weights:
            break
    else:
        raise ValueError(f"its optimizer.{path} belongs to no weight")
    node = tree
    for key in [weight, *keys[-depth:-1]]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ValueError(f"its optimizer.{path} conflicts with another entry")
    if keys[-1] in node:
        raise ValueError(f"its optimizer.{path} occurs twice")
    node[keys[-1]] = tensor

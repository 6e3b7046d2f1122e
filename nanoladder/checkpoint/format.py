"""Layout of a checkpoint file: converts a nested dict to safetensors and back, with a digest over everything.

The safetensors library reads files but does not write them. Its save_file() does not sync the file before it renames
it, so that a power cut can leave an empty one; when killed, it leaves a temporary file that nobody finds; only the
owner can read what it writes; and it reports a full disk without an errno.
"""

import hashlib
import json
from functools import partial

import torch
from safetensors import safe_open

from nanoladder import files

FORMAT_VERSION = 4


def write_file(path, state):
    """Writes a checkpoint's dict atomically. Raises OSError; the old file then remains."""
    tensors, metadata = flatten(state)
    metadata["sha256"] = digest(metadata, tensors)
    files.write(path, partial(write_tensors, tensors=tensors, metadata=metadata))


def write_tensors(file, tensors, metadata):
    """Writes a safetensors file of {name: CPU tensor} and metadata, {name: text}. Raises OSError."""
    header, end = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all aligned
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        entry = {"dtype": dtype_name(tensors[name].dtype), "shape": list(tensors[name].shape)}
        header[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(raw(tensors[name]))


def dtype_name(dtype):
    """A dtype's name in safetensors: torch.float32 -> F32, torch.bfloat16 -> BF16, torch.uint8 -> U8."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("float", "f").replace("uint", "u").replace("int", "i").upper()


def read(path):
    """Returns a checkpoint's dict. Its tensors are memory-mapped.

    Raises OSError, SafetensorError or ValueError unless the file is a whole checkpoint of this version.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise ValueError(f"its format is {metadata.get('format_version', 'another')}, not {FORMAT_VERSION}")
    if metadata.pop("sha256", None) != digest(metadata, tensors):
        raise ValueError("its contents do not match its SHA-256")
    return unflatten(metadata, tensors)


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


# -- conversion between a nested dict, and tensors by path with JSON texts


def flatten(state):
    """Splits a checkpoint's dict into the file's tensors, {name: tensor}, and its metadata without sha256."""
    tensors = dict(state["model"])
    values = split({key: value for key, value in state.items() if key != "model"}, "", tensors)
    return tensors, {key: json.dumps(value) for key, value in values.items()}


def split(tree, path, tensors):
    """Moves the tensors of nested dicts to `tensors`, named by their paths. Returns the dicts without them."""
    left = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{path}{key}"] = value
        else:
            left[key] = split(value, f"{path}{key}/", tensors) if isinstance(value, dict) else value
    return left


def unflatten(metadata, tensors):
    """Inverts flatten()."""
    state = {"model": {}, **{key: json.loads(text) for key, text in metadata.items()}}
    for name, tensor in tensors.items():
        *path, last = name.split("/")
        node = state
        for key in path or ["model"]:
            node = node.setdefault(key, {})
        node[last] = tensor
    return state

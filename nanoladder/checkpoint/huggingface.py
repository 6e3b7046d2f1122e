"""GPT-2 in Hugging Face's format: a folder of config.json, model.safetensors or its shards, and the tokenizer's files.

Their model is ours with other names, all biases, and the matrices of a block as (in, out), for GPT-2's Conv1D.
"""

import dataclasses
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanoladder import files
from nanoladder.checkpoint.check import config_of, shapes
from nanoladder.checkpoint.format import write_tensors
from nanoladder.checkpoint.gpt2 import HEAD, PREFIX, gpt2_name, our_weights
from nanoladder.config import GPT2
from nanoladder.data.huggingface_tokenizer import TOKENIZER, to_huggingface
from nanoladder.data.tokenizer import END_OF_TEXT, end_of_text
from nanoladder.errors import BadInput

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
FOLDER = f"a folder of {CONFIG}, {WEIGHTS} and {TOKENIZER}"
HUB_FILES = [CONFIG, WEIGHTS, "model-*-of-*.safetensors", INDEX, TOKENIZER, "vocab.json", "merges.txt"]

TRANSPOSED = ("qkv.weight", "fc.weight", "proj.weight")

SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size"}
SIZES |= {"context_length": "n_positions"}  # our key: theirs
ALIKE = {  # their key: its default, then the values with which their model computes what ours does
    "model_type": (None, "gpt2"),
    "activation_function": ("gelu_new", "gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5, 1e-5),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "reorder_and_upcast_attn": (False, False),
    "add_cross_attention": (False, False),
}


# -- finding


def find_folder(name):
    """Returns the folder of a model: a local one, or a snapshot of the hub's, downloaded unless it is cached.

    name: a folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl or the hub's owner/name. Raises BadInput.
    """
    if name and Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):  # nor a name in the hub
        raise BadInput(f"hf:{name}: no such folder; expected {FOLDER}, or a model of the hub such as gpt2")
    repositories = [f"openai-community/{name}", name] if name in GPT2 else [name]  # the cache may have either
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        reason = "downloading needs the package huggingface_hub (pip install huggingface_hub)"
    else:
        for repository in repositories:
            try:
                return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
            except Exception as error:  # a download fails in many ways
                reason = f"the hub gives no such model ({type(error).__name__})"
    raise BadInput(
        f"hf:{name}: no such folder, and {reason}; make {FOLDER}, from "
        f"https://huggingface.co/{repositories[0]}/tree/main, and give it as hf:FOLDER"
    )


# -- reading


def read(name):
    """Reads a GPT-2 from the hub or a folder. Returns the dict of checkpoint.load_model, its weights in float32.

    Raises BadInput: no such model, another architecture, tensors that are missing, unknown or of another shape.
    """
    folder = find_folder(name)
    theirs = read_config(folder / CONFIG)
    config = our_config(theirs) | {"bias": True}
    tensors = read_tensors(folder)
    try:
        if HEAD not in tensors and not theirs.get("tie_word_embeddings", True):
            raise ValueError(f"it has no {HEAD}, although its {CONFIG} does not tie it to the token embedding")
        weights = our_weights(tensors, config, TRANSPOSED)
    except (ValueError, RuntimeError, BadInput) as error:
        raise BadInput(f"hf:{name} cannot be read as a GPT-2: {error}") from None
    biases = [ours for ours in weights if ours.endswith("bias")]
    if not our_config(theirs)["bias"] and not any(weights[ours].any() for ours in biases):  # write() added them
        config["bias"] = False
        for ours in biases:
            del weights[ours]
    return {"config": config, "model": weights}


def read_shape(name):
    """Returns the config of a model as read() does, without reading its weights. Raises BadInput."""
    config = our_config(read_config(find_folder(name) / CONFIG))
    try:
        config_of({"config": config})
    except (ValueError, BadInput) as error:
        raise BadInput(f"hf:{name} cannot be read as a GPT-2: {error}") from None
    return config


def our_config(theirs):
    """Returns the config of the model, as config_of takes it, of the dict of a config.json."""
    sizes = {ours: theirs[key] for ours, key in SIZES.items()}
    return {**sizes, "bias": theirs.get("bias") is not False, "pad_vocab_to": 1}


def read_config(path):
    """Returns the dict of a config.json. Raises BadInput if its model computes something else than ours."""
    try:
        config = json.loads(files.read(path))
        n_embd = config.get("n_embd")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read ({reason}); expected {FOLDER}") from None
    for key, (default, *values) in {**ALIKE, "n_inner": (None, None, n_embd and 4 * n_embd)}.items():
        if (found := config.get(key, default)) not in values:
            expected = " or ".join(map(json.dumps, values))
            raise BadInput(f"{path} has {key}={json.dumps(found):.100}; expected {expected}, as GPT-2 has")
    if missing := [key for key in SIZES.values() if key not in config]:
        raise BadInput(f"{path} has no {' and no '.join(missing)}; expected the config of a GPT-2")
    return config


def read_tensors(folder):
    """Returns the tensors of a folder by name, without prefix. Raises BadInput."""
    path, tensors = folder / WEIGHTS, {}
    try:
        paths = [path]
        if not path.exists() and (folder / INDEX).exists():
            path = folder / INDEX
            shards = json.loads(files.read(path, limit=2**24))["weight_map"].values()
            paths = [folder / Path(shard).name for shard in sorted(set(shards))]
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.removeprefix(PREFIX) in tensors:
                        raise ValueError(f"{name} comes twice")
                    tensors[name.removeprefix(PREFIX)] = file.get_tensor(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        remedy = f"expected {FOLDER}"
        if (folder / "pytorch_model.bin").exists():
            remedy = f"a pickle is not read; transformers writes {WEIGHTS}: from_pretrained, then save_pretrained"
        raise BadInput(f"{path} cannot be read ({error}); {remedy}") from None
    return tensors


# -- writing


def write(folder, state, encoding=None):
    """Writes a model and its tokenizer into a folder that transformers loads. Returns the paths of its files.

    state: a dict with "config" and "model", as a checkpoint has. encoding: a tiktoken.Encoding. A model without biases
    gets biases of zero. Raises BadInput if the folder holds anything, or cannot be written.
    """
    folder, config = Path(folder), config_of(state)
    eot = encoding and end_of_text(encoding)
    contents = {
        WEIGHTS: partial(write_tensors, tensors=their_tensors(config, state["model"]), metadata={"format": "pt"}),
        GENERATION: to_json({"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}),
        CONFIG: to_json(their_config(config, state["config"].get("dropout", 0.0), eot)),
    }
    if encoding:
        contents[TOKENIZER] = to_json(to_huggingface(encoding))
        contents[TOKENIZER_CONFIG] = to_json(tokenizer_config(config, eot))
    write_folder(folder, contents)
    return [folder / name for name in contents]


def to_json(content):
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def their_config(config, dropout, eot):
    """The contents of config.json. eot: id of `<|endoftext|>`, or None."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, (_, *values) in ALIKE.items()},
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        **dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout),
        **dict.fromkeys(["bos_token_id", "eos_token_id"], eot),
        "bias": config.bias,  # read() reads it, transformers does not: its biases are there, all zero
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def tokenizer_config(config, eot):
    """The contents of tokenizer_config.json: tokenizer.json is used as it is, not rebuilt as a GPT-2's."""
    special = {} if eot is None else dict.fromkeys(["bos_token", "eos_token"], END_OF_TEXT)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }


def their_tensors(config, weights):
    """Our weights under their names, matrices transposed, padded rows left out. The tied head is not written."""
    tensors = {}
    for name, shape in shapes(dataclasses.replace(config, bias=True, pad_vocab_to=1)):
        weight = weights[name][: shape[0]] if name in weights else torch.zeros(shape)
        tensors[PREFIX + gpt2_name(name)] = weight.t() if name.endswith(TRANSPOSED) else weight
    return tensors


def write_folder(folder, contents):
    """Writes {name: content} into a folder that is new or empty: all of them or, if killed, none."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        if folder.exists() and (held := sorted(path.name for path in folder.iterdir())):
            raise BadInput(f"{folder} holds {held[0]}; delete it, or choose another folder")
        temporary.mkdir(parents=True)
        for name, content in contents.items():
            files.write(temporary / name, content)
        os.replace(temporary, folder)
        files.sync_folder(folder.parent)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

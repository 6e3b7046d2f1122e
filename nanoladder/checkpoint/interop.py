"""Models of other programs: reads GPT-2 in Hugging Face's and nanoGPT's formats, writes any model for Hugging Face.

A GPT-2 is ours with other names: a folder of config.json, model.safetensors or its shards, and the tokenizer's files;
or nanoGPT's ckpt.pt. Hugging Face's has all biases, and the matrices of a block as (in, out), for GPT-2's Conv1D. Any
other model is written with its code, under our names; it is not read.
"""

import dataclasses
import json
import pickle
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from model import GPT
from nanoladder import files
from nanoladder.checkpoint.format import reading, write_tensors
from nanoladder.checkpoint.shape import RECIPE, config_of
from nanoladder.config import DEFAULTS
from nanoladder.data.huggingface_tokenizer import TOKENIZER, to_huggingface
from nanoladder.data.tokenizer import END_OF_TEXT, end_of_text
from nanoladder.errors import BadInput

PARTS = {  # of a weight's name
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention": "attn",
    "qkv": "c_attn",
    "mlp_norm": "ln_2",
    "fc": "c_fc",
    "proj": "c_proj",
    "norm": "ln_f",
}
PREFIX, HEAD = "transformer.", "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, in older files


def gpt2_name(name):
    """Returns GPT-2's name of a weight, without prefix: blocks.3.mlp.fc.bias -> h.3.mlp.c_fc.bias."""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


def shapes(config):
    """Returns {name: shape} of a model's weights, a tied one once."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(config).named_parameters()}


def our_weights(tensors, config, transposed=()):
    """Returns {our name: tensor} of {GPT-2's name without prefix: tensor}, which it empties. Copies nothing.

    config: the dict of the model's config. transposed: ends of our names of the weights that the file has as (in, out).
    Raises KeyError if a tensor is missing, ValueError if one is unknown, of another shape, or if the head is not tied.
    """
    weights = {}
    for name, shape in shapes(config_of({"config": config})).items():
        tensor = tensors.pop(gpt2_name(name))
        tensor = tensor.t() if name.endswith(transposed) else tensor
        if tensor.shape != shape:
            raise ValueError(f"its {gpt2_name(name)} is {tuple(tensor.shape)}, unlike what its config says")
        weights[name] = tensor
    head, tokens = tensors.pop(HEAD, None), weights["token_embedding.weight"]
    if head is not None and not torch.equal(head.float(), tokens.float()):
        raise ValueError(f"its {HEAD} differs from the token embedding; here the two are tied")
    if unknown := [name for name in tensors if not name.endswith(MASKS)]:
        raise ValueError(f"it has tensors that GPT-2 does not have, such as {min(unknown)}")
    return weights


# -- nanoGPT's ckpt.pt: a dict that torch.save wrote, with the shape in model_args

COMPILED = "_orig_mod."  # torch.compile's prefix of every name
GPT2_VOCABULARY, PADDED = 50257, 50304  # nanoGPT counts the rows of its padding as tokens


def read_nanogpt(path):
    """Returns a dict with the "config" and the weights, "model", of nanoGPT's checkpoint. Its tensors are mapped.

    Executes nothing: raises Damaged if the file holds more than tensors and plain values, or is not whole. The
    optimizer's state is not used.
    """
    with reading(path, "a ckpt.pt of nanoGPT"):
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise ValueError("it holds more than tensors and plain values: loading it could run code") from None
        arguments = saved["model_args"]
        config = {key: arguments[key] for key in ("n_layer", "n_head", "n_embd", "bias", "vocab_size")}
        config |= {"context_length": arguments["block_size"], "pad_vocab_to": 1}
        if config["vocab_size"] == PADDED:
            config |= {"vocab_size": GPT2_VOCABULARY, "pad_vocab_to": 64}
        tensors = {name.removeprefix(COMPILED).removeprefix(PREFIX): value for name, value in saved["model"].items()}
        return {"config": config, "model": our_weights(tensors, config)}


# -- Hugging Face's, read

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
WEIGHTS, SHARDS = "model.safetensors", "model-*.safetensors"
KIND = f"a GPT-2 in Hugging Face's format: a folder of {CONFIG}, {WEIGHTS} and {TOKENIZER}"
CODE = "modeling_nanoladder"  # the module beside any other model, and its classes
CLASSES = {"AutoConfig": "NanoladderConfig", "AutoModelForCausalLM": "NanoladderForCausalLM"}
HUB_FILES = [CONFIG, WEIGHTS, SHARDS, TOKENIZER]

TRANSPOSED = ("qkv.weight", "fc.weight", "proj.weight")

SIZES = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
SIZES |= {"context_length": "n_positions"}  # our key: theirs
OWN = [*SIZES, "dropout", "seed", "zero_init"]  # keys of ours that the code reads from config.json
ALIKE = {  # their key: its default, then the values with which their model computes what ours does
    "model_type": (None, "gpt2"),
    "activation_function": ("gelu_new", "gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5, 1e-5),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
}


def find_folder(name):
    """Returns the folder of a model: a local one, or a snapshot of the hub's, downloaded unless it is cached.

    name: a folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl or the hub's owner/name. Raises BadInput.
    """
    if name and Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # a download fails in many ways
        raise BadInput(
            f"hf:{name}: no such folder, and no model could be downloaded ({type(error).__name__}), which needs the "
            f"network and the package huggingface_hub; expected a model of https://huggingface.co, such as hf:gpt2, or "
            f"hf:FOLDER, with its {CONFIG}, {WEIGHTS} and {TOKENIZER}"
        ) from None


def read_huggingface(name):
    """Reads a GPT-2 from the hub or a folder. Returns the dict of checkpoint.load_model: mapped, in the file's dtype.

    Raises BadInput: no such model, another architecture, tensors that are missing, unknown or of another shape.
    """
    folder = find_folder(name)
    config = read_config(folder)
    with reading(folder, KIND):
        weights = our_weights(read_tensors(folder), config | {"bias": True}, TRANSPOSED)
    biases = [ours for ours in weights if ours.endswith("bias")]
    config["bias"] |= any(weights[ours].any() for ours in biases)
    if not config["bias"]:  # write_huggingface() added them
        weights = {ours: weight for ours, weight in weights.items() if ours not in biases}
    return {"config": config, "model": weights}


def read_config(folder):
    """Returns the config of a model, as config_of takes it. Raises BadInput unless it is a GPT-2 such as ours."""
    with reading(folder, KIND):
        theirs = json.loads(files.read(folder / CONFIG))
        for key, (default, *values) in ALIKE.items():
            if (found := theirs.get(key, default)) not in values:
                expected = " or ".join(map(json.dumps, values))
                raise ValueError(f"{CONFIG} has {key}={json.dumps(found):.100}; expected {expected}")
        config = {ours: theirs[key] for ours, key in SIZES.items()}
        config |= {"bias": theirs.get("bias") is not False, "pad_vocab_to": 1}
        config_of({"config": config})
    return config


def read_tensors(folder):
    """Returns the tensors of a folder by name, without prefix."""
    paths = sorted(folder.glob(WEIGHTS)) or sorted(folder.glob(SHARDS))
    if not paths:
        raise ValueError(f"it has no {WEIGHTS}; transformers' save_pretrained writes it, also from a pickled model")
    return {name.removeprefix(PREFIX): tensor for path in paths for name, tensor in load_file(path).items()}


# -- Hugging Face's, written


def is_gpt2(config):
    """True if the model of a config is a GPT-2, which transformers knows."""
    return all(getattr(config, key) == DEFAULTS[key] for key in RECIPE)


def write_huggingface(folder, state, encoding=None, code=None):
    """Writes a model and its tokenizer into a folder that transformers loads. Returns the paths of its files.

    state: a dict with "config" and "model", as a checkpoint has. encoding: a tiktoken.Encoding. code: the source of the
    model's code, unless it is a GPT-2. A GPT-2 without biases gets biases of zero. Raises BadInput if the folder holds
    anything, or cannot be written.
    """
    folder, config = Path(folder), config_of(state)
    eot, values = encoding and end_of_text(encoding), DEFAULTS | state["config"]
    contents = {}
    if encoding:
        contents[TOKENIZER] = to_json(to_huggingface(encoding))
        contents[TOKENIZER_CONFIG] = to_json(tokenizer_config(config, eot))
    if code:
        tensors, fields = own_tensors(config, state["model"]), own_config(config, values, eot)
        contents[f"{CODE}.py"] = code
    else:
        tensors, fields = their_tensors(config, state["model"]), their_config(config, values["dropout"], eot)
    contents[WEIGHTS] = partial(write_tensors, shapes=tensors, tensors=tensors.items(), metadata={"format": "pt"})
    contents[CONFIG] = to_json(fields)  # last: without it, no model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if held := sorted(path.name for path in folder.iterdir()):
            raise BadInput(f"{folder} holds {held[0]}; delete it, or choose another folder")
        for name, content in contents.items():
            files.write(folder / name, content)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from None
    return [folder / name for name in contents]


def to_json(content):
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def their_config(config, dropout, eot):
    """The contents of a GPT-2's config.json. dropout: the run's. eot: id of `<|endoftext|>`, or None."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, (_, *values) in ALIKE.items()},
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        **dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout),
        **dict.fromkeys(["bos_token_id", "eos_token_id"], eot),
        "bias": config.bias,  # read_huggingface() reads it, transformers does not: its biases are there, all zero
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def own_config(config, values, eot):
    """The contents of config.json for any other model, whose code holds the rest of the config. Arguments as above."""
    return {
        "architectures": ["NanoladderForCausalLM"],
        "model_type": "nanoladder",
        "auto_map": {name: f"{CODE}.{own}" for name, own in CLASSES.items()},
        **{key: values[key] for key in OWN},
        **dict.fromkeys(["bos_token_id", "eos_token_id"], eot),
        "tie_word_embeddings": config.tie_embeddings,
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
    for name, shape in shapes(dataclasses.replace(config, bias=True, pad_vocab_to=1)).items():
        weight = weights[name][: shape[0]] if name in weights else torch.zeros(shape)
        tensors[PREFIX + gpt2_name(name)] = weight.t() if name.endswith(TRANSPOSED) else weight
    return tensors


def own_tensors(config, weights):
    """Our weights as the code beside them names them, padded rows left out. A tied head is not written."""
    sizes = shapes(dataclasses.replace(config, pad_vocab_to=1)).items()
    return {f"model.{name}": weights[name][: shape[0]] for name, shape in sizes}

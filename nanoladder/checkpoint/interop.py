"""Models of other programs: reads GPT-2 in Hugging Face's and nanoGPT's formats, writes any model for Hugging Face.

A GPT-2 is our model under other names: a folder with config.json, model.safetensors or its shards, and the tokenizer's
files; or nanoGPT's ckpt.pt. Hugging Face's always has biases, and stores a block's matrices as (in, out), for GPT-2's
Conv1D. Any other model is written together with its code, under our names; it cannot be read back.
"""

import dataclasses
import json
import pickle
from functools import partial
from pathlib import Path

import torch

from nanoladder import files
from nanoladder.checkpoint.format import FLOATS, read_tensors, reading, write_tensors
from nanoladder.checkpoint.shape import RECIPE, config_of, shapes
from nanoladder.config import DEFAULTS, Config
from nanoladder.errors import BadInput, writing
from nanoladder.tokenizer.encoding import END_OF_TEXT, end_of_text
from nanoladder.tokenizer.hub import find_folder
from nanoladder.tokenizer.huggingface import TOKENIZER, TOKENIZER_CONFIG, to_huggingface

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
PREFIX, HEAD, TOKENS = "transformer.", "lm_head.weight", "wte.weight"
WRAPPERS = {  # parts of a name that torch.compile, DDP, FSDP, activation checkpointing and GPT-2's own head add
    *("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "transformer"),
}
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, in older files


def gpt2_name(name: str) -> str:
    """Returns GPT-2's name for a weight, without prefix: blocks.3.mlp.fc.bias -> h.3.mlp.c_fc.bias."""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


def unwrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns {name without parts that wrappers add: tensor}. Raises ValueError if two names become one."""
    names = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in tensors}
    if len({*names.values()}) < len(names):
        raise ValueError("it has a weight under two names, which differ in their prefix")
    return {names[name]: tensor for name, tensor in tensors.items()}


def our_weights(tensors, config, transposed=()):
    """Converts {GPT-2's name: tensor}, without wrappers' parts, to {our name: tensor}. Empties its argument.

    Copies nothing. config: the model's config as a dict. transposed: suffixes of our names for weights that the file
    stores as (in, out). Raises KeyError if a tensor is missing; ValueError if one is unknown or has another shape, or
    if the head is not tied.
    """
    weights = {}
    if HEAD in tensors:
        tensors.setdefault(TOKENS, tensors[HEAD])  # tied, and stored under the head's name alone
    for name, shape in shapes(config_of({"config": config}), tensors).items():
        source, swapped = gpt2_name(name), name.endswith(transposed)
        tensor, expected = tensors.pop(source), tuple(shape[::-1] if swapped else shape)
        if not is_plain(tensor):
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ValueError(f"its {source} is {kind}; expected a tensor of one of {', '.join(map(str, FLOATS))}")
        if tensor.shape != expected:
            raise ValueError(f"its {source} is {tuple(tensor.shape)}, where its config says {expected}")
        weights[name] = tensor.t() if swapped else tensor
    head, tokens = tensors.pop(HEAD, None), weights["token_embedding.weight"]
    if head is not None and not torch.equal(head.float(), tokens.float()):
        raise ValueError(f"its {HEAD} differs from its {TOKENS}; here the two are tied")
    if unknown := [name for name in tensors if not name.endswith(MASKS)]:
        raise ValueError(f"it has tensors that GPT-2 does not have, such as {min(unknown)}")
    return weights


def is_plain(value):
    """True for a tensor of floats that has its numbers here: neither sparse nor quantized nor on the meta device."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in FLOATS
        and (value.layout, value.device.type) == (torch.strided, "cpu")
    )


# -- nanoGPT's ckpt.pt: a dict written by torch.save, with the shape in model_args

GPT2_VOCABULARY, PADDED = 50257, 50304  # nanoGPT counts its padding rows as tokens


def read_nanogpt(path):
    """Returns a nanoGPT checkpoint as a dict: "config", and the weights as "model". Tensors are memory-mapped.

    Executes nothing: raises Damaged if the file holds anything but tensors and plain values, or is incomplete. The
    optimizer state is ignored.
    """
    with reading(path, "a ckpt.pt of nanoGPT"):
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise ValueError("it holds more than tensors and plain values: loading it could run code") from None
        arguments = saved["model_args"]
        config = {key: arguments[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
        config["bias"] = arguments.get("bias", True)  # there was no choice before February 2023
        config |= {"context_length": arguments["block_size"], "pad_vocab_to": 1}
        if config["vocab_size"] == PADDED:
            config |= {"vocab_size": GPT2_VOCABULARY, "pad_vocab_to": 64}
        return {"config": config, "model": our_weights(unwrapped(saved["model"]), config)}


# -- reading Hugging Face's format

CONFIG = "config.json"
WEIGHTS, SHARDS = "model.safetensors", "model-*.safetensors"
KIND = f"a GPT-2 in Hugging Face's format: a folder of {CONFIG}, {WEIGHTS} and {TOKENIZER}"
CODE = "modeling_nanoladder"  # the module written beside any model but GPT-2, and its classes
CLASSES = {"AutoConfig": "NanoladderConfig", "AutoModelForCausalLM": "NanoladderForCausalLM"}
HUB_FILES = [CONFIG, WEIGHTS, SHARDS, TOKENIZER, TOKENIZER_CONFIG]

TRANSPOSED = ("qkv.weight", "fc.weight", "proj.weight")

SIZES = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
SIZES |= {"context_length": "n_positions"}  # our key: GPT-2's
CUSTOM_KEYS = [*SIZES, "dropout", "seed", "zero_init"]  # our keys that the code reads from config.json
ALIKE = {  # their key: its default, then the values for which their model computes the same as ours
    "model_type": (None, "gpt2"),
    "activation_function": ("gelu_new", "gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5, 1e-5),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "add_cross_attention": (False, False),
    "tie_word_embeddings": (True, True),
}  # reorder_and_upcast_attn changes the order and precision of the same products


def read_huggingface(name):
    """Reads a GPT-2 from the hub or a folder. Returns a dict as load_model does: mapped, in the file's dtype.

    Raises BadInput if there is no such model, its architecture is another, or tensors are missing, unknown or of
    another shape.
    """
    folder = find_folder(name, HUB_FILES)
    config = read_config(folder)
    with reading(folder, KIND):
        weights = our_weights(tensors_in(folder), config | {"bias": True}, TRANSPOSED)
    biases = [ours for ours in weights if ours.endswith("bias")]
    config["bias"] |= any(weights[ours].any() for ours in biases)
    if not config["bias"]:  # write_huggingface() added them
        weights = {ours: weight for ours, weight in weights.items() if ours not in biases}
    return {"config": config, "model": weights}


def read_config(folder):
    """Returns a model's config, as config_of takes it. Raises BadInput unless it is a GPT-2 that matches ours."""
    with reading(folder, KIND):
        fields = json.loads(files.read(folder / CONFIG))
        for key, (default, *values) in ALIKE.items():
            if (value := fields.get(key, default)) not in values:
                expected = " or ".join(map(json.dumps, values))
                raise ValueError(f"{CONFIG} has {key}={json.dumps(value):.100}; expected {expected}")
        config = {ours: fields[key] for ours, key in SIZES.items()}
        for key in SIZES.values():
            if type(fields[key]) is not int:
                raise ValueError(f"{CONFIG} has {key}={json.dumps(fields[key]):.100}; expected a whole number")
        if (inner := fields.get("n_inner")) not in (None, 4 * fields["n_embd"]):
            raise ValueError(
                f"{CONFIG} has n_inner={inner}; expected null or {4 * fields['n_embd']}, four times n_embd"
            )
        config |= {"bias": fields.get("bias") is not False, "pad_vocab_to": 1}
        config_of({"config": config})
    return config


def tensors_in(folder):
    """Returns {name: tensor} for all tensors in a folder."""
    paths = sorted(folder.glob(WEIGHTS)) or sorted(folder.glob(SHARDS))
    if not paths:
        raise ValueError(f"it has no {WEIGHTS}; transformers' save_pretrained writes it, also from a pickled model")
    return unwrapped({name: tensor for path in paths for name, tensor in read_tensors(path)[0].items()})


# -- writing Hugging Face's format


def is_gpt2(config):
    """True if a config's model is a GPT-2, which transformers implements."""
    return all(getattr(config, key) == DEFAULTS[key] for key in RECIPE)


def write_huggingface(folder, state, encoding=None, code=None):
    """Writes a model and its tokenizer to a folder that transformers can load. Returns the paths of the files.

    state: a dict with "config" and "model", as in a checkpoint. encoding: a tiktoken.Encoding. code: source code of the
    model, unless it is a GPT-2. A GPT-2 without biases gets zero biases. Raises BadInput if the folder is not empty or
    cannot be written.
    """
    folder, config = Path(folder), config_of(state)
    eot, values = encoding and end_of_text(encoding), DEFAULTS | state["config"]
    contents = {}
    if encoding:
        contents[TOKENIZER] = to_json(to_huggingface(encoding))
        contents[TOKENIZER_CONFIG] = to_json(tokenizer_config(config, eot))
    if code:
        tensors, fields = custom_tensors(config, state["model"]), custom_config(config, values, eot)
        contents[f"{CODE}.py"] = code
    else:
        tensors, fields = gpt2_tensors(config, state["model"]), gpt2_config(config, values["dropout"], eot)
    contents[WEIGHTS] = partial(write_tensors, shapes=tensors, tensors=tensors.items(), metadata={"format": "pt"})
    contents[CONFIG] = to_json(fields)  # last: without it, the folder is not a model
    with writing(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if held := sorted(path.name for path in folder.iterdir()):
            raise BadInput(f"{folder} holds {held[0]}; delete it, or choose another folder")
        for name, content in contents.items():
            files.write(folder / name, content)
    return [folder / name for name in contents]


def to_json(content):
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def gpt2_config(config: Config, dropout: float, eot: int | None) -> dict:
    """Returns the contents of a GPT-2's config.json. dropout: the run's. eot: id of `<|endoftext|>`, or None."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, (_, *values) in ALIKE.items()},
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        **dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout),
        **dict.fromkeys(["bos_token_id", "eos_token_id"], eot),
        "bias": config.bias,  # for read_huggingface(); transformers ignores it, and always has biases, here all zero
        "dtype": "float32",
    }


def custom_config(config, values, eot):
    """Returns any other model's config.json; its code holds the rest of the config. Arguments as above."""
    return {
        "architectures": ["NanoladderForCausalLM"],
        "model_type": "nanoladder",
        "auto_map": {name: f"{CODE}.{own}" for name, own in CLASSES.items()},
        **{key: values[key] for key in CUSTOM_KEYS},
        **dict.fromkeys(["bos_token_id", "eos_token_id"], eot),
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def tokenizer_config(config, eot):
    """Returns the contents of tokenizer_config.json: tokenizer.json is used unchanged, not rebuilt as GPT-2's."""
    special = {} if eot is None else dict.fromkeys(["bos_token", "eos_token"], END_OF_TEXT)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }


def gpt2_tensors(config: Config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns our weights under GPT-2's names: matrices transposed, without padding rows or the tied head."""
    tensors = {}
    for name, shape in shapes(dataclasses.replace(config, bias=True, pad_vocab_to=1), weights).items():
        weight = weights[name][: shape[0]] if name in weights else torch.zeros(shape)
        tensors[PREFIX + gpt2_name(name)] = weight.t() if name.endswith(TRANSPOSED) else weight
    return tensors


def custom_tensors(config, weights):
    """Returns our weights under the names in the code beside them, without padding rows or a tied head."""
    sizes = shapes(dataclasses.replace(config, pad_vocab_to=1), weights).items()
    return {f"model.{name}": weights[name][: shape[0]] for name, shape in sizes}

"""Models in any format: a checkpoint of ours, Hugging Face's GPT-2, nanoGPT's ckpt.pt. Their tokenizers too.

A source names one: hf:NAME or hf:FOLDER, the path of a ckpt.pt of nanoGPT, or that of a checkpoint.
"""

import contextlib
import dataclasses
from pathlib import Path

from model import GPT
from nanoladder.checkpoint import huggingface, load, nanogpt
from nanoladder.checkpoint.check import SHAPE, config_of
from nanoladder.checkpoint.folder import best_or_last
from nanoladder.data.huggingface_tokenizer import from_huggingface
from nanoladder.data.tokenizer import identify, load_tokenizer
from nanoladder.errors import BadInput

HUB = "hf:"


def add_source(parser):
    """Adds the options that name a script's model: --out_dir and --checkpoint, or --model."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--out_dir", default="out/quickstart", help="run folder (default: %(default)s)")
    group.add_argument("--model", help="a model from elsewhere instead: hf:gpt2, hf:FOLDER or a ckpt.pt of nanoGPT")
    parser.add_argument("--checkpoint", choices=["best", "last"], help="of the run (default: best)")


def source_of(options):
    """Returns the source that the options of add_source() name. Raises BadInput if there is no such run."""
    if options.model and options.checkpoint:
        raise BadInput(f"--checkpoint={options.checkpoint} applies to a run; expected --out_dir with it, not --model")
    return options.model or str(best_or_last(options.out_dir, options.checkpoint or "best"))


def load_model(source):
    """Returns a dict with the "config" of a model, as config_of takes it, and its weights, "model", on the CPU.

    The weights are averaged ones, if the run keeps an average. Raises BadInput.
    """
    source = str(source)
    if source.startswith(HUB):
        return huggingface.read(source.removeprefix(HUB))
    if source.endswith(".pt") and Path(source).is_file():
        return nanogpt.read(source)
    state = load.load(source)
    state["model"] |= {name: own["average"] for name, own in state["optimizer"].items() if "average" in own}
    return state


def shape_of(source):
    """Returns the config keys that fix the shape of a source's model, {key: value}. Raises BadInput."""
    if source.startswith(HUB):
        config = huggingface.read_config(huggingface.find_folder(source.removeprefix(HUB)))
    else:
        config = load_model(source)["config"]  # the weights stay in the mapped file
    return {key: config[key] for key in SHAPE if key in config}


def load_gpt(source):
    """Returns a source's GPT, on the CPU. Raises BadInput."""
    return build_gpt(load_model(source), source)


def build_gpt(state, source, context_length=0):
    """Returns the GPT of what load_model() returned for the source, with another context_length if that is not 0."""
    config = config_of(state)
    model = GPT(dataclasses.replace(config, context_length=context_length or config.context_length))
    load.load_weights(model, state, source)
    return model


def check_tokenizer(dataset, name, state, source):
    """Returns what is known of the tokenizer of a source's model and of a dataset, as snapshot() takes it.

    name: the dataset's. state: what load_model() returned. Raises BadInput if the tokenizers differ; where only that
    of the dataset is known, if their numbers of tokens do.
    """
    ours, theirs, n_tokens = dataset.find_tokenizer(), state.get("tokenizer", {}), state["config"]["vocab_size"]
    if "tokenizer" not in state:
        with contextlib.suppress(BadInput):  # there is none, or one that tiktoken cannot be
            theirs = identify(tokenizer_of(source, n_tokens))
    if ours is None:
        return theirs
    if identify(ours) != theirs if theirs else ours.n_vocab != n_tokens:
        other = state["config"].get("dataset", name)
        advice = f"--dataset={other}, or " if other != name else ""
        raise BadInput(
            f"dataset={name} has another tokenizer ({ours.name}, {ours.n_vocab} tokens) than the model of {source} "
            f"was trained with; expected {advice}data prepared with that model's tokenizer"
        )
    return identify(ours)


def tokenizer_of(source, vocab_size):
    """Returns the tokenizer, a tiktoken.Encoding, of a source whose model has vocab_size token ids.

    It lies beside the weights. Raises BadInput if there is none, or it has more tokens than the model.
    """
    if str(source).startswith(HUB):
        folder = huggingface.find_folder(str(source).removeprefix(HUB))
        tokenizer = from_huggingface(folder)
    else:
        folder = Path(source).parent
        tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > vocab_size:
        raise BadInput(
            f"tokenizer in {folder}: {tokenizer.n_vocab} tokens, more than the model's vocab_size={vocab_size}; "
            "expected the tokenizer that the model was trained with"
        )
    return tokenizer

"""Formats in which a model may come: a checkpoint of ours, Hugging Face's GPT-2, nanoGPT's ckpt.pt."""

from pathlib import Path

from nanoladder.checkpoint import huggingface, load, nanogpt


def load_model(source):
    """Returns a dict with the "config" of a model, as config_of takes it, and its weights, "model", on the CPU.

    source: hf:NAME or hf:FOLDER, a ckpt.pt of nanoGPT, or a checkpoint. Raises BadInput.
    """
    if source.startswith("hf:"):
        return huggingface.read(source.removeprefix("hf:"))
    if nanogpt.wrote(Path(source)):
        return nanogpt.read(Path(source))
    return load.load(source)

"""A text from a model in training."""

import dataclasses
import textwrap

import torch

from nanoladder import checkpoint, parallel
from nanoladder.errors import BadInput
from nanoladder.infer import USUAL, CachedGPT, Prompt, Text, generate
from nanoladder.tokenizer.encoding import first_token

LENGTH, WIDTH = 100, 76  # characters of the text, and of its lines


def print_text(step, model, tokenizer, config):
    """Prints the beginning of a document, LENGTH characters or up to its end, from rank 0. Collective.

    The text comes from a whole copy of the weights on rank 0's CPU, in float32: neither the model, nor its device's
    memory, nor any random state changes. The same weights and seed give the same text. If the logits are not finite,
    nothing is printed: the next step explains it.
    """
    state = {"config": dataclasses.asdict(config), "model": checkpoint.gather_weights(model)}
    if parallel.rank():
        return
    with torch.random.fork_rng(devices=[]):  # a new model draws weights before it takes over these
        gpt = checkpoint.build_gpt(state, "the model in training")
    text = Text(tokenizer, Prompt((first_token(tokenizer),)), torch.Generator().manual_seed(config.seed), LENGTH)
    characters = ""
    try:
        for _ in generate(CachedGPT(gpt, 1, min(1 + LENGTH, config.context_length)), [text], USUAL):
            characters += text.take()
            if len(characters) >= LENGTH:
                break
    except BadInput:
        return
    print(f"step {step:{len(str(config.max_steps))}d}  sample")
    for line in readable(characters[:LENGTH]).splitlines():
        print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    ", drop_whitespace=False))


def readable(text):
    """Returns a text without characters that would control the terminal, as those of untrained bytes may."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text.expandtabs(4))

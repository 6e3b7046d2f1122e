"""Models and tokenizers for the tests of generation: small, with weights large enough that texts differ."""

import torch
from conftest import tiny

from model import GPT
from nanoladder.tokenizer.encoding import END_OF_TEXT, EVERY_CHARACTER, make_encoding

N_VOCAB, END = 57, 56
TOKENIZER = make_encoding("few", EVERY_CHARACTER, [bytes([65 + i]) for i in range(END)], {END_OF_TEXT: END})


def random_gpt(context_length, **keys):
    """A GPT with random weights and biases that rarely repeats itself."""
    gpt = GPT(tiny(vocab_size=N_VOCAB, context_length=context_length, n_embd=16, **keys)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in gpt.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    gpt.norm.weight.data *= 0.5  # flatter distributions
    return gpt


def random_tokens(n, seed=0):
    return torch.randint(END, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

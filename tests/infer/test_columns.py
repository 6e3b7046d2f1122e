"""Weights by columns: for a few rows in float32, and the same tokens."""

import pytest
import torch
from conftest import tiny

from model import GPT
from nanoladder.infer import CachedGPT


def head(n_rows, dtype=torch.float32):
    gpt = GPT(tiny(vocab_size=50)).to(dtype)
    CachedGPT(gpt, n_rows, 16)
    return gpt.head


@pytest.mark.parametrize(
    "n_rows, dtype, by_columns", [(1, torch.float32, True), (4, torch.float32, False), (1, torch.bfloat16, False)]
)
def test_few_rows_in_float32_read_weights_by_columns(n_rows, dtype, by_columns):
    assert head(n_rows, dtype).weight.is_contiguous() != by_columns


def test_the_weights_are_the_same_and_still_tied():
    expected, gpt = GPT(tiny(vocab_size=50)), GPT(tiny(vocab_size=50))
    CachedGPT(gpt, 1, 16)
    assert gpt.head.weight is gpt.token_embedding.weight
    for ours, theirs in zip(gpt.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ids = torch.tensor([[3, 49]])
    assert torch.equal(gpt.token_embedding(ids), expected.token_embedding(ids))

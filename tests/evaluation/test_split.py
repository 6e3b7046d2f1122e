"""The loss over a whole split counts every target once, and equals that of scoring one target at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import tiny, write_folder

from model import GPT
from nanoladder import data
from nanoladder.errors import BadInput
from nanoladder.evaluation import Scorer, WholeSplit

CPU = torch.device("cpu")
T = 16


def scorer(config, batch_tokens=100):
    return Scorer(GPT(config), "float32", CPU, batch_tokens)


def of_stream(folder, n_tokens):
    ids = np.random.default_rng(n_tokens).integers(0, 50, n_tokens)
    write_folder(folder, ids[:17], ids, 50)
    return tiny(dataset=str(folder), vocab_size=50)


def tokens(folder):
    return np.fromfile(folder / "val.bin", np.uint16).astype(np.int64)


def nats(model, ids):
    """Loss of the last id given the others, in nats."""
    with torch.no_grad():
        logits = model.logits(torch.tensor([ids[:-1].tolist()]))[0, -1]
    return -float(logits.double().log_softmax(0)[ids[-1]])


def by_target(model, ids, stride):
    """Loss of each target of a stream, one by one, in the first window that contains it."""
    last = len(ids) - 1 - T
    starts = [min(last, stride * max(0, math.ceil((i + 1 - T) / stride))) for i in range(len(ids) - 1)]
    return [nats(model, ids[start : i + 2]) for i, start in enumerate(starts)]


@pytest.mark.parametrize("n_tokens, stride", [(T + 1, 0), (2 * T + 1, 0), (70, 0), (3 * T - 1, 1), (70, 5), (2 * T, T)])
def test_the_loss_is_that_of_each_target_of_a_stream(n_tokens, stride, tmp_path):
    config = of_stream(tmp_path, n_tokens)
    dataset, model = data.open_dataset(config), GPT(config).eval()
    expected = by_target(model, tokens(tmp_path), stride or T)
    result = WholeSplit(dataset, "val", stride).evaluate(scorer(config))
    assert result["targets"] == len(expected) == n_tokens - 1
    assert result["loss"] == pytest.approx(np.mean(expected), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / (2 * n_tokens), rel=1e-6)


def test_the_loss_is_that_of_each_target_of_each_document(documents):
    config = tiny(dataset=str(documents), vocab_size=256)
    dataset, model = data.open_dataset(config), GPT(config).eval()
    offsets, expected = np.fromfile(documents / "val.idx", "<u8").astype(int), []
    for first, end in pairwise(offsets):
        ids = tokens(documents)[first:end]
        expected += [nats(model, ids[i // T * T : i + 2]) for i in range(len(ids) - 1)]
    result = WholeSplit(dataset, "val").evaluate(scorer(config))
    assert result["targets"] == len(expected) == offsets[-1] - len(offsets) + 1
    assert result["loss"] == pytest.approx(np.mean(expected), rel=1e-6)


@pytest.mark.parametrize(
    "kind, stride, fragment",
    [("dense", -1, "1 to context_length=16"), ("dense", 17, "1 to context_length=16"), ("documents", 4, "one by one")],
)
def test_an_invalid_stride_is_refused(kind, stride, fragment, dense, documents):
    folder = {"dense": dense, "documents": documents}[kind]
    with pytest.raises(BadInput, match=fragment):
        WholeSplit(data.open_dataset(tiny(dataset=str(folder))), "val", stride)

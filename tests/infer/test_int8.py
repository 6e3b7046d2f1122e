"""int8 keeps weights within half a step of their row and the table tied; sample.py and evaluate.py support it."""

import copy
import json

import pytest
import torch
from gpts import N_VOCAB, random_gpt
from torch import nn

import evaluate
import sample
from nanoladder import infer
from nanoladder.errors import BadInput
from nanoladder.infer.int8 import Rows


def both():
    """A GPT with random weights and biases and a padded vocabulary, and its copy in int8."""
    gpt = random_gpt(16, bias=True, pad_vocab_to=64)
    quantized = copy.deepcopy(gpt)
    infer.quantize(quantized)
    return gpt, quantized


def n_bytes(gpt):
    return sum(tensor.nbytes for tensor in [*gpt.parameters(), *gpt.buffers()])


# -- the weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_within_half_a_step_of_its_own_row(dtype):
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 20)[:, None]
    weight = weight.to(dtype)
    rows = Rows(weight)
    steps = weight.float().abs().amax(1, keepdim=True) / 127
    assert rows.codes.dtype == torch.int8 and rows().dtype == dtype
    restored = rows.codes * rows.scales
    assert ((restored - weight.float()).abs() <= steps * 0.501).all()
    assert torch.equal(Rows(torch.zeros(3, 4))(), torch.zeros(3, 4))
    assert torch.equal(rows(), restored.to(dtype)) and torch.equal(rows(torch.tensor([[3], [1]]))[:, 0], rows()[[3, 1]])


def test_every_matrix_but_the_position_embedding_is_int8_and_the_table_stored_once():
    gpt, quantized = both()
    linears = [module for module in quantized.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 9 and all(type(module.rows) is Rows for module in linears)
    assert quantized.head.rows is quantized.token_embedding.rows
    assert [name for name, parameter in quantized.named_parameters() if parameter.dim() > 1] == [
        "position_embedding.weight"
    ]
    matrices = sum(parameter.numel() for parameter in gpt.parameters() if parameter.dim() > 1)
    n_rows = sum(len(module.rows.codes) for module in linears)
    positions = gpt.position_embedding.weight.numel()
    assert n_bytes(gpt) - n_bytes(quantized) == 3 * (matrices - positions) - 4 * n_rows


# -- the logits


@torch.inference_mode()
def test_logits_are_close_and_padded_tokens_impossible():
    gpt, quantized = both()
    tokens = torch.randint(N_VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    expected, found = gpt.logits(tokens), quantized.logits(tokens)
    assert found[..., N_VOCAB:].isneginf().all()
    expected, found = expected[..., :N_VOCAB], found[..., :N_VOCAB]
    assert 0 < (found - expected).std() < 0.03 * expected.std()
    assert (found.log_softmax(-1) - expected.log_softmax(-1)).abs().mean() < 0.05 * expected.std()


# -- the commands


@pytest.mark.slow
def test_sample_writes_with_int8(trained, run_main, traced):
    words = [f"--out_dir={trained.out_dir}", "--device=cpu", "--prompt=the", "--max_new_tokens=12", "--temperature=0"]
    plain = run_main(sample.main, *words, "--dtype=float32")
    found = run_main(sample.main, *words, "--dtype=float32", "--compile", "--quantize=int8")
    assert plain.code == found.code == 0 and "tokens/s" in found.err
    assert found.out == plain.out  # of a model this sure


def test_mps_is_refused():
    with pytest.raises(BadInput, match="expected --compile, one prompt"):
        infer.require_gain(torch.device("mps"), 1, True)
    infer.require_gain(torch.device("cuda"), 1, True)


def test_evaluate_takes_int8(trained, tmp_path, run_main):
    words = [f"--out_dir={trained.out_dir}", "--device=cpu", "--dtype=float32", f"--output={tmp_path / 'x.json'}"]
    found = []
    for more in ([], ["--quantize=int8"]):
        assert run_main(evaluate.main, *words, *more).code == 0
        (split,) = json.loads((tmp_path / "x.json").read_text())["results"].values()
        found.append(split["loss"])
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.01)

"""Head and loss by exponentials: Triton's kernels in its interpreter, as machine code, and on a GPU."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu, run_interpreted
from test_loss import IGNORE, error, exact, inputs

from operators import loss
from operators.float8 import to_float8

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

SIZES = [  # tokens, vocabulary, padding, width, chunks; rows, columns and channels end within a tile or at its edge
    (40, 200, 24, 64, 3),
    (64, 256, 0, 32, 2),
    (33, 77, 59, 96, 1),
    (40, 72, 0, 40, 3),
]


@pytest.mark.slow
def test_in_the_interpreter_loss_and_gradients_equal_the_formula():
    run_interpreted(__file__)


def interpreted():
    from operators import exp_triton

    exp_triton.TILE |= {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}
    exp_triton.multiprocessors = lambda: 3
    loss.takes_exponentials = lambda *_: True  # float32 too: the interpreter's products of bfloat16 are wrong
    for n_tokens, n_vocab, padding, width, n_chunks in SIZES:
        hidden, weight, targets = inputs(n_tokens, n_vocab, padding, width)
        expected = exact(hidden, weight, targets, n_vocab)
        hidden, weight = hidden.detach(), weight.detach()
        ours = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", True)
        evaluated = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", False)
        for found, correct in zip((*ours, evaluated[0]), (*expected, expected[0]), strict=True):
            assert error(found, correct) < 2e-6
        shards = divided(hidden, weight, targets, n_vocab, n_chunks)
        for shard in shards:
            assert error(shard[0], expected[0]) < 2e-6
        assert error(shards[0][1] + shards[1][1], expected[1]) < 2e-6
        assert error(torch.cat([shards[0][2], shards[1][2]]), expected[2]) < 2e-6
    check_float8()
    check_large_losses()
    check_not_numbers()


def check_float8():
    """The loss is that of the rounded numbers' logits, and its gradient is multiplied by the numbers themselves."""
    for n_tokens, n_vocab, padding, width, n_chunks in SIZES[:3]:  # widths that are multiples of 16
        hidden, weight, targets = (tensor.detach() for tensor in inputs(n_tokens, n_vocab, padding, width, scale=0.3))
        rounded = [values.double() * scale.double() for values, scale in map(to_float8, (hidden, weight))]
        logits = (rounded[0] @ rounded[1][:n_vocab].T).requires_grad_()
        expected = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        (gradient,) = torch.autograd.grad(expected, logits)
        d_weight = F.pad(gradient.T @ hidden.double(), (0, 0, 0, padding))
        expected = expected.detach(), gradient @ weight[:n_vocab].double(), d_weight
        ours = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", True, float8=True)
        evaluated = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", False, float8=True)
        for found, correct in zip((*ours, evaluated[0]), (*expected, expected[0]), strict=True):
            assert error(found, correct) < 2e-6
        assert error(ours[0], exact(hidden, weight, targets, n_vocab)[0]) > 1e-5  # of numbers that are not rounded


def divided(hidden, weight, targets, n_vocab, n_chunks):
    """Loss and gradients in two processes, which hold half of the vocabulary each.

    They take turns, each with the messages of the other's last turn; those of the third turn are as in parallel runs.
    """
    sent, found, whole = [{}, {}], [None, None], loss.all_gather
    halves = weight.chunk(2)
    for own in [0, 1] * 3:
        numbers = itertools.count()

        def all_gather(tensor, dimension, group, own=own, numbers=numbers):
            number = next(numbers)
            sent[own][number] = tensor.clone()
            return torch.cat([process.get(number, torch.zeros_like(tensor)) for process in sent], dimension)

        loss.all_gather = all_gather
        first = own * len(halves[0])
        found[own] = loss.compute(hidden, halves[own], targets, n_vocab, n_chunks, IGNORE, first, "shards", True)
    loss.all_gather = whole
    return found


def check_large_losses():
    """Losses up to 116 nats are exact. Beyond, logits count as 116 nats above the target's: gradients are finite."""
    weight = torch.zeros(64, 32)
    weight[1, 0] = weight[2, 1] = 1.0  # the logits of tokens 1 and 2 are the first two channels
    hidden = torch.zeros(5, 32)
    hidden[:, :2] = torch.tensor([[20.0, 0], [115, 0], [300, 0], [-300, 0], [300, 200]])
    targets = torch.zeros(5, dtype=torch.long)
    of = [loss.compute(hidden[i : i + 1], weight, targets[:1], 64, 1, IGNORE, 0, "", True) for i in range(5)]
    assert abs(float(of[0][0]) - 20) < 1e-4 and abs(float(of[1][0]) - 115) < 1e-4
    assert 116 < float(of[2][0]) < 117 and abs(float(of[3][0]) - 4.143134726) < 1e-5  # of 63 tokens
    assert abs(float(of[4][0] - of[2][0]) - math.log(2)) < 1e-4
    for found, probabilities in (of[2], [[1.0, 0.0]]), (of[4], [[0.5, 0.5]]):
        torch.testing.assert_close(found[1][:, :2], torch.tensor(probabilities))
        assert all(torch.isfinite(tensor).all() for tensor in found)


def check_not_numbers():
    """A NaN in a row of hidden states, or in the weights of any token, makes the loss NaN, and the gradients."""
    hidden, weight, targets = (tensor.detach() for tensor in inputs(40, 72, 24, 32))
    targets[targets == 5] = 6  # then NaN reaches no row by its target
    for tensor, row in (hidden, (targets != IGNORE).nonzero()[0]), (weight, 5):
        number, tensor[row, 3] = tensor[row, 3].clone(), math.nan
        for needs_grad, float8 in itertools.product((True, False), (False, True)):
            found = loss.compute(hidden, weight, targets, 72, 2, IGNORE, 0, "", needs_grad, float8)
            assert all(part.isnan().any() for part in found[: 3 if needs_grad else 1])
        tensor[row, 3] = number
    hidden[targets == IGNORE] = weight[72:] = math.nan  # neither counts
    assert loss.compute(hidden, weight, targets, 72, 2, IGNORE, 0, "", False)[0].isfinite()


@pytest.mark.parametrize(
    ("device", "dtype", "width", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, 64, (9, 0), True),
        ("cuda", torch.bfloat16, 64, (12, 0), True),
        ("cuda", torch.bfloat16, 64, (8, 0), False),  # without the unit that copies tiles
        ("cuda", torch.float16, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 60, (9, 0), False),  # rows of tiles begin at multiples of 16 bytes
        ("cpu", torch.bfloat16, 64, (9, 0), False),
    ],
)
def test_exponentials_are_used_only_on_gpus_that_support_them(device, dtype, width, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(loss, "triton_obstacle", lambda: "")
    hidden = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, shape=(8, width))
    assert loss.takes_exponentials(hidden, torch.empty(128, width)) is expected
    assert not loss.takes_exponentials(hidden, torch.empty(129, width))


MULTIPLY = {  # the tensor cores' instructions
    (90, "bf16"): ("sass", "HGMMA"),
    (90, "fp8e4nv"): ("sass", r"QGMMA\S*\.F32\.E4M3\.E4M3"),
    (100, "bf16"): ("ptx", r"tcgen05\.mma\S*kind::f16"),
    (100, "fp8e4nv"): ("ptx", r"tcgen05\.mma\S*kind::f8f6f4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_machine_code_copies_whole_tiles_without_local_memory(capability, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from operators.exp_triton import head_loss_gemm, tile_of

    in_float8 = dtype == "fp8e4nv"
    tile = tile_of(torch.empty(0, dtype=torch.float8_e4m3fn if in_float8 else torch.bfloat16))
    m, n, k = (tile[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    options = {"C": 256, "TILES": 393, "WRITE": True, "STRIDE": 264, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    blocks = {"hidden": [m, k], "weight": [n, k], "out": [m, n // 2]}
    kinds = {"hidden": dtype, "weight": dtype, "out": "bf16"}
    signature = {name: f"tensordesc<{kinds[name]}[{rows},{columns}]>" for name, (rows, columns) in blocks.items()}
    signature |= {"shifts": "*fp32", "scale": "*fp32", "sums": "*fp32", "n": "i32", "n_real": "i32"}
    options |= {} if in_float8 else {"scale": None}
    signature |= dict.fromkeys(options, "constexpr")
    constants = {(head_loss_gemm.arg_names.index(name),): value for name, value in options.items()}
    source = ASTSource(head_loss_gemm, signature, constexprs=constants)
    options = {key: tile[key] for key in tile if key[0] == "n"}
    asm = triton.compile(source, GPUTarget("cuda", capability, 32), options).asm
    assert "min.NaN.f32" in asm["ptx"] and "min.f32" not in asm["ptx"]  # the latter drops NaN
    assert "UTMALDG" in asm["sass"] and "UTMASTG" in asm["sass"]  # the GPU's unit for copies of tiles
    if capability in (90, 100):
        language, instruction = MULTIPLY[capability, dtype]
        assert re.search(instruction, asm[language])
    if capability == 90 or in_float8:
        assert not re.search(r"\b(?:LDL|STL)\b", asm["sass"])


@needs_gpu
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("shape", [*SIZES[:3], (1000, 50257, 47, 256, 3)])
def test_on_a_gpu_loss_and_gradients_are_as_exact_as_bfloat16(shape, float8):
    n_tokens, n_vocab, padding, width, n_chunks = shape
    hidden, weight, targets = inputs(n_tokens, n_vocab, padding, width, scale=0.3, dtype=torch.bfloat16)
    expected = exact(hidden, weight, targets, n_vocab)
    hidden, weight, targets = hidden.detach().bfloat16().cuda(), weight.detach().cuda(), targets.cuda()
    assert loss.takes_exponentials(hidden, weight)
    ours = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", True, float8)
    evaluated = loss.compute(hidden, weight, targets, n_vocab, n_chunks, IGNORE, 0, "", False, float8)
    assert error(ours[0].cpu(), expected[0]) < (1e-2 if float8 else 1e-5) and torch.equal(ours[0], evaluated[0])
    for found, correct in zip(ours[1:], expected[1:], strict=True):
        assert error(found.cpu(), correct) < (2**-3 if float8 else 2**-7)


if __name__ == "__main__":  # in the interpreter, which Triton checks for when it is imported
    interpreted()

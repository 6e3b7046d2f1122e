"""Head and loss as one operator: exact, also when compiled."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanoladder.run import header
from operators import count_chunks, head_loss, loss

IGNORE = -100


def inputs(n_tokens=37, n_vocab=200, padding=24, width=16, ignored=0.2, scale=1.0, seed=0, dtype=torch.float32):
    """hidden, weight and targets with random numbers that the dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_tokens, width, generator=generator).to(dtype).float().requires_grad_()
    weight = scale * torch.randn(n_vocab + padding, width, generator=generator)
    weight = weight.to(dtype).float().requires_grad_()
    targets = torch.randint(n_vocab, (n_tokens,), generator=generator)
    targets[torch.rand(n_tokens, generator=generator) < ignored] = IGNORE
    return hidden, weight, targets


def with_gradients(function, hidden, weight):
    """The loss and its gradients."""
    value = function(hidden, weight)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def exact(hidden, weight, targets, n_vocab, scale=1.0):
    """Loss and gradients by the formula, in float64."""

    def formula(hidden, weight):
        logits = hidden @ weight[:n_vocab].T
        return scale * F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")

    return with_gradients(formula, *(x.detach().double().requires_grad_() for x in (hidden, weight)))


def error(ours, theirs):
    """Relative error of a tensor, absolute if the other is zero."""
    return float((ours.detach().double() - theirs).norm() / (theirs.norm() or 1))


@given(
    n_tokens=st.integers(1, 40),
    n_chunks=st.integers(1, 50),
    ignored=st.floats(0, 1),
    padding=st.integers(0, 9),
    block=st.sampled_from([1, 1000, 2**20]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_equal_the_formula(n_tokens, n_chunks, ignored, padding, block, seed):
    hidden, weight, targets = inputs(n_tokens, 30, padding, ignored=ignored, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss.softmax, "BLOCK", block)
        ours = with_gradients(lambda h, w: 3 * head_loss(h, w, targets, 30, n_chunks, IGNORE), hidden, weight)
    for found, expected in zip(ours, exact(hidden, weight, targets, 30, 3), strict=True):
        assert error(found, expected) < 1e-5
    assert torch.all(ours[2][30:] == 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision_is_as_exact_as_its_logits(dtype, tolerance):
    hidden, weight, targets = inputs(dtype=dtype)
    with torch.autocast("cpu", dtype):
        ours = with_gradients(lambda h, w: head_loss(h, w, targets, 200, 4), hidden, weight)
    assert ours[0].dtype == ours[1].dtype == ours[2].dtype == torch.float32
    for found, expected in zip(ours, exact(hidden, weight, targets, 200), strict=True):
        assert error(found, expected) < tolerance


def test_a_chunk_starts_four_kernels_on_a_gpu(monkeypatch):
    """Two products, the softmax, and the product that is added to the weight's gradient. Launches cost host time."""
    started = []

    class Started(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            started.append(operator.overloadpacket.__name__)
            return operator(*args, **(kwargs or {}))

    monkeypatch.setattr(loss, "fastest_softmax", lambda is_cuda: lambda *_, **__: started.append("softmax"))
    monkeypatch.setattr(loss, "add_product", lambda *_: started.append("add_product"))
    hidden, weight, targets = inputs(n_tokens=40)
    with torch.no_grad():
        counts = {}
        for n_chunks in (4, 5):
            started.clear()
            with Started():
                loss.compute(hidden, weight, targets, 200, n_chunks, IGNORE, 0, "", True)
            counts[n_chunks] = Counter(name for name in started if name not in ("slice", "permute"))  # views
    assert counts[5] - counts[4] == Counter(mm=2, softmax=1, add_product=1)


def test_the_scale_of_float16_is_applied_to_its_gradients():
    """GradScaler's scale over the number of tokens; the weight's scaled gradients are float32 and do not overflow."""
    scale = 2.0**20
    hidden, weight, targets = inputs(n_tokens=64, scale=0.5, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        ours = with_gradients(lambda h, w: head_loss(h, w, targets, 200, 4) * (scale / 4096), hidden, weight)
    for found, expected in zip(ours, exact(hidden, weight, targets, 200, scale / 4096), strict=True):
        assert error(found, expected) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_compiles_into_one_operator_in_one_graph(dtype):
    hidden, weight, targets = inputs()
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def function(hidden, weight):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return head_loss(2 * hidden, weight, targets, 200, 4) / 7

    torch.compile(function, fullgraph=True, backend=backend)(hidden, weight)
    assert len(graphs) == 1 and sum("chunked_loss" in name for name in graphs[0]) == 1
    traced = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    for ours, theirs in zip(*(with_gradients(f, hidden, weight) for f in (traced, function)), strict=True):
        assert torch.equal(ours, theirs)


def test_the_operator_is_registered_as_pytorch_expects():
    """By opcheck, except its fourth test, of tracing, which also returns the gradients that the backward overwrites."""
    hidden, weight, targets = inputs()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for needs_grad in (True, False):
        torch.library.opcheck(
            loss.operator, (hidden, weight, targets, 200, 4, IGNORE, 0, "", needs_grad), test_utils=checks
        )


def test_a_second_backward_is_refused():
    hidden, weight, targets = inputs()
    value = head_loss(hidden, weight, targets, 200, 3) / 7
    torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, (hidden, weight))


def test_a_target_outside_the_vocabulary_makes_the_loss_infinite():
    hidden, weight, targets = inputs()
    for target in (200, 10**6, -1):
        targets[3] = target
        assert math.isinf(head_loss(hidden, weight, targets, 200, 4))


def test_chunks_of_large_logits_have_tokens_in_proportion_to_the_width():
    assert [count_chunks(n, 10**6, 10**6, 64) for n in (0, 1, 8)] == [0, 1, 8]
    assert count_chunks("auto", 32 * 512, 256, 256) == 0  # 8 MB
    assert count_chunks("auto", 32 * 512, 50304, 256) == 8  # 1.65 GB, in chunks of 2,048 tokens
    assert count_chunks("auto", 60 * 1024, 50304, 768) == 10  # of 6,144 tokens; not 48, each adding to 154 MB
    assert count_chunks("auto", 128, 10**6, 8) == 0  # exactly 256 MB
    assert count_chunks("auto", 129, 10**6, 8) == 3


@pytest.fixture
def launches(monkeypatch):
    """launches(error) -> list of launches of Triton's kernel on a pretended GPU, each of which raises the error."""
    pytest.importorskip("triton")
    from operators import softmax_triton

    zeros, started = torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    loss.triton_obstacle.cache_clear()

    def launch(error):
        def softmax_(*_, **__):
            started.append(error)
            if error:
                raise error

        monkeypatch.setattr(softmax_triton, "softmax_", softmax_)
        return started

    yield launch
    loss.triton_obstacle.cache_clear()


def test_without_a_c_compiler_a_gpu_uses_pytorch_s_operations(launches):
    """Triton can still be imported: its driver looks for the compiler at the first launch, which is tried once."""
    tried = launches(RuntimeError("Failed to find C compiler. Please specify via CC.\nMore lines."))
    assert loss.fastest_softmax(True) is loss.fastest_softmax(True) is loss.softmax.softmax_
    assert len(tried) == 1
    config = tiny(vocab_size=50304, loss_chunks=3)
    said = "logits and loss in 3 chunks"
    why = "as Triton does not run here: Failed to find C compiler. Please specify via CC."
    assert header.loss(config, torch.device("cuda")) == f"{said}, in PyTorch's operations, {why}"
    assert header.loss(config, torch.device("cpu")) == said


def test_a_gpu_on_which_triton_launches_takes_its_kernel(launches):
    tried = launches(None)
    assert loss.fastest_softmax(True) is loss.fastest_softmax(True) is not loss.softmax.softmax_
    assert len(tried) == 1
    assert header.loss(tiny(vocab_size=50304, loss_chunks=3), torch.device("cuda")).endswith("in 3 chunks")
    assert loss.fastest_softmax(False) is loss.softmax.softmax_

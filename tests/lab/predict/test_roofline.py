"""The least time of a step: operations are counted exactly, and times follow from a device's limits."""

import math

import pytest
import torch
from conftest import replace
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.predict import devices, predict, roofline
from lab.predict.trace import Ledger
from model import GPT
from nanoladder.arithmetic import flops_per_token
from nanoladder.checkpoint import shape
from nanoladder.config import stages
from nanoladder.run import load_config
from operators import count_scores, uses_blocks

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 128, "context_length": 64, "vocab_size": 1000, "batch_size": 4}
SMALL |= {"device": "cpu", "num_workers": 0, "dtype": "float32"}
LIMITS = {"float32": 1e11, "bfloat16": 4e11}
DEVICE = devices.Device("test", "here", LIMITS, 1e10, 1e-6, {2**18: 4e10}, 5e9)


def small(*files, **keys):
    return load_config([*files, *(f"--{key}={value}" for key, value in (SMALL | keys).items())])


def works(config):
    """The Work of a step, which is one micro-batch."""
    _, _, [(_, work)] = predict.traces(replace(config, compile=False), "cpu", 1)
    return work


def counted(action, *shapes, dtype=torch.float32):
    """The Work of an action on fake tensors of these shapes."""
    ledger = Ledger(on_cuda=False)
    with FakeTensorMode(), ledger:
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        first, ledger.operations, ledger.repeated = ledger.n_storages, [], True
        result = action(*inputs)  # noqa: F841  # alive
        return roofline.Work(tuple(ledger.operations), first, frozenset(ledger.numbers.values()))


def sizes(work):
    return [(op.name, sum(op.reads.values()), sum(op.writes.values())) for op in work.operations]


def test_the_bytes_of_a_small_graph_are_counted_exactly():
    def graph(x, w, b):
        y = x @ w.T  # the transpose is a view
        y = y + b.expand(8, 4)  # an expanded tensor is read once
        return y.relu_().sum(), y

    work = counted(graph, (8, 16), (4, 16), (4,))
    numbers = [("mm", 8 * 16 + 4 * 16, 32), ("add", 32 + 4, 32), ("relu_", 32, 32), ("sum", 32, 1)]
    assert sizes(work) == [(name, 4 * read, 4 * written) for name, read, written in numbers]
    assert [op.flops for op in work.operations] == [2 * 8 * 16 * 4, 32, 32, 32]
    assert [op.dtype for op in work.operations] == ["float32", "", "", ""]


def test_a_fused_chain_reads_its_inputs_once_and_writes_what_is_used_later():
    def graph(x, w, b):
        y = x @ w.T
        z = (y + b).exp() * y
        return z @ w

    work = counted(graph, (8, 16), (4, 16), (4,))
    fused = roofline.fuse(work)
    numbers = [("mm", 8 * 16 + 4 * 16, 32), ("3 fused", 32 + 4, 32), ("mm", 32 + 4 * 16, 8 * 16)]
    assert sizes(fused) == [(name, 4 * read, 4 * written) for name, read, written in numbers]
    assert [op.launches for op in fused.operations] == [1, 1, 1]
    assert sum(op.flops for op in fused.operations) == sum(op.flops for op in work.operations)


def test_a_reduction_to_one_number_ends_a_chain():
    fused = roofline.fuse(counted(lambda x: x / x.norm(), (8, 16)))
    numbers = [("linalg_vector_norm", 128, 1), ("div", 128 + 1, 128)]
    assert sizes(fused) == [(name, 4 * read, 4 * written) for name, read, written in numbers]


@pytest.mark.parametrize(
    "action, read, written",
    [
        (torch.zeros_like, 0, 128),  # reads a shape
        (lambda x: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.long), x), 2 * 16 + 4, 2 * 16),
        (torch.empty_like, None, None),
        (lambda x: x.fill_(1), 0, 128),
        (lambda x: torch._foreach_mul([x, x.clone()], 2), 256, 256),
    ],
)
def test_only_bytes_that_must_move_are_counted(action, read, written):
    *_, last = [(None, None, None), *sizes(counted(action, (8, 16)))]
    assert last[1:] == (read, written) if read is None else last[1:] == (4 * read, 4 * written)


def test_causal_attention_counts_only_unmasked_pairs():
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    [operation] = counted(lambda q: attend(q, q, q, is_causal=True), (1, 1, 4, 8)).operations
    assert operation.flops == 2 * 2 * (1 + 2 + 3 + 4) * 8  # two products


def test_the_fused_update_moves_28_bytes_per_parameter():
    """It reads weight, gradient and two moments, and writes all but the gradient."""
    config = small(adamw_impl="fused", pad_vocab_to=1)
    moved = sum(op.bytes for op in works(config).operations if op.name == "_fused_adamw_")
    assert moved == pytest.approx(28 * GPT(config).n_params, rel=1e-3)


@pytest.mark.slow
def test_the_fused_update_in_8_bits_moves_24_bytes_per_parameter():
    """It reads the gradient for its norm, then weight, gradient and two bytes of moments, and writes these, clipped."""
    pytest.importorskip("torchao")
    config = small(optimizer="adamw8bit", pad_vocab_to=1, n_embd=256)
    update = [operation for operation in roofline.fuse(works(config)).operations if not operation.repeated]
    assert sum(operation.bytes for operation in update) == pytest.approx(24 * GPT(config).n_params, rel=0.01)


def test_new_pages_are_counted_only_for_large_tensors_and_if_freed_ones_are_not_kept():
    large, small_ = roofline.NEW_PAGES // 4, roofline.NEW_PAGES // 4 - 1
    for n, pages in ((large, 4 * large / DEVICE.new_bytes_per_s), (small_, 0)):
        work = counted(lambda x: x.exp().neg_(), (n,))
        times = [roofline.least_time(work, DEVICE, keeps_memory=kept).seconds for kept in (False, True)]
        assert times[0] - times[1] == pytest.approx(pages, abs=1e-12)


def counted_flops(config, world_size):
    """FLOP per token of the matrix products in the forward and backward of a step, counted in world_size processes."""
    share, traced, found = predict.traces(replace(config, compile=False), "cpu", world_size)
    flops = sum(op.flops for _, work in found for op in work.operations if op.dtype and op.repeated)
    passes, alike = share.batch_size / traced.batch_size, world_size / len(found)
    return flops * passes * alike / (config.batch_size * config.context_length)


def done_beside(config):
    """FLOP per token that flops_per_token ignores: padding, recomputation, less what a kernel skips."""
    L, C, T = config.n_layer, config.n_embd, config.context_length
    forward, backward = 4 * C * T, 8 * C * T  # of attention in a block, if it computes all scores once
    keys = config.attention, config.dropout, config.context_length
    if uses_blocks(*keys, torch.device("cpu"), torch.float32):  # skips the blocks that the mask hides
        shown = count_scores(T, torch.float32) / T**2
        forward, backward = forward * shown, backward * shown
    elif config.attention != "matmul":  # SDPA skips all that the mask hides, and computes the scores again backward
        shown = (T + 1) / (2 * T)
        forward, backward = forward * shown, 5 / 4 * backward * shown
    again = (
        16 * C * C + forward if config.activation_checkpointing == "every:1" else 0
    )  # all but the MLP's last product
    padding = 6 * C * (config.padded_vocab_size - config.vocab_size)
    return L * (again + forward + backward - 12 * C * T) + padding


STAGES, RUNGS = stages.stage_names(), stages.stage_names(stages.RECIPE_DIR)
OF_MODEL = [name for name in RUNGS if stages.fields(name).keys() & {*shape.RECIPE}]  # others change no operation
OF_HEAD = ("pad_vocab", "chunked_loss", "ddp", "shard", "tensor_parallel", "context_parallel")  # what touches the head
LADDERS = [
    *({"stage": name} for name in STAGES),
    *({"recipe": name, "stage": "naive"} for name in OF_MODEL),
    {"recipe": "sampled_softmax", "stage": "chunked_loss", "sampled_softmax": 0},
    *({"stage": name, "tie_embeddings": False} for name in OF_HEAD),
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", LADDERS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_flops_per_token_are_those_counted_at_every_rung_of_both_ladders(keys):
    # Three blocks of attention; the update does not count, and some are slow to trace
    config = small(**keys, context_length=320, optimizer="adamw")
    world_size = 2 if stages.needs_several(keys["stage"]) else 1
    expected = flops_per_token(config) + done_beside(config)
    assert counted_flops(config, world_size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("chunks", [0, 2])  # a chunk's product is added to a float32 gradient
def test_products_count_by_the_dtype_of_their_inputs(chunks, device_type):
    config = small(dtype="bfloat16", loss_chunks=chunks, compile=False)
    _, _, [(_, work)] = predict.traces(config, device_type, 1)
    assert {op.dtype for op in work.operations} == {"", "bfloat16"}


@pytest.mark.parametrize("device_type, in_head", [("cpu", 0), ("cuda", 2)])
def test_float8_multiplies_the_blocks_matrices_and_on_a_gpu_the_chunks_logits(device_type, in_head):
    config = small(dtype="bfloat16", loss_chunks=2, compile=False, float8=True)
    _, _, [(_, work)] = predict.traces(config, device_type, 1)
    kinds = [op.dtype for op in work.operations if op.name == "_scaled_mm"]
    assert kinds == 4 * config.n_layer * ["float8_e4m3fn"] + 8 * config.n_layer * ["float8_e5m2"]
    logits = [op for op in work.operations if op.name == "mm" and op.dtype == "float8_e4m3fn"]
    assert len(logits) == in_head


def test_half_residual_saves_the_bytes_of_the_stream():
    """In a fused step on a GPU, for each number and sublayer: 2 of what is read forward, and 4 backward."""

    def moved(n_layer, half):
        config = small(dtype="bfloat16", half_residual=half, n_layer=n_layer)
        _, _, [(_, work)] = predict.traces(replace(config, compile=False), "cuda", 1)
        return sum(operation.bytes for operation in roofline.fuse(work).operations)

    saved = [moved(n_layer, False) - moved(n_layer, True) for n_layer in (2, 3)]
    stream = SMALL["batch_size"] * SMALL["context_length"] * SMALL["n_embd"]
    assert saved[1] - saved[0] == 2 * 6 * stream


@pytest.mark.slow
def test_micro_batches_repeat_the_forward_and_backward_but_not_the_update():
    whole, cut = (predict.predict_time(small(micro_batch_size=size), DEVICE) for size in (0, 1))
    assert 0 < whole.seconds <= predict.predict_time(small(compile=False), DEVICE).seconds < math.inf
    assert cut.seconds > whole.seconds
    _, _, [(_, work)] = predict.traces(small(), "cpu", 1)
    once, twice = (roofline.least_time(work, DEVICE, passes).seconds for passes in (1, 2))
    repeated = work._replace(operations=tuple(operation for operation in work.operations if operation.repeated))
    assert twice - once == pytest.approx(roofline.least_time(repeated, DEVICE).seconds) and twice < 2 * once


@pytest.mark.parametrize(
    "slow, bound",
    [({"flops": {"float32": 1e3}}, "compute"), ({"bytes_per_s": 1e3}, "memory"), ({"launch_seconds": 1}, "launches")],
)
def test_the_slowest_of_compute_memory_and_launches_bounds_a_step(slow, bound):
    bounds = predict.predict_time(small(), replace(DEVICE, cached={}, **slow)).bounds
    assert max(bounds, key=bounds.get) == bound


def test_tf32_speeds_up_float32_products_on_cuda_alone():
    device = replace(DEVICE, flops=LIMITS | {"tf32": 8e11})
    exact, rounded = (small(matmul_precision=precision, compile=False) for precision in ("highest", "high"))
    for kind, most in (("cuda", 0.8), ("cpu", 1)):
        times = [predict.predict_time(config, device, kind).seconds for config in (exact, rounded)]
        assert times[1] <= most * times[0] and (times[0] == times[1]) == (kind == "cpu")

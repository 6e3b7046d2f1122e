"""The head's logits as exponentials, in the epilogue of their product: Triton kernels for bfloat16 on a GPU.

softmax_triton.py makes two passes over logits that a product has written, and writes their gradient. Here no such pass
is needed: the product itself writes exp(logit - shift) and sums it along the rows of each tile. Dividing a row by its
sum gives its softmax. The wide rows are never divided; instead, the narrow rows of the two following products are: the
hidden states, an input of one, and the gradient, the output of the other.

The shift is the logit of the row's target, which is computed first, plus a constant. The sum is then exp(loss) times a
constant, and no maximum is needed, because bfloat16 has the range of float32; float16 does not.

That range ends where a logit exceeds the target's by 116 nats; all such logits count as 116 nats above it. The loss is
then between 116 and 116.4 + log(V), 127.3 nats for GPT-2's vocabulary, whatever it truly is. Its gradient is finite: it
raises the target's logit as the true one would, but lowers all logits beyond 116 nats in equal parts, instead of mostly
the largest. So a learning rate at which training diverges reads at most 127.3 nats per token, where other devices may
read thousands. NaN stays NaN.

In float8 (float8.py) hidden states and weight each have a scale, and the product is multiplied by both. The targets'
logits come from the same rounded numbers, so the loss is exactly that of these logits.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from operators.softmax import IGNORED

# The fastest of 67 settings on an H200: 127 µs for 2,048 × 50,304 logits of 256 channels. cuBLAS's product takes 97 µs,
# softmax_triton 128.
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
PROGRAMS = 2  # on a multiprocessor: one computes exponentials while the other multiplies
LOG2_E = tl.constexpr(1 / math.log(2))
LOG2_AT_TARGET = tl.constexpr(-60.0)
AT_TARGET = tl.constexpr(2.0**LOG2_AT_TARGET.value)  # the exponential of the target's logit
LOG2_HIGHEST = tl.constexpr(108.0)  # of any exponential, so that sums are finite: losses up to 116 nats are exact


def target_logits(hidden, weight, columns, scale=None):
    """Dot products (N,) of hidden states (N, C) with their targets' rows of weight (V, C), float32; 0: no target.

    scale: of products of float8, (); None: 1.
    """
    logits, width = columns.new_empty(columns.shape, dtype=torch.float32), hidden.shape[1]
    head_loss_targets[(len(hidden),)](hidden, weight, columns, logits, width, triton.next_power_of_2(width))
    return logits if scale is None else logits * scale


def exp_logits(hidden, weight, shifts, n_real, out, scale=None, write=True):
    """Writes exp(scale * hidden @ weight.T - shifts) to out (n, V); its columns from n_real on are 0.

    hidden (n, C), weight (V, C), shifts (n,), scale () or None. write=False: writes nothing. Returns each tile's row
    sums (n, tiles).
    """
    tile = tile_of(hidden)
    m, n, k = (tile[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles = triton.cdiv(len(weight), n)
    sums = shifts.new_empty(len(hidden), tiles)
    shapes = (hidden, [m, k]), (weight, [n, k]), (out, [m, n // 2])
    descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in shapes]
    grid = (PROGRAMS * multiprocessors(),)
    numbers = len(hidden), n_real, hidden.shape[1], tiles, write, *grid
    head_loss_gemm[grid](*descriptors, shifts, scale, sums, *numbers, **tile)
    return sums


def tile_of(hidden):
    """Settings for hidden states of this dtype: a tile has as many bytes of float8 as of bfloat16."""
    return TILE | {"BLOCK_K": TILE["BLOCK_K"] * torch.bfloat16.itemsize // hidden.itemsize}


@functools.cache
def multiprocessors():
    return torch.cuda.get_device_properties().multi_processor_count


def finish(exponentials, columns, parts, sums, hidden, scaled):
    """Makes exponentials (n, V) the gradient of n losses times their sums, by subtracting these at the columns (n,).

    Writes the row sums of parts (n, parts), infinite if IGNORED, to sums (n,); and hidden / sums to scaled (n, C).
    """
    blocks = [triton.next_power_of_2(tensor.shape[1]) for tensor in (parts, hidden)]
    widths = exponentials.shape[1], parts.shape[1], hidden.shape[1]
    head_loss_finish[(len(hidden),)](exponentials, columns, parts, sums, hidden, scaled, *widths, IGNORED, *blocks)


def losses(sums):
    """Sums of exponentials (n,) -> losses (n,) in nats."""
    return (sums.double().log() - math.log(AT_TARGET.value)).float()


@triton.jit(do_not_specialize_on_alignment=["columns", "logits"])
def head_loss_targets(hidden, weight, columns, logits, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(columns + row)
    channel = tl.arange(0, BLOCK)
    h = tl.load(hidden + row * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    w = tl.load(weight + tl.maximum(target, 0) * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(logits + row, tl.where(target >= 0, tl.sum(h * w), 0.0))


@triton.jit(do_not_specialize=["n", "n_real"], do_not_specialize_on_alignment=["shifts"])
def head_loss_gemm(
    hidden,
    weight,
    out,
    shifts,
    scale,
    sums,
    n,
    n_real,
    C: tl.constexpr,
    TILES: tl.constexpr,
    WRITE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes every STRIDE-th tile; tiles of the same columns are consecutive, so that the weight is read once."""
    n_rows = tl.cdiv(n, BLOCK_M)
    factor = LOG2_E if scale is None else tl.load(scale) * LOG2_E
    for number in tl.range(tl.program_id(0), n_rows * TILES, STRIDE, flatten=True):
        first, tile = number % n_rows * BLOCK_M, number // n_rows
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for channel in range(0, C, BLOCK_K):
            a = hidden.load([first, channel])
            product = tl.dot(a, weight.load([tile * BLOCK_N, channel]).T, product)
        row = first + tl.arange(0, BLOCK_M)
        shift = tl.load(shifts + row, mask=row < n, other=0.0) * LOG2_E - LOG2_AT_TARGET
        left, right = tl.split(tl.permute(tl.reshape(product, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
        column = tile * BLOCK_N
        left = exp_half(left, factor, shift, column, n_real, out, first, WRITE)
        right = exp_half(right, factor, shift, column + BLOCK_N // 2, n_real, out, first, WRITE)
        tl.store(sums + row * TILES + tile, left + right, mask=row < n)


@triton.jit
def exp_half(product, factor, shift, column, n_real, out, row, WRITE: tl.constexpr):
    """Half of a tile, whose exponentials then need half of the memory on their way. Returns its sums."""
    e = tl.exp2(tl.minimum(product * factor - shift[:, None], LOG2_HIGHEST, propagate_nan=tl.PropagateNan.ALL))
    if column + e.shape[1] > n_real:
        e = tl.where((column + tl.arange(0, e.shape[1]) < n_real)[None, :], e, 0.0)
    if WRITE:
        out.store([row, column], e.to(out.dtype))
    return tl.sum(e, axis=1)


@triton.jit(do_not_specialize_on_alignment=["columns", "sums"])
def head_loss_finish(
    exponentials,
    columns,
    parts,
    sums,
    hidden,
    scaled,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(columns + row)
    part, channel = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_C)
    total = tl.sum(tl.load(parts + row * PARTS + part, mask=part < PARTS, other=0.0))
    at_target = -total + AT_TARGET
    tl.store(exponentials + row * V + target, at_target.to(exponentials.dtype.element_ty), mask=target >= 0)
    total = tl.where(target == IGNORED, float("inf"), total)
    tl.store(sums + row, total)
    h = tl.load(hidden + row * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(scaled + row * C + channel, (h / total).to(scaled.dtype.element_ty), mask=channel < C)

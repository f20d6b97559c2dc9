"""Where the backward pass keeps the LSE and delta of each query row.

The workspace is (2, batch or 1, heads_q, rows) fp32: first the LSE times log2(e), then
delta = <grad_out, out> - grad_lse. Rows of a sequence are counted from its first row that sees a
key. Blocks of tile_m rows are filled up with LSE +inf and delta 0, so that a row behind the last
one has weight exp2(x - inf) = 0, and kernels read whole blocks without looking at lengths.

Inside each sixteen rows the order is that of a wgmma accumulator's columns: what thread l of a
quad needs of columns 2l, 2l + 1, 2l + 8 and 2l + 9 is four neighbours, one 16-byte load.

A second workspace, (2, batch or 1, heads_q, rows * STATISTIC_TERMS) bf16, has them for matrix
products that add them to scores and to dP: -lse / softmax_scale and -delta, each as three terms,
from the largest on, that make up all 24 bits of it, and zeros. Rows are in their own order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from fa4.kernels.blocks.online_softmax import LOG2_E
from fa4.pipelines.sm90_backward import STATISTIC_TERMS

SMALLEST_SCALE = 2.0**-60
LARGEST_TERM = 2.0**100


@cute.jit
def first_block(
    start: Int32,
    batch_idx: Int32,
    tile_m: cutlass.Constexpr[int],
    is_packed: cutlass.Constexpr[bool],
):
    """Block of the workspace where a sequence's rows begin.

    A packed sequence gets the blocks from start // tile_m + batch_idx on: at least as many as any
    lengths need, and known without summing over sequences (`tile_order.num_slots`).
    """
    if const_expr(is_packed):
        return start // tile_m + batch_idx
    return Int32(0)


@cute.jit
def place_of(row: Int32):
    """Where row ``row`` of a sequence lies behind the sequence's first block."""
    inside = row % 16
    return row - inside + inside % 8 // 2 * 4 + inside // 8 * 2 + inside % 2


@cute.jit
def of_columns(statistics: cute.Tensor, column: Int32):
    """The statistics (tile_m,) of a thread's accumulator columns, as (4, tile_m / 16).

    column  the thread's first column: 2 (lane % 4)

    Element (i, g) belongs to column 4g + i of `accumulator.by_row`.
    """
    groups = cute.size(statistics) // 16
    first = (statistics.iterator + 2 * column).align(16)
    return cute.make_tensor(first, cute.make_layout((4, groups), stride=(1, 16)))


@cute.jit
def exponent_scale(softmax_scale: Float32):
    """softmax_scale * log2(e), kept away from 0: what scores and LSE terms are multiplied by.

    A score times the smallest scale is as good as 0, and lse over it is no overflow.
    """
    scale = softmax_scale * LOG2_E
    if cute.arch.fmax(scale, -scale) < SMALLEST_SCALE:
        scale = Float32(SMALLEST_SCALE)
    return scale


@cute.jit
def as_terms(value: Float32):
    """(STATISTIC_TERMS,) bf16 whose sum is ``value``, the largest first.

    Infinities become large: 0 times them, which a product adds, must be 0.
    """
    if value > LARGEST_TERM:
        value = Float32(LARGEST_TERM)
    if value < -LARGEST_TERM:
        value = Float32(-LARGEST_TERM)
    terms = cute.make_rmem_tensor(STATISTIC_TERMS, BFloat16)
    terms.fill(0.0)
    for i in cutlass.range_constexpr(3):
        terms[i] = value.to(BFloat16)
        value = value - terms[i].to(Float32)
    return terms

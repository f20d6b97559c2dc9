"""Probabilities from known row statistics, and their gradients, on register tiles (FA2, alg. 2).

Tiles are (2, columns) views of `accumulator.by_row`. Rows may be queries and columns keys, or the
other way round: the statistics of the queries come as views of the same shape, with stride 0 along
the mode that they do not depend on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4.kernels.blocks.online_softmax import LOG2_E


@cute.jit
def of_rows(values: cute.Tensor, columns: cutlass.Constexpr[int]):
    """View (2,) values, one a row, as (2, columns)."""
    return cute.make_tensor(values.iterator, cute.make_layout((2, columns), stride=(1, 0)))


@cute.jit
def of_columns(values: cute.Tensor):
    """View values, one a column, as (2, columns)."""
    return cute.make_tensor(
        values.iterator, cute.make_layout((2, cute.size(values)), stride=(0, 1))
    )


@cute.jit
def probabilities(scores: cute.Tensor, lse_log2: cute.Tensor, softmax_scale: Float32):
    """scores := exp(softmax_scale * scores - lse), in place."""
    scale_log2 = softmax_scale * LOG2_E
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - lse_log2[r, c], fastmath=True)


@cute.jit
def capped_probabilities(
    scores: cute.Tensor,
    slopes: cute.Tensor,
    lse_log2: cute.Tensor,
    softmax_scale: Float32,
    softcap: Float32,
):
    """scores := exp(y - lse) with y = softcap * tanh(softmax_scale * scores / softcap), in place.

    slopes  out: derivative of y by what the tanh is taken of, times softcap: 1 - (y / softcap)^2

    As in `online_softmax.soft_cap`, tanh(x) = 1 - 2u with u = 1 / (1 + e^2x); its derivative is
    4u (1 - u), without the cancellation of 1 - tanh(x)^2.
    """
    exponent_scale = softmax_scale / softcap * (2.0 * LOG2_E)
    cap_log2 = softcap * LOG2_E
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            grown = cute.math.exp2(scores[r, c] * exponent_scale, fastmath=True)
            u = cute.arch.rcp_approx(1.0 + grown)
            capped_log2 = cap_log2 - (2.0 * cap_log2) * u
            slopes[r, c] = 4.0 * u * (1.0 - u)
            scores[r, c] = cute.math.exp2(capped_log2 - lse_log2[r, c], fastmath=True)


@cute.jit
def hide_outside(
    weights: cute.Tensor,
    begin: Int32,
    end: Int32,
    has_begin: cutlass.Constexpr[bool],
    has_end: cutlass.Constexpr[bool],
):
    """Set the weights (columns,) of one row outside of the columns [begin, end) to 0.

    begin, end  counted from the column of the tile that is this thread's first one

    After the exponential, so that neither the sign of the scale nor NaN in a hidden pair matters.
    """
    for c in cutlass.range_constexpr(cute.size(weights)):
        column = 8 * (c // 2) + c % 2
        if const_expr(has_begin):
            weights[c] = Float32(0.0) if begin > column else weights[c]
        if const_expr(has_end):
            weights[c] = Float32(0.0) if end <= column else weights[c]

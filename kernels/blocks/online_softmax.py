"""Online softmax on register tiles, in base 2 (Milakov and Gimelshein 2018; FA2 section 3.1)."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LANES_A_ROW = 4  # neighbouring lanes that hold one row of an accumulator

# Largest sum of a tile's probabilities, of one thread and row, against a kept reference. Each of
# them is then a finite fp16 number, too.
EXCESS_MAX = 2.0**15


@cute.jit
def soft_cap(scores: cute.Tensor, scale: Float32, cap: Float32):
    """scores := cap * tanh(scale * scores / cap), in place.

    tanh(y) = 1 - 2 / (1 + e^2y), from the same approximate exp2 as the softmax: absolute error
    about 1e-7 * cap. The hardware's tanh.approx errs by 5e-4 * cap, which an LSE would show.
    """
    exponent_scale = scale / cap * (2.0 * LOG2_E)
    for i in cutlass.range_constexpr(cute.size(scores)):
        grown = cute.math.exp2(scores[i] * exponent_scale, fastmath=True)
        scores[i] = cap - (2.0 * cap) * cute.arch.rcp_approx(1.0 + grown)


@cute.jit
def scale_scores(scores: cute.Tensor, scale: Float32):
    """scores := scale * scores, in place."""
    scores.store(scores.load() * scale)


@cute.jit
def mask_scores(
    scores: cute.Tensor,
    first_key: cutlass.Int32,
    first_row: cutlass.Int32,
    length: cutlass.Int32,
    diagonal: cutlass.Int32,
    left: cutlass.Int32,
    right: cutlass.Int32,
    has_left: cutlass.Constexpr[bool],
    has_right: cutlass.Constexpr[bool],
):
    """Set the scores of keys that a row does not see to -inf.

    scores     (2, columns) view of `accumulator.by_row`
    first_key  key of column 0 of this thread; column c is 8 (c/2) + c%2 keys further
    first_row  query row of row 0 of this thread; the other is 8 further
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        aligned = first_row + 8 * r + diagonal
        end = length - first_key
        if const_expr(has_right):
            end = cutlass.min(end, aligned + right + 1 - first_key)
        begin = aligned - left - first_key
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            key = 8 * (c // 2) + c % 2
            hidden = key >= end
            if const_expr(has_left):
                hidden = hidden | (key < begin)
            scores[r, c] = -Float32.inf if hidden else scores[r, c]


@cute.jit
def online_softmax_step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    rescale: cute.Tensor,
    scale_log2: Float32,
    is_first: cutlass.Constexpr[bool],
    may_hide_all: cutlass.Constexpr[bool],
):
    """Fold one score tile into the running row statistics.

    scores        (rows, columns) fp32 registers, unscaled; overwritten with probabilities
    row_max       (rows,) running maximum of unscaled scores; -inf for rows that saw no key yet
    row_sum       (rows,) this thread's part of the sum of exp2(scale_log2 * (score - row_max))
    rescale       (rows,) out: the factor by which earlier output must be multiplied
    scale_log2    softmax scale times log2(e), positive
    is_first      nothing came before: row_max and row_sum are set, rescale is not
    may_hide_all  a row of this tile, or all it saw before, may be masked entirely; it keeps
                  row_max = -inf and gets probabilities of 0, never NaN
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        highest = -Float32.inf if const_expr(is_first) else row_max[r]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # fmax passes over NaN, where a vector reduction would use the slower max.NaN. A NaN
            # still reaches the probabilities and their sum.
            highest = cute.arch.fmax(highest, scores[r, c])
        row = scores[r, None].load()
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1))
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=2))
        reference = highest
        if const_expr(may_hide_all):
            reference = Float32(0.0) if highest == -Float32.inf else highest
        shift = reference * scale_log2
        probabilities = cute.math.exp2(row * scale_log2 - shift, fastmath=True)
        if const_expr(is_first):
            row_sum[r] = probabilities.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        else:
            rescale[r] = cute.math.exp2(row_max[r] * scale_log2 - shift, fastmath=True)
            row_sum[r] = probabilities.reduce(cute.ReductionOp.ADD, row_sum[r] * rescale[r], 0)
        row_max[r] = highest
        scores[r, None].store(probabilities)


@cute.jit
def kept_reference_step(
    scores: cute.Tensor, row_max: cute.Tensor, tile_sum: cute.Tensor, scale_log2: Float32
):
    """Exponentiate one score tile against the row maxima that earlier tiles left.

    scores      (rows, columns) fp32 registers, unscaled; overwritten with exp2(scale_log2 *
                (score - row_max)), which may be above 1
    row_max     (rows,) what is subtracted: finite, or the sums become infinite or NaN
    tile_sum    (rows,) out: this thread's part of the row sums of this tile alone
    scale_log2  softmax scale times log2(e), positive

    Softmax needs a reference near the row's maximum, not the maximum: output and sum scale
    together, and fp32 and bf16 hold any excess of it up to 2^127. So most tiles need neither a
    maximum, whose chain of comparisons and shuffles nothing else can hide, nor a rescaling of the
    output. Where a tile_sum is above `EXCESS_MAX`, `raise_reference` must follow.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row = scores[r, None].load()
        probabilities = cute.math.exp2(row * scale_log2 - row_max[r] * scale_log2, fastmath=True)
        tile_sum[r] = probabilities.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        scores[r, None].store(probabilities)


@cute.jit
def raise_reference(
    probabilities: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    tile_sum: cute.Tensor,
    out: cute.Tensor,
    scale_log2: Float32,
):
    """Make the largest score of a tile the reference of its row, after `kept_reference_step`.

    All lanes of a warp must call it. Rows without a probability above 1 are left as they are.
    What overflowed fp32 becomes NaN, which the row's sum will show.
    """
    for r in cutlass.range_constexpr(cute.size(probabilities, mode=[0])):
        top = Float32(1.0)
        for c in cutlass.range_constexpr(cute.size(probabilities, mode=[1])):
            top = cute.arch.fmax(top, probabilities[r, c])
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        grown_log2 = cute.math.log2(top, fastmath=True)
        raised = row_max[r] + grown_log2 * cute.arch.rcp_approx(scale_log2)
        # From the rounded references, so that tiles before and after agree. In two steps: one over
        # a probability above 2^126 is no normal number, and would be flushed to 0.
        root = cute.math.exp2((row_max[r] - raised) * (0.5 * scale_log2), fastmath=True)
        row_max[r] = raised
        row_sum[r] = row_sum[r] * root * root
        tile_sum[r] = tile_sum[r] * root * root
        probabilities[r, None].store(probabilities[r, None].load() * root * root)
        out[r, None].store(out[r, None].load() * root * root)


@cute.jit
def finish_row(
    row_max: Float32,
    row_sum: Float32,
    scale_log2: Float32,
    sink_log2: Float32,
    has_sink: cutlass.Constexpr[bool],
):
    """`finish_total` of a row whose sum four lanes hold in parts.

    row_sum  this thread's part
    """
    total = row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=1)
    total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
    return finish_total(row_max, total, scale_log2, sink_log2, has_sink)


@cute.jit
def finish_total(
    row_max: Float32,
    total: Float32,
    scale_log2: Float32,
    sink_log2: Float32,
    has_sink: cutlass.Constexpr[bool],
):
    """Normalisation of a row and its log-sum-exp.

    row_max    what was subtracted from the row's unscaled scores: its maximum or a little less
    total      sum of exp2(scale_log2 * (score - row_max))
    sink_log2  the row's sink logit times log2(e)

    Returns (factor for the accumulated output, LSE in natural log). A row that saw no key has
    factor 0 and LSE -inf, with a sink too.
    """
    factor = Float32(0.0)
    lse = -Float32.inf
    # A row that saw a key has a sum of at least 1, or NaN.
    if total != 0.0:
        top = row_max * scale_log2
        carried = Float32(1.0)
        if const_expr(has_sink):
            # Either the sink or the scores may be the larger by any amount.
            highest = cute.arch.fmax(top, sink_log2)
            carried = cute.math.exp2(top - highest, fastmath=True)
            total = total * carried + cute.math.exp2(sink_log2 - highest, fastmath=True)
            top = highest
        factor = carried / total
        lse = (top + cute.math.log2(total, fastmath=True)) * LN_2
    return factor, lse


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor):
    """acc[r, :] *= factors[r] for a (rows, columns) register view."""
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        acc[r, None].store(acc[r, None].load() * factors[r])

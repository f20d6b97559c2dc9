"""Online softmax where a thread holds a whole row of scores: masks, maximum, probabilities.

Base 2 throughout (Milakov and Gimelshein 2018; FA2 section 3.1). The maximum is exact in every
block, but what is subtracted from the scores follows it only when it has risen by more than a
threshold: O and the row sum are then in units of an older maximum, which the division at the end
takes out again. Technique: FA4's conditional rescaling.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4.kernels.blocks.accumulator import PACKED_TYPE

MASK_BITS = 32
CHAINS = 4  # independent chains of maxima and of sums, so that their latencies overlap


@cute.jit
def ones_below(count: Int32):
    """A word with the bits below ``count`` set, for any count: none below 0, all above 32."""
    # shl.b32 gives 0 for 32 and above, where a shift in Python is undefined.
    return (
        cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Int32],
            read_only_args=[Int32(1), cutlass.max(count, 0)],
        )
        - 1
    )


@cute.jit
def mask_row(
    scores: cute.Tensor,
    begin: Int32,
    end: Int32,
    has_begin: cutlass.Constexpr[bool],
):
    """Set the scores outside of the columns [begin, end) to -inf; a bit a column."""
    columns = cute.size(scores)
    for first in cutlass.range_constexpr(0, columns, MASK_BITS):
        seen = ones_below(end - first)
        if const_expr(has_begin):
            seen = seen & ~ones_below(begin - first)
        for c in cutlass.range_constexpr(MASK_BITS):
            is_seen = (seen & (1 << c)) != 0
            scores[first + c] = scores[first + c] if is_seen else -Float32.inf


@cute.jit
def highest_score(scores: cute.Tensor, so_far: Float32):
    """The maximum of a row's scores and ``so_far``; passes over NaN, as fmax does."""
    highest = [so_far] + [scores[c] for c in range(1, CHAINS)]
    highest[0] = cute.arch.fmax(so_far, scores[0])
    for c in cutlass.range_constexpr(CHAINS, cute.size(scores)):
        highest[c % CHAINS] = cute.arch.fmax(highest[c % CHAINS], scores[c])
    return cute.arch.fmax(
        cute.arch.fmax(highest[0], highest[1]), cute.arch.fmax(highest[2], highest[3])
    )


@cute.jit
def round_pair(low: Float32, high: Float32, dtype: cutlass.Constexpr):
    """Two fp32 values as 16-bit ones in a word, rounded to nearest even."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{PACKED_TYPE[dtype]}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )

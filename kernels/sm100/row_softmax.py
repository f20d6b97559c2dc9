"""Online softmax where a thread holds a whole row of scores: masks, maximum, probabilities.

Base 2 throughout (Milakov and Gimelshein 2018; FA2 section 3.1). The maximum is exact in every
block, but what is subtracted from the scores follows it only when it has risen by more than a
threshold: O and the row sum are then in units of an older maximum, which the division at the end
takes out again. Technique: FA4's conditional rescaling.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

MASK_BITS = 32
CHUNK = 32  # columns that are worked on together


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
def highest_score(scores: cute.Tensor):
    """The maximum of a row's scores; passes over NaN, which the probabilities still get.

    One chain of three-input maxima a chunk, so that their latencies overlap.
    """
    highest = -Float32.inf
    for first in cutlass.range_constexpr(0, cute.size(scores), CHUNK):
        chain = cute.arch.fmax(scores[first], scores[first + 1])
        for c in cutlass.range_constexpr(2, CHUNK, 2):
            chain = highest_of(chain, scores[first + c], scores[first + c + 1])
        highest = cute.arch.fmax(highest, chain)
    return highest


def highest_of(a: Float32, b: Float32, c: Float32) -> Float32:
    """The maximum of three numbers in one instruction."""
    return cute.arch.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def part(registers: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """registers[first : first + count], of a thread's one-dimensional registers."""
    return cute.make_tensor(registers.iterator + first, cute.make_layout(count))


@cute.jit
def exponentials(
    scores: cute.Tensor,
    scale: Float32,
    shift: Float32,
    polynomials: cutlass.Constexpr[int],
):
    """scores := exp2(scale * scores - shift), the first ``polynomials`` of them without MUFU."""
    scores.store(scores.load() * scale - shift)
    if const_expr(polynomials > 0):
        exp2_by_polynomial(part(scores, 0, polynomials))
    others = cute.size(scores) - polynomials
    if const_expr(others > 0):
        rest = part(scores, polynomials, others)
        rest.store(cute.math.exp2(rest.load(), fastmath=True))


# 2**f on [-1/2, 1/2], constant term first: minimax in relative error, 7.5e-5, a 26th of half a
# unit in the last place of bf16.
EXP2_POLYNOMIAL = (0.99992806, 0.69326097, 0.24261113, 0.05517167)
# Adding it leaves an integer n in the low bits: fp32 has no fraction bits up there.
TO_INTEGER = 1.5 * 2**23
EXPONENT_BIT = 23
LOWEST_EXPONENT = -126.0


@cute.jit
def exp2_by_polynomial(x: cute.Tensor):
    """x := 2**x on the FMA units: x = n + f, a polynomial in f, n added to its exponent.

    x  at most 127; below LOWEST_EXPONENT, -inf included, the result is that of LOWEST_EXPONENT, so
       this is not for scores that a mask has hidden

    Method: Cody and Waite 1980; FA4 for its use beside MUFU. Two elements an instruction but for
    the clamp and the last step.
    """
    for c in cutlass.range_constexpr(cute.size(x)):
        x[c] = cute.arch.fmax(x[c], LOWEST_EXPONENT)
    shifted = cute.make_rmem_tensor_like(x)
    shifted.store(x.load() + TO_INTEGER)
    f = x.load() - (shifted.load() - TO_INTEGER)
    c0, c1, c2, c3 = EXP2_POLYNOMIAL
    x.store(((f * c3 + c2) * f + c1) * f + c0)
    bits = cute.recast_tensor(x, Int32)
    n = cute.recast_tensor(shifted, Int32)
    for c in cutlass.range_constexpr(cute.size(x)):
        bits[c] = bits[c] + (n[c] << EXPONENT_BIT)


LANES = 8  # partial sums of a row, two an instruction


@cute.jit
def add_up(sums: cute.Tensor, values: cute.Tensor):
    """sums (LANES,) += values, column by column modulo LANES."""
    total = sums.load()
    for first in cutlass.range_constexpr(0, cute.size(values), LANES):
        total = total + part(values, first, LANES).load()
    sums.store(total)


@cute.jit
def round_into(rounded: cute.Tensor, values: cute.Tensor):
    """rounded := values, fp32 to 16 bits, to nearest even."""
    rounded.store(values.load().to(rounded.element_type))

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
    """The maximum of a row's scores; NaN if one is NaN.

    One chain of three-input maxima a chunk, so that their latencies overlap.
    """
    highest = -Float32.inf
    for first in cutlass.range_constexpr(0, cute.size(scores), CHUNK):
        chain = highest_of(-Float32.inf, scores[first], scores[first + 1])
        for c in cutlass.range_constexpr(2, CHUNK, 2):
            chain = highest_of(chain, scores[first + c], scores[first + c + 1])
        highest = highest_of(highest, chain, chain)
    return highest


def highest_of(a: Float32, b: Float32, c: Float32) -> Float32:
    """The maximum of three numbers, or NaN, in one instruction."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};",
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
    """scores := exp2(scale * scores - shift), the first ``polynomials`` of them without MUFU.

    An even number, of finite scores that are at most (shift + HIGHEST_EXPONENT) / scale.
    """
    if const_expr(polynomials > 0):
        exp2_by_polynomial(part(scores, 0, polynomials), scale, shift)
    for c in cutlass.range_constexpr(polynomials, cute.size(scores), 2):
        pair = fma_pair((scores[c], scores[c + 1]), scale, -shift)
        for e in cutlass.range_constexpr(2):
            scores[c + e] = cute.math.exp2(pair[e], fastmath=True)


def fma_pair(a, b, c):
    """a * b + c for two elements in one instruction; b and c are pairs or one number for both."""
    b, c = (x if isinstance(x, tuple) else (x, x) for x in (b, c))
    return cute.arch.fma_packed_f32x2(a, b, c)


# 2**f on [-1/2, 1/2], constant term first: minimax in relative error, 7.5e-5, a 26th of half a
# unit in the last place of bf16.
EXP2_POLYNOMIAL = (0.99992806, 0.69326097, 0.24261113, 0.05517167)
LOWEST_EXPONENT, HIGHEST_EXPONENT = -120.0, 8.0
EXPONENT_SPAN = HIGHEST_EXPONENT - LOWEST_EXPONENT  # a power of 2: to divide by it rounds nothing
# Adding it leaves an integer n in the low bits: fp32 has no fraction bits up there.
TO_INTEGER = 1.5 * 2**23
EXPONENT_BIT = 23


@cute.jit
def exp2_by_polynomial(scores: cute.Tensor, scale: Float32, shift: Float32):
    """scores := 2**x, x = scale * scores - shift, on the FMA units: x = n + f, a polynomial in f,
    n added to its exponent.

    Below LOWEST_EXPONENT, at -inf too, and above HIGHEST_EXPONENT the result is that of the bound,
    and at NaN some number. So this is not for scores that a mask has hidden, and a row with a NaN
    has to become NaN by its maximum.

    Method: Cody and Waite 1980; FA4 for its use beside MUFU. Ours clamps for nothing: x is scaled
    to [0, 1], into which an FMA saturates. Two elements an instruction but for that and the last
    step.
    """
    c0, c1, c2, c3 = EXP2_POLYNOMIAL
    step = scale * (1.0 / EXPONENT_SPAN)
    start = (-LOWEST_EXPONENT - shift) * (1.0 / EXPONENT_SPAN)
    to_integer = Float32(TO_INTEGER + LOWEST_EXPONENT)
    for c in cutlass.range_constexpr(0, cute.size(scores), 2):
        y = (
            saturated_fma(scores[c], step, start),
            saturated_fma(scores[c + 1], step, start),
        )
        shifted = fma_pair(y, Float32(EXPONENT_SPAN), to_integer)
        rest = cute.arch.sub_packed_f32x2((to_integer, to_integer), shifted)
        f = fma_pair(y, Float32(EXPONENT_SPAN), rest)
        p = fma_pair(f, Float32(c3), Float32(c2))
        p = fma_pair(p, f, Float32(c1))
        p = fma_pair(p, f, Float32(c0))
        for e in cutlass.range_constexpr(2):
            scores[c + e] = with_exponent(p[e], shifted[e])


def saturated_fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, into [0, 1]."""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def with_exponent(x: Float32, n: Float32) -> Float32:
    """x times 2 to the integer in the low bits of n."""
    bits = cute.arch.inline_ptx(
        f"mad.lo.s32 {{$w0}}, {{$r0}}, {1 << EXPONENT_BIT}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[n.bitcast(Int32), x.bitcast(Int32)],
    )
    return bits.bitcast(Float32)


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

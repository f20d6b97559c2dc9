"""Values of PTX arithmetic on NumPy arrays (one element a lane), with PTX's rounding.

Floating-point addition, subtraction, multiplication, division and square root of NumPy round to
nearest even like PTX's .rn and are used directly; here is what NumPy does not have. The
approximate instructions (ex2.approx and so on) return the correctly rounded result; hardware's
differs within the bounds of the ISA. NaN results are canonical where the ISA asks for it.

Not modelled: the sign of the result of max/min of zeros of different sign.

Every function takes and returns arrays of the types in its name; 16-bit floats are float16 arrays
or, for bf16, uint16 bit patterns. Run under `numpy.errstate(all="ignore")`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.emulator.float_formats import E4M3, E5M2
from fa4.emulator.float_formats import bf16_to_f32 as f32_from_bf16

# Array types differ in their shape parameter only; naming it everywhere would say nothing.
Array = np.ndarray[Any, Any]

F32_SIGN = np.uint32(0x80000000)
SMALLEST_NORMAL_F32 = np.float32(2.0**-126)


def _has_true(flags: Array) -> bool:
    """any() for few elements: several times faster than NumPy's reduction."""
    return b"\x01" in flags.tobytes()


def flush_f32(x: Array) -> Array:
    """Subnormals to zero of the same sign (.ftz)."""
    small = np.abs(x) < SMALLEST_NORMAL_F32
    return np.where(small, np.copysign(np.float32(0), x), x) if _has_true(small) else x


def saturate_f32(x: Array) -> Array:
    """.sat: into [0, 1], NaN becomes 0."""
    return np.fmin(np.fmax(x, np.float32(0)), np.float32(1))


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, to nearest even.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond 2008), and
    53 >= 2 * 24 + 2 bits make the second rounding harmless.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    return _round_to_odd_sum(product, c.astype(np.float64)).astype(np.float32)


def _round_to_odd_sum(a: Array, b: Array) -> Array:
    total = a + b
    shifted = total - a
    error = (a - (total - shifted)) + (b - shifted)
    inexact = (error != 0) & np.isfinite(total)
    if not _has_true(inexact):
        return total
    bits = total.view(np.int64)
    # Towards the error, by one unit in the last place, where the last bit is even.
    away_from_zero = (error > 0) == (total > 0)
    odd = np.where(away_from_zero, bits + 1, bits - 1)
    return np.where(inexact & ((bits & 1) == 0), odd, bits).view(np.float64)


def fma_f32_directed(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fma with .rz, .rm or .rp."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return round_f64_to_f32(_round_to_odd_sum(product, c.astype(np.float64)), mode)


def round_f64_to_f32(x: Array, mode: str) -> Array:
    """float64 to float32; mode is rn, rz, rm or rp."""
    nearest = x.astype(np.float32)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if mode == "rm":
        wrong, target = back > x, np.float32(-np.inf)
    elif mode == "rp":
        wrong, target = back < x, np.float32(np.inf)
    elif mode == "rz":
        wrong, target = np.abs(back) > np.abs(x), np.float32(0)
    else:
        raise ValueError(f"There is no rounding mode {mode!r}.")
    return np.where(wrong, np.nextafter(nearest, target), nearest)


def add_f32_directed(a: Array, b: Array, mode: str) -> Array:
    """add with .rz, .rm or .rp."""
    total = _round_to_odd_sum(a.astype(np.float64), b.astype(np.float64))
    return round_f64_to_f32(total, mode)


def mul_f32_directed(a: Array, b: Array, mode: str) -> Array:
    """mul with .rz, .rm or .rp."""
    return round_f64_to_f32(a.astype(np.float64) * b.astype(np.float64), mode)


def ex2_f32(x: Array) -> Array:
    """2**x."""
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def ex2_ftz_f32(x: Array) -> Array:
    """2**x; a subnormal result is zero (a subnormal argument gives 1 in either mode)."""
    wide = x.astype(np.float64)
    return np.exp2(np.where(wide < -126.0, -np.inf, wide)).astype(np.float32)


def lg2_f32(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(np.float32)


def rcp_f32(x: Array) -> Array:
    return np.float32(1) / x


def sqrt_f32(x: Array) -> Array:
    return np.sqrt(x)


def rsqrt_f32(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def tanh_f32(x: Array) -> Array:
    return np.tanh(x.astype(np.float64)).astype(np.float32)


def sin_f32(x: Array) -> Array:
    return np.sin(x.astype(np.float64)).astype(np.float32)


def cos_f32(x: Array) -> Array:
    return np.cos(x.astype(np.float64)).astype(np.float32)


def bf16_from_f32(x: Array) -> Array:
    """To nearest even, as uint16 bits; NaN becomes 0x7fff."""
    return (_bf16_in_upper_half(x) >> np.uint32(16)).astype(np.uint16)


def _bf16_in_upper_half(x: Array) -> Array:
    bits = x.view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    nan = x != x
    if _has_true(nan):
        rounded = np.where(nan, np.uint32(0x7FFF0000), rounded)
    return rounded


def bf16x2_from_f32(high: Array, low: Array) -> Array:
    """cvt.rn.bf16x2.f32: uint32 with `high` in the upper half."""
    halves = _bf16_in_upper_half(interleave(low, high)).view(np.uint16)
    return np.ascontiguousarray(halves[:, 1::2]).view(np.uint32).reshape(-1)


def f16x2_from_f32(high: Array, low: Array) -> Array:
    """cvt.rn.f16x2.f32: uint32 with `high` in the upper half; NaN becomes 0x7fff."""
    return (f16_bits(high).astype(np.uint32) << np.uint32(16)) | f16_bits(low)


def f16_bits(x: Array) -> Array:
    """float32 or float64 to float16 bits, to nearest even; NaN becomes 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16)
    nan = x != x
    return np.where(nan, np.uint16(0x7FFF), bits) if _has_true(nan) else bits


def tf32_from_f32(x: Array, mode: str) -> Array:
    """uint32 bits of a float32 with 10 explicit mantissa bits; mode is rn, rna or rz."""
    bits = x.view(np.uint32)
    if mode == "rna":
        bits = bits + np.uint32(0x1000)
    elif mode == "rn":
        bits = bits + (((bits >> np.uint32(13)) & np.uint32(1)) + np.uint32(0x0FFF))
    elif mode != "rz":
        raise ValueError(f"There is no rounding mode {mode!r}.")
    return np.where(x != x, np.uint32(0x7FFFFFFF), bits & np.uint32(0xFFFFE000))


def _fp8_from_f32(x: Array, mantissa: int, smallest_exponent: int, largest: float) -> Array:
    """Magnitude bits of an 8-bit float, to nearest even, saturating; no NaN handling."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), largest)
    normal = np.maximum(np.frexp(magnitude)[1] - 1, smallest_exponent)
    exponent = np.where(magnitude == 0, smallest_exponent, normal)
    # In units of the last place; a carry into the next binade gives the right code by itself.
    units = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    biased = exponent - smallest_exponent
    return np.minimum((biased << mantissa) + units, 0x7F).astype(np.uint8)


def e4m3_from_f32(x: Array) -> Array:
    """cvt.rn.satfinite.e4m3: uint8 bits, to nearest even, largest 448, NaN 0x7f."""
    bits = _fp8_from_f32(x, 3, -6, 448.0) | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    return np.where(x != x, np.uint8(0x7F), bits)


def e5m2_from_f32(x: Array) -> Array:
    """cvt.rn.satfinite.e5m2: uint8 bits, to nearest even, largest 57344, NaN 0x7f."""
    bits = _fp8_from_f32(x, 2, -14, 57344.0) | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    return np.where(x != x, np.uint8(0x7F), bits)


def f16x2_from_e4m3x2(pair: Array) -> Array:
    """uint32 with the lower byte's value in the lower half; exact."""
    return E4M3[pair.view(np.uint8)].astype(np.float16).view(np.uint32)


def f16x2_from_e5m2x2(pair: Array) -> Array:
    return E5M2[pair.view(np.uint8)].astype(np.float16).view(np.uint32)


def pack_bytes(high: Array, low: Array) -> Array:
    return (high.astype(np.uint16) << np.uint16(8)) | low.astype(np.uint16)


def interleave(*columns: Array) -> Array:
    """(lanes, columns) of arrays of one type; several times faster than NumPy's stack."""
    rows = np.empty((len(columns[0]), len(columns)), columns[0].dtype)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def max_f32(a: Array, b: Array) -> Array:
    """The larger; a NaN loses."""
    return np.fmax(a, b)


def integer_from_float(x: Array, kind: Any, mode: str) -> Array:
    """cvt to an integer type: mode rni, rzi, rmi or rpi; saturates, NaN becomes 0."""
    wide = x.astype(np.float64)
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](wide)
    info = np.iinfo(kind)
    # The largest 64-bit values are no float64: those lanes are set afterwards.
    inside = np.clip(np.where(rounded != rounded, 0.0, rounded), float(info.min), float(info.max))
    over = inside >= float(info.max)
    return np.where(over, info.max, np.where(over, 0.0, inside).astype(kind)).astype(kind)


def div_signed(a: Array, b: Array) -> Array:
    """Truncates towards zero. By zero: all bits set (the ISA leaves it open)."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    quotient = a // divisor
    inexact = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
    return np.where(zero, b.dtype.type(-1), quotient + inexact.astype(a.dtype))


def div_unsigned(a: Array, b: Array) -> Array:
    """By zero: all bits set (the ISA leaves it open)."""
    zero = b == 0
    return np.where(zero, ~b.dtype.type(0), a // np.where(zero, b.dtype.type(1), b))


def rem_signed(a: Array, b: Array) -> Array:
    return a - div_signed(a, b) * b


def rem_unsigned(a: Array, b: Array) -> Array:
    return a - div_unsigned(a, b) * b


def mul_high_u64(a: Array, b: Array) -> Array:
    """Upper 64 bits of the product of two uint64."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (other >> half)


def mul_high_s64(a: Array, b: Array) -> Array:
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    zero = np.uint64(0)
    high = mul_high_u64(ua, ub) - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
    return high.view(np.int64)


def shift_left(x: Array, amount: Array) -> Array:
    """By the register width or more: 0."""
    width = x.dtype.itemsize * 8
    inside = (amount & np.uint32(width - 1)).astype(x.dtype)
    return np.where(amount < width, x << inside, x.dtype.type(0))


def shift_right(x: Array, amount: Array) -> Array:
    """Arithmetic for signed types; by the register width or more: only the sign is left."""
    width = x.dtype.itemsize * 8
    if x.dtype.kind == "i":
        return x >> np.minimum(amount, np.uint32(width - 1)).astype(x.dtype)
    inside = (amount & np.uint32(width - 1)).astype(x.dtype)
    return np.where(amount < width, x >> inside, x.dtype.type(0))


def popcount(x: Array) -> Array:
    octets = x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)
    return np.unpackbits(octets, axis=-1).sum(axis=-1).astype(np.uint32)


def leading_zeros(x: Array) -> Array:
    """clz.b32 and clz.b64; the width for 0."""
    width = x.dtype.itemsize * 8
    octets = x.astype(x.dtype.newbyteorder(">")).view(np.uint8).reshape(*x.shape, -1)
    bits = np.unpackbits(octets, axis=-1)
    return np.where(x == 0, width, bits.argmax(axis=-1)).astype(np.uint32)


def most_significant_bit(x: Array) -> Array:
    """bfind.u32/.u64: position of the highest set bit, 0xffffffff for none."""
    return (np.uint32(x.dtype.itemsize * 8 - 1) - leading_zeros(x)).astype(np.uint32)


def bit_reverse_u32(x: Array) -> Array:
    bits = np.unpackbits(x.view(np.uint8).reshape(*x.shape, 4), axis=-1, bitorder="little")
    packed = np.packbits(bits[..., ::-1], axis=-1, bitorder="little")
    return packed.view(np.uint32).reshape(x.shape)


def bit_field_extract_u32(x: Array, position: Array, length: Array) -> Array:
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    mask = shift_left(np.ones_like(x), length) - np.uint32(1)
    return shift_right(x, position) & mask


def bit_field_extract_s32(x: Array, position: Array, length: Array) -> Array:
    """The sign is bit min(position + length - 1, 31); a length of 0 gives 0."""
    position = (position & np.uint32(0xFF)).astype(np.int64)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    wide = x.view(np.int32).astype(np.int64)
    field = wide >> np.minimum(position, 63)
    unused = 64 - np.clip(length, 1, 64)
    return np.where(length == 0, 0, (field << unused) >> unused).astype(np.int32)


def bit_field_insert_u32(field: Array, into: Array, position: Array, length: Array) -> Array:
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    mask = shift_left(shift_left(np.ones_like(into), length) - np.uint32(1), position)
    return (into & ~mask) | (shift_left(field, position) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 without a mode: four nibbles choose bytes of {b, a}, bit 3 repeats the sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte)) & np.uint32(0xF)
        shift = ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
        value = ((both >> shift) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(value >= 0x80, np.uint32(0xFF), np.uint32(0))
        value = np.where(nibble >= 8, sign, value)
        result = result | (value << np.uint32(8 * byte))
    return result


def funnel_shift(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    """shf.l / shf.r of {high, low}, .clamp or .wrap."""
    amount = np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    wide = amount.astype(np.uint64)
    if left:
        return (shift_left(both, wide) >> np.uint64(32)).astype(np.uint32)
    return (both >> wide).astype(np.uint32)


# lop3.b32: bit i of the table is the value for a = i >> 2, b = i >> 1 & 1, c = i & 1.
def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            term = a if entry & 4 else ~a
            term = term & (b if entry & 2 else ~b)
            result = result | (term & (c if entry & 1 else ~c))
    return result


def half_of_pair(x: Array, upper: bool) -> Array:
    """One 16-bit half of each element of a uint32 array."""
    return (x >> np.uint32(16) if upper else x & np.uint32(0xFFFF)).astype(np.uint16)


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    product = a.astype(np.float64) * b.astype(np.float64)
    return f16_bits(_round_to_odd_sum(product, c.astype(np.float64))).view(np.float16)


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """Of bf16 bits; rounded to odd to float32 on the way, so that the result is rounded once."""
    wide = [f32_from_bf16(x).astype(np.float64) for x in (a, b, c)]
    total = _round_to_odd_sum(wide[0] * wide[1], wide[2])
    narrow = round_f64_to_f32(total, "rz")
    bits = narrow.view(np.uint32)
    inexact = (narrow.astype(np.float64) != total) & np.isfinite(narrow)
    return bf16_from_f32(np.where(inexact, bits | np.uint32(1), bits).view(np.float32))

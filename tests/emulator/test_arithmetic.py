"""Arithmetic with PTX's rounding, against exact rationals and plain integers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fa4.emulator import arithmetic
from fa4.emulator.float_formats import bf16_to_f32, e4m3_to_f32, e5m2_to_f32

RANDOM = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """As the emulator runs them."""
    with np.errstate(all="ignore"):
        yield


def random_f32(count: int) -> Array:
    """Finite values of all magnitudes."""
    exponents = RANDOM.integers(-40, 40, count)
    return np.ldexp(RANDOM.standard_normal(count), exponents).astype(np.float32)


def rounded_f32(exact: Fraction, mode: str = "rn") -> np.float32:
    """A rational to float32, by looking at the candidates around it."""
    guess = np.float32(exact.numerator / exact.denominator)
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess]
    candidates.append(np.nextafter(guess, np.float32(np.inf)))
    if mode == "rm":
        return max(c for c in candidates if Fraction(float(c)) <= exact)
    if mode == "rp":
        return min(c for c in candidates if Fraction(float(c)) >= exact)
    if mode == "rz":
        return rounded_f32(exact, "rm" if exact > 0 else "rp")
    return min(
        candidates,
        key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1),
    )


def test_fma_rounds_once() -> None:
    a, b = random_f32(300), random_f32(300)
    c = np.where(np.arange(300) % 2, -a * b, random_f32(300))  # cancellation in half of them
    result = arithmetic.fma_f32(a, b, c)
    for x, y, z, found in zip(a, b, c, result, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert found == rounded_f32(exact)


def test_fma_does_not_round_twice() -> None:
    """2**-60 decides a tie between float32 neighbours, and float64 cannot hold it."""
    a = np.array([1.0, 1.0], np.float32)
    b = np.array([2.0**-60, -(2.0**-60)], np.float32)
    wide_a, wide_b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    product = Fraction(float(wide_a)) * Fraction(float(wide_b))  # 1 + 2**-11 + 2**-24: a tie
    assert rounded_f32(product) == np.float32(1 + 2**-11)
    pair = np.array([wide_a, wide_a])
    result = arithmetic.fma_f32(pair, pair, a * b)
    above = np.nextafter(np.float32(1 + 2**-11), np.float32(2))
    assert result.tolist() == [above, np.float32(1 + 2**-11)]


def test_fma_of_special_values() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    a = np.array([inf, inf, 0, nan], np.float32)
    b = np.array([2, 0, inf, 1], np.float32)
    c = np.array([1, 1, 1, 1], np.float32)
    result = arithmetic.fma_f32(a, b, c)
    assert result[0] == inf
    assert np.isnan(result[1:]).all()


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str) -> None:
    a, b, c = random_f32(200), random_f32(200), random_f32(200)
    total = arithmetic.add_f32_directed(a, b, mode)
    product = arithmetic.mul_f32_directed(a, b, mode)
    fused = arithmetic.fma_f32_directed(a, b, c, mode)
    for x, y, z, s, p, f in zip(a, b, c, total, product, fused, strict=True):
        ex, ey, ez = Fraction(float(x)), Fraction(float(y)), Fraction(float(z))
        assert s == rounded_f32(ex + ey, mode)
        assert p == rounded_f32(ex * ey, mode)
        assert f == rounded_f32(ex * ey + ez, mode)


def nearest_code(value: float, codes: Array, values: Array) -> int:
    """The code whose value is nearest, the even one of two."""
    distance = np.abs(values.astype(np.float64) - value)
    candidates = codes[distance == distance.min()]
    return int(next((c for c in candidates if c % 2 == 0), candidates[0]))


def test_bf16_rounds_to_nearest_even() -> None:
    codes = np.arange(0x7F80, dtype=np.uint16)
    values = bf16_to_f32(codes)
    x = np.concatenate([np.abs(random_f32(150)), (values[1000:1050] + values[1001:1051]) / 2])
    found = arithmetic.bf16_from_f32(x.astype(np.float32))
    assert found.tolist() == [nearest_code(v, codes, values) for v in x.astype(np.float32)]


def test_bf16_of_special_values() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -0.0, 3.4e38, -1.0], np.float32)
    expected = [0x7F80, 0xFF80, 0x7FFF, 0x8000, 0x7F80, 0xBF80]
    assert arithmetic.bf16_from_f32(x).tolist() == expected


def test_pairs_have_their_first_operand_in_the_upper_half() -> None:
    high, low = np.array([1.0, np.nan], np.float32), np.array([-2.0, 3.0], np.float32)
    assert arithmetic.bf16x2_from_f32(high, low).tolist() == [0x3F80C000, 0x7FFF4040]
    assert arithmetic.f16x2_from_f32(high, low).tolist() == [0x3C00C000, 0x7FFF4200]


@pytest.mark.parametrize(
    ("convert", "to_f32", "largest"),
    [
        (arithmetic.e4m3_from_f32, e4m3_to_f32, 448.0),
        (arithmetic.e5m2_from_f32, e5m2_to_f32, 57344.0),
    ],
)
def test_fp8_rounds_to_nearest_even_and_saturates(
    convert: Any, to_f32: Any, largest: float
) -> None:
    codes = np.arange(128, dtype=np.uint8)
    values = to_f32(codes)
    finite = np.isfinite(values) & (values <= largest)
    codes, values = codes[finite], values[finite]
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2, values * np.float32(1.03)])
    x = np.concatenate([x, [1e9, np.inf]]).astype(np.float32)
    expected = [nearest_code(min(float(v), largest), codes, values) for v in x]
    assert convert(x).tolist() == expected
    assert convert(-x).tolist() == [code | 0x80 for code in expected]
    assert convert(np.array([np.nan], np.float32)).tolist() == [0x7F]


def test_tf32_keeps_ten_bits() -> None:
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, np.nan], np.float32)
    nearest = arithmetic.tf32_from_f32(x, "rn").view(np.float32)
    away = arithmetic.tf32_from_f32(x, "rna").view(np.float32)
    zero = arithmetic.tf32_from_f32(x, "rz").view(np.float32)
    assert nearest[:3].tolist() == [1.0, 1 + 2**-9, 1 + 2**-10]
    assert away[:3].tolist() == [1 + 2**-10, 1 + 2**-9, 1 + 2**-10]
    assert zero[:3].tolist() == [1.0, 1 + 2**-10, 1.0]
    assert np.isnan([nearest[3], away[3], zero[3]]).all()


def test_bf16_fma_rounds_once() -> None:
    codes = RANDOM.integers(0x3000, 0x4800, (3, 200)).astype(np.uint16)
    codes[2, ::2] |= 0x8000
    a, b, c = codes
    finite = np.arange(0x7F80, dtype=np.uint16)
    values = bf16_to_f32(finite)
    for x, y, z, found in zip(a, b, c, arithmetic.fma_bf16(a, b, c), strict=True):
        floats = [Fraction(float(v)) for v in bf16_to_f32(np.array([x, y, z], np.uint16))]
        exact = floats[0] * floats[1] + floats[2]
        code = nearest_code(float(abs(exact)), finite, values)
        assert int(found) & 0x7FFF == code
        assert not exact or bool(found & 0x8000) == (exact < 0)


def test_approximations_are_correctly_rounded_and_flush() -> None:
    x = np.array([0.5, -3.25, 0, -130.0, np.inf, -np.inf, 200.0], np.float32)
    exact = [2**0.5, 2**-3.25, 1, 0, math.inf, 0, math.inf]
    assert arithmetic.ex2_ftz_f32(x).tolist() == np.array(exact, np.float32).tolist()
    assert arithmetic.ex2_f32(x)[3] == np.float32(2.0**-130)
    tiny = np.array([2.0**-127, -(2.0**-127), 2.0**-126, 1], np.float32)
    assert arithmetic.flush_f32(tiny).tolist() == [0, 0, 2.0**-126, 1]
    assert np.signbit(arithmetic.flush_f32(tiny)[1])
    assert arithmetic.saturate_f32(np.array([-1, 0.5, 2, np.nan], np.float32)).tolist() == [
        0, 0.5, 1, 0,
    ]  # fmt: skip


def test_floats_to_integers_saturate_and_nan_is_zero() -> None:
    x = np.array([2.5, 3.5, -2.5, 1e20, -1e20, np.nan, np.inf], np.float32)
    top, bottom = 2**31 - 1, -(2**31)
    expected = {
        "rni": [2, 4, -2, top, bottom, 0, top],
        "rzi": [2, 3, -2, top, bottom, 0, top],
        "rmi": [2, 3, -3, top, bottom, 0, top],
        "rpi": [3, 4, -2, top, bottom, 0, top],
    }
    for mode, values in expected.items():
        assert arithmetic.integer_from_float(x, np.dtype(np.int32), mode).tolist() == values
    unsigned = arithmetic.integer_from_float(x, np.dtype(np.uint64), "rzi")
    assert unsigned.tolist() == [2, 3, 0, 2**64 - 1, 0, 0, 2**64 - 1]
    signed = arithmetic.integer_from_float(x, np.dtype(np.int64), "rzi")
    assert signed.tolist() == [2, 3, -2, 2**63 - 1, -(2**63), 0, 2**63 - 1]


def test_division_truncates() -> None:
    a = np.array([7, -7, 7, -7, -(2**31), 5], np.int32)
    b = np.array([2, 2, -2, -2, 3, 0], np.int32)
    assert arithmetic.div_signed(a, b).tolist() == [3, -3, -3, 3, -715827882, -1]
    assert arithmetic.rem_signed(a, b)[:5].tolist() == [1, -1, 1, -1, -2]
    ua, ub = np.array([7, 2**32 - 1, 9], np.uint32), np.array([2, 10, 0], np.uint32)
    assert arithmetic.div_unsigned(ua, ub).tolist() == [3, 429496729, 2**32 - 1]
    assert arithmetic.rem_unsigned(ua, ub)[:2].tolist() == [1, 5]


def random_ints(dtype: Any, count: int = 64) -> Array:
    info = np.iinfo(dtype)
    return RANDOM.integers(info.min, info.max, count, dtype=dtype, endpoint=True)


def test_upper_halves_of_64_bit_products() -> None:
    a, b = random_ints(np.uint64), random_ints(np.uint64)
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert arithmetic.mul_high_u64(a, b).tolist() == expected
    sa, sb = a.view(np.int64), b.view(np.int64)
    expected = [int(x) * int(y) >> 64 for x, y in zip(sa, sb, strict=True)]
    assert arithmetic.mul_high_s64(sa, sb).tolist() == expected


def test_shifts_by_the_width_or_more() -> None:
    amount = np.array([0, 1, 31, 32, 255], np.uint32)
    x = np.full(5, 0x80000001, np.uint32)
    assert arithmetic.shift_left(x, amount).tolist() == [0x80000001, 2, 0x80000000, 0, 0]
    assert arithmetic.shift_right(x, amount).tolist() == [0x80000001, 0x40000000, 1, 0, 0]
    signed = arithmetic.shift_right(x.view(np.int32), amount)
    assert signed.tolist() == [-(2**31) + 1, -(2**30), -1, -1, -1]
    short = arithmetic.shift_left(np.full(5, 1, np.uint16), np.array([0, 1, 15, 16, 99], np.uint32))
    assert short.tolist() == [1, 2, 0x8000, 0, 0]


def test_bit_fields() -> None:
    x = random_ints(np.uint32)
    position = RANDOM.integers(0, 40, 64).astype(np.uint32)
    length = RANDOM.integers(0, 40, 64).astype(np.uint32)
    unsigned = arithmetic.bit_field_extract_u32(x, position, length)
    signed = arithmetic.bit_field_extract_s32(x, position, length)
    inserted = arithmetic.bit_field_insert_u32(x, ~x, position, length)
    for v, p, n, u, s, i in zip(x, position, length, unsigned, signed, inserted, strict=True):
        value, p, n = int(v), int(p), int(n)
        assert int(u) == (value >> p) & ((1 << n) - 1)
        sign_at = min(p + n - 1, 31)
        sign = value >> sign_at & 1 if n else 0
        bits = [value >> (p + k) & 1 if k < n and p + k < 32 else sign for k in range(32)]
        expected = sum(bit << k for k, bit in enumerate(bits))
        assert int(s) & 0xFFFFFFFF == (expected if n else 0)
        mask = (((1 << n) - 1) << p) & 0xFFFFFFFF
        into = ~value & 0xFFFFFFFF
        assert int(i) == (into & ~mask & 0xFFFFFFFF) | ((value << p) & mask)


def test_bit_counts() -> None:
    x = np.array([0, 1, 0x80000000, 0xF0F0, 0xFFFFFFFF], np.uint32)
    assert arithmetic.popcount(x).tolist() == [0, 1, 1, 8, 32]
    assert arithmetic.leading_zeros(x).tolist() == [32, 31, 0, 16, 0]
    assert arithmetic.most_significant_bit(x).tolist() == [0xFFFFFFFF, 0, 31, 15, 31]
    assert arithmetic.bit_reverse_u32(x).tolist() == [0, 0x80000000, 1, 0x0F0F0000, 0xFFFFFFFF]
    wide = np.array([0, 1 << 40], np.uint64)
    assert arithmetic.popcount(wide).tolist() == [0, 1]
    assert arithmetic.leading_zeros(wide).tolist() == [64, 23]


def test_permute_funnel_and_logic() -> None:
    a, b, c = (random_ints(np.uint32) for _ in range(3))
    selected = arithmetic.permute_bytes(a, b, np.full(64, 0x7210, np.uint32))
    assert selected.tolist() == ((a & np.uint32(0xFFFFFF)) | (b & np.uint32(0xFF000000))).tolist()
    signs = arithmetic.permute_bytes(a, b, np.full(64, 0x000B, np.uint32)) & np.uint32(0xFF)
    assert signs.tolist() == np.where(a >> 31 == 1, 0xFF, 0).tolist()
    for amount in (0, 5, 31, 32, 40):
        n = np.full(64, amount, np.uint32)
        both = [int(h) << 32 | int(low) for low, h in zip(a, b, strict=True)]
        k = min(amount, 32)
        left = arithmetic.funnel_shift(a, b, n, True, True)
        right = arithmetic.funnel_shift(a, b, n, False, True)
        assert left.tolist() == [(v << k) >> 32 & 0xFFFFFFFF for v in both]
        assert right.tolist() == [v >> k & 0xFFFFFFFF for v in both]
    assert arithmetic.logic3(a, b, c, 0xE8).tolist() == ((a & b) | (a & c) | (b & c)).tolist()
    assert arithmetic.logic3(a, b, c, 0x96).tolist() == (a ^ b ^ c).tolist()


def test_interleaving_takes_from_each_array_in_turn() -> None:
    rows = arithmetic.interleave(np.arange(3, dtype=np.uint16), np.arange(3, 6, dtype=np.uint16))
    assert rows.dtype == np.uint16
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]

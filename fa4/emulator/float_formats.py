"""Narrow floating-point formats as NumPy arrays: bits to float32 and back.

bf16  uint16, the upper half of a float32
fp16  NumPy's own float16
tf32  float32 whose lowest 13 bits a tensor core ignores
e4m3  uint8, 4 exponent and 3 mantissa bits, bias 7, no infinity, NaN is 0x7F and 0xFF
e5m2  uint8, 5 exponent and 2 mantissa bits, bias 15, with infinity, as the upper half of fp16
e2m3  6 bits, 2 exponent and 3 mantissa bits, bias 1, no infinity, no NaN
e3m2  6 bits, 3 exponent and 2 mantissa bits, bias 3, no infinity, no NaN
e2m1  4 bits, 2 exponent bits and 1 mantissa bit, bias 1, no infinity, no NaN

Scale factors have no sign: ue8m0 (uint8) is 2^(code - 127), 0xFF is NaN; ue4m3 is an e4m3 whose
highest bit is 0.

In shared memory a tensor core of kind f8f6f4 takes 6-bit and 4-bit elements in blocks of 16 bytes:
16 elements, the first in the lowest bits, then padding. In tensor memory it takes them in a byte
each: 6 bits in the lowest, 4 bits above two zeros. Kind mxf4 takes 4-bit elements two a byte.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]


def bf16_to_f32(bits: NDArray[np.uint16]) -> Float32s:
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def f32_to_bf16(values: Float32s) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; every NaN becomes 0x7FFF, as `cvt` makes it."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def truncate_to_tf32(values: Float32s) -> Float32s:
    """What a tensor core reads of a float32 operand of kind tf32."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _minifloat_table(exponent_bits: int, mantissa_bits: int) -> Float32s:
    """Values of all codes of a sign, exponent and mantissa, all of them finite."""
    codes = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    bias = (1 << exponent_bits - 1) - 1
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = np.ldexp(1 + fraction, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    return np.where(codes >> exponent_bits + mantissa_bits, -values, values).astype(np.float32)


def _e4m3_table() -> Float32s:
    values = _minifloat_table(4, 3)
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3: Any = _e4m3_table()
E5M2: Any = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
E2M3: Any = _minifloat_table(2, 3)
E3M2: Any = _minifloat_table(3, 2)
E2M1: Any = _minifloat_table(2, 1)
# Float64: two scale factors of 2^127 multiply to more than a float32 holds.
UE8M0: Any = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
UE4M3: Any = np.append(E4M3[:128].astype(np.float64), np.full(128, np.nan))


def e4m3_to_f32(bits: NDArray[np.uint8]) -> Float32s:
    return E4M3[bits]


def e5m2_to_f32(bits: NDArray[np.uint8]) -> Float32s:
    return E5M2[bits]


def nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit elements of (..., bytes), the lower half of a byte first: (..., 2 bytes)."""
    return np.stack((raw & 0xF, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)


def sextets(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """6-bit elements of (..., 3 m bytes), from the lowest bits on: (..., 4 m)."""
    low, middle, high = (raw[..., part::3] for part in range(3))
    elements = (
        low & 0x3F,
        low >> 6 | (middle & 0xF) << 2,
        middle >> 4 | (high & 0x3) << 4,
        high >> 2,
    )
    return np.stack(elements, axis=-1).reshape(*raw.shape[:-1], -1)


def padded_nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit elements of (..., 16 m bytes) in padded blocks: (..., 16 m)."""
    return _of_blocks(nibbles, raw, 8)


def padded_sextets(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """6-bit elements of (..., 16 m bytes) in padded blocks: (..., 16 m)."""
    return _of_blocks(sextets, raw, 12)


def _of_blocks(unpack: Any, raw: NDArray[np.uint8], used: int) -> NDArray[np.uint8]:
    blocks = raw.reshape(*raw.shape[:-1], -1, 16)[..., :used]
    return unpack(blocks).reshape(raw.shape)

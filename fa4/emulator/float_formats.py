"""Narrow floating-point formats as NumPy arrays: bits to float32 and back.

bf16  uint16, the upper half of a float32
fp16  NumPy's own float16
tf32  float32 whose lowest 13 bits a tensor core ignores
e4m3  uint8, 4 exponent and 3 mantissa bits, bias 7, no infinity, NaN is 0x7F and 0xFF
e5m2  uint8, 5 exponent and 2 mantissa bits, bias 15, with infinity, as the upper half of fp16
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


def _e4m3_table() -> Float32s:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 0xF, codes & 0x7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    subnormal = np.ldexp(mantissa / 8, -6)
    values = np.where(exponent == 0, subnormal, normal)
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


E4M3: Any = _e4m3_table()
E5M2: Any = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def e4m3_to_f32(bits: NDArray[np.uint8]) -> Float32s:
    return E4M3[bits]


def e5m2_to_f32(bits: NDArray[np.uint8]) -> Float32s:
    return E5M2[bits]

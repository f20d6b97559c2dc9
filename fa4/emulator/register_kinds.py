"""PTX types as NumPy types."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LANES = 32  # of a warp


class Kind(NamedTuple):
    """How the lanes of a register are seen.

    dtype   NumPy type of the elements
    bits    a lane's
    packed  several elements a lane; its arrays are (lanes * elements,), lanes contiguous
    """

    dtype: np.dtype[Any]
    bits: int
    packed: bool = False


# bf16 and 8-bit floats are kept as bit patterns.
KINDS: dict[str, Kind] = {
    "pred": Kind(np.dtype(np.bool_), 1),
    **{f"u{n}": Kind(np.dtype(f"uint{n}"), n) for n in (8, 16, 32, 64)},
    **{f"s{n}": Kind(np.dtype(f"int{n}"), n) for n in (8, 16, 32, 64)},
    **{f"f{n}": Kind(np.dtype(f"float{n}"), n) for n in (16, 32, 64)},
    # 16 bytes that nobody calculates with; NumPy has no other type of that size.
    "u128": Kind(np.dtype(np.complex128), 128),
    "bf16": Kind(np.dtype(np.uint16), 16),
    "f32x2": Kind(np.dtype(np.float32), 64, packed=True),
    "f16x2": Kind(np.dtype(np.float16), 32, packed=True),
    "bf16x2": Kind(np.dtype(np.uint16), 32, packed=True),
}


def kind_of(ptx_type: str) -> str:
    """Kind of a declared or written type: untyped bits are unsigned."""
    return "u" + ptx_type[1:] if ptx_type in ("b8", "b16", "b32", "b64", "b128") else ptx_type

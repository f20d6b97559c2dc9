"""Scale factors of `tcgen05.mma`: where they lie in tensor memory, and what they do to operands.

An instruction has 1, 2 or 4 scale factors of a byte for each row of A and of B. Row r's are bytes
of the word at lane r mod 32, column r div 32; the instruction descriptor names the first byte. The
32 lanes are repeated in all quarters of the lanes. Of a pair with M = 128, whose D has half the
columns in each half of the lanes, half h of B's rows is in quarters 2h and 2h + 1 alone.

A CTA of a pair has the scale factors of its own rows of A and of all rows of B. Bits 30 and 31 of
an address are no part of it: kernels carry the first byte there.
(PTX ISA 9, "Block scaling"; CUTLASS, `tmem_sf_frg`.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.emulator import float_formats
from fa4.emulator.errors import EmulationError, UnknownInstruction
from fa4.emulator.mma_descriptor_sm100 import Scaling
from fa4.emulator.tensor_memory import COLUMN_MASK, LANE_SHIFT, QUARTER, TMEM_LANES, TensorMemory

Array = np.ndarray[Any, Any]

_QUARTERS = TMEM_LANES // QUARTER
_ADDRESS_MASK = (1 << 30) - 1
_WORD = 4


class ScaleCopiesDiffer(EmulationError):
    """The quarters of the lanes, which each scale a part of a product, hold other scale factors."""


def scale_columns(rows: int, parts: int = 1) -> int:
    """Columns that the scale factors of a number of rows take."""
    return -(-rows // parts // QUARTER)


def column_of(address: int, what: str) -> int:
    address &= _ADDRESS_MASK
    if address >> LANE_SHIFT:
        raise UnknownInstruction(f"{what} start at lane {address >> LANE_SHIFT}, not at 0.")
    return address & COLUMN_MASK


def read_scales(
    memory: TensorMemory,
    address: int,
    first_byte: int,
    rows: int,
    parts: int,
    scaling: Scaling,
    what: str,
) -> Array:
    """(rows, vectors) float64.

    parts  in how many groups of quarters the rows lie
    """
    count = scale_columns(rows, parts)
    words = memory.read(column_of(address, what), count, slice(0, TMEM_LANES), what)
    # Axes: column, part, quarter of the part, lane.
    copies = words.reshape(count, parts, _QUARTERS // parts, QUARTER)
    raw = np.ascontiguousarray(copies.transpose(2, 1, 0, 3)).view(np.uint8)
    raw = raw.reshape(_QUARTERS // parts, parts, count * QUARTER, _WORD)
    each = rows // parts
    used = raw[:, :, :each, first_byte : first_byte + scaling.vectors]
    if (used != used[0]).any():
        raise ScaleCopiesDiffer(
            f"{what} at column {address & COLUMN_MASK} of {memory.name} are not the same in all "
            "quarters of the lanes."
        )
    table = float_formats.UE8M0 if scaling.is_ue8m0 else float_formats.UE4M3
    scales: Array = table[used[0].reshape(rows, scaling.vectors)]
    return scales


def scaled(operand: Array, scales: Array) -> Array:
    """An operand (rows, k) times its scale factors (rows, blocks), each for k / blocks elements."""
    rows, k = operand.shape
    blocks = scales.shape[1]
    product = operand.reshape(rows, blocks, k // blocks) * scales[:, :, None]
    return product.reshape(rows, k)

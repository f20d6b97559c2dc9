"""`tcgen05.cp`: rows of shared memory into tensor memory.

    shape                  rows  columns  row r goes to lanes
    128x256b               128   8        r
    128x128b               128   4        r
    4x256b                 4     8        32 r
    64x128b.warpx2::02_13  64    4        r and r + 64
    64x128b.warpx2::01_23  64    4        r + 32 (r div 32), and 32 more
    32x128b.warpx4         32    4        r, r + 32, r + 64 and r + 96

all behind the lane of the address. A row is K major, as a matrix descriptor says: see
tensor_core.py. With ``.b8x16.b4x16_p64`` and ``.b8x16.b6x16_p32`` 16 padded elements of 4 or 6 bits
become 16 bytes: see float_formats.py. With cta_group::2 each CTA of the pair copies from its own
shared memory to its own tensor memory.
(PTX ISA 9, tcgen05.cp; CUTLASS, `SM100_UTCCP_*`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.emulator import float_formats
from fa4.emulator.errors import OutOfBounds
from fa4.emulator.memory import SharedMemory
from fa4.emulator.swizzle import CHUNK, PERIOD
from fa4.emulator.tensor_core import gather_raw, row_chunks
from fa4.emulator.tensor_core_sm100 import decode_descriptor, layout_of
from fa4.emulator.tensor_memory import COLUMN_MASK, LANE_SHIFT, TMEM_LANES, TensorMemory

Array = np.ndarray[Any, Any]

_COLUMNS_OF_CHUNK = CHUNK // 4


@dataclass(frozen=True)
class CopyShape:
    """Rows and columns of a copy, and the lanes of each row."""

    rows: int
    columns: int
    lanes: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row in shared memory."""
        return self.columns // _COLUMNS_OF_CHUNK


def _each(rows: int, step: int, *behind: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(step * row + more for more in behind) for row in range(rows))


SHAPES = {
    "128x256b": CopyShape(128, 8, _each(128, 1, 0)),
    "128x128b": CopyShape(128, 4, _each(128, 1, 0)),
    "4x256b": CopyShape(4, 8, _each(4, 32, 0)),
    "64x128b.warpx2::02_13": CopyShape(64, 4, _each(64, 1, 0, 64)),
    "64x128b.warpx2::01_23": CopyShape(
        64, 4, tuple((row + 32 * (row // 32), row + 32 * (row // 32) + 32) for row in range(64))
    ),
    "32x128b.warpx4": CopyShape(32, 4, _each(32, 1, 0, 32, 64, 96)),
}


def _widened_nibbles(raw: Array) -> Array:
    return float_formats.padded_nibbles(raw) << 2


DECOMPRESSIONS: dict[str, Callable[[Array], Array]] = {
    "b4x16_p64": _widened_nibbles,
    "b6x16_p32": float_formats.padded_sextets,
}


def lanes_of(shape: CopyShape, address: int) -> Array:
    """(copies, rows) lanes that a copy to an address writes."""
    lanes = np.array(shape.lanes).T + (address >> LANE_SHIFT)
    if lanes.max() >= TMEM_LANES:
        raise OutOfBounds(
            f"tcgen05.cp of {shape.rows} rows to lane {address >> LANE_SHIFT} reaches lane "
            f"{lanes.max()}; there are {TMEM_LANES}."
        )
    return lanes


def copy_rows(
    shared: SharedMemory,
    descriptor: int,
    memory: TensorMemory,
    address: int,
    shape: CopyShape,
    decompression: str | None,
) -> None:
    """Copy from one CTA's shared memory to its tensor memory."""
    what = "tcgen05.cp"
    decoded = decode_descriptor(descriptor)
    base = decoded.start - decoded.start % PERIOD
    start = (decoded.start - base) // CHUNK
    chunks = row_chunks((start,), layout_of(descriptor), shape.rows, shape.chunks)
    raw = gather_raw(shared, base, chunks, what).reshape(shape.rows, -1)
    if decompression is not None:
        raw = DECOMPRESSIONS[decompression](raw)
    words = np.ascontiguousarray(raw).view(np.uint32).T
    for lanes in lanes_of(shape, address):
        memory.write(address & COLUMN_MASK, lanes, words, what)

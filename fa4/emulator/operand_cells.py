"""Which shadow cells an operand of the tensor cores takes in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.race_detector import Cells, Shadow
from fa4.emulator.swizzle import CHUNK, PERIOD
from fa4.emulator.tensor_core import (
    MatrixDescriptor,
    Operand,
    operand_chunks,
    row_chunks,
    runs_of_one_layout,
)


def operand_cells(
    shadow: Shadow,
    steps: Sequence[MatrixDescriptor],
    rows: int,
    major_mn: bool,
    operand: Operand,
) -> Cells:
    """Shadow cells of an operand of the tensor cores; one descriptor a step of k."""
    parts = []
    for layout, base, starts in runs_of_one_layout(steps):
        cells = _cells_behind(starts, layout, rows, major_mn, operand, shadow.cell_bytes)
        parts.append(_moved(cells, base // shadow.cell_bytes))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.r_[cells] for cells in parts])


def row_cells(shadow: Shadow, rows: MatrixDescriptor, count: int, chunks: int) -> Cells:
    """Shadow cells of K-major rows of a number of chunks."""
    base = rows.start - rows.start % PERIOD
    layout = dataclasses.replace(rows, start=0)
    positions, _, _ = row_chunks(((rows.start - base) // CHUNK,), layout, count, chunks)
    return _moved(_cells_of(positions, shadow.cell_bytes), base // shadow.cell_bytes)


@lru_cache(maxsize=1024)
def _cells_behind(
    starts: tuple[int, ...],
    layout: MatrixDescriptor,
    rows: int,
    major_mn: bool,
    operand: Operand,
    cell_bytes: int,
) -> slice | NDArray[np.int64]:
    """Cells of an operand from a multiple of `PERIOD` on; see tensor_core.operand_chunks."""
    positions, _, _ = operand_chunks(starts, layout, rows, major_mn, operand)
    return _cells_of(positions, cell_bytes)


def _cells_of(positions: NDArray[np.int64], cell_bytes: int) -> slice | NDArray[np.int64]:
    chunks = np.unique(positions)
    each = CHUNK // cell_bytes
    if chunks[-1] - chunks[0] == chunks.size - 1:
        return slice(int(chunks[0]) * each, int(chunks[-1] + 1) * each)
    return (chunks[:, None] * each + np.arange(each)).reshape(-1)


def _moved(cells: slice | NDArray[np.int64], offset: int) -> Cells:
    if isinstance(cells, slice):
        return slice(cells.start + offset, cells.stop + offset)
    return cells + offset

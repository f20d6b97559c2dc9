"""Which shadow cells an operand of the tensor cores takes in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.race_detector import Cells, Shadow
from fa4.emulator.swizzle import CHUNK, PERIOD
from fa4.emulator.tensor_core import MatrixDescriptor, Operand, operand_chunks


def operand_cells(
    shadow: Shadow,
    steps: Sequence[MatrixDescriptor],
    rows: int,
    major_mn: bool,
    operand: Operand,
) -> Cells:
    """Shadow cells of an operand of the tensor cores; one descriptor a step of k."""
    first = steps[0]
    base = first.start - first.start % PERIOD
    cells = _cells_behind(
        tuple((step.start - base) // CHUNK for step in steps),
        first.leading_offset // CHUNK,
        first.stride_offset // CHUNK,
        first.swizzle,
        rows,
        major_mn,
        operand,
        shadow.cell_bytes,
    )
    offset = base // shadow.cell_bytes
    if isinstance(cells, slice):
        return slice(cells.start + offset, cells.stop + offset)
    return cells + offset


@lru_cache(maxsize=1024)
def _cells_behind(
    starts: tuple[int, ...],
    leading: int,
    stride: int,
    swizzle: int,
    rows: int,
    major_mn: bool,
    operand: Operand,
    cell_bytes: int,
) -> slice | NDArray[np.int64]:
    """Cells of an operand from a multiple of `PERIOD` on; see tensor_core.operand_chunks."""
    positions, _, _ = operand_chunks(starts, leading, stride, swizzle, rows, major_mn, operand)
    chunks = np.unique(positions)
    each = CHUNK // cell_bytes
    if chunks[-1] - chunks[0] == chunks.size - 1:
        return slice(int(chunks[0]) * each, int(chunks[-1] + 1) * each)
    return (chunks[:, None] * each + np.arange(each)).reshape(-1)

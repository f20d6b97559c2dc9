"""`ldmatrix` and `stmatrix`: 8x8 matrices of 16-bit elements between memory rows and registers.

A matrix has eight rows of 16 bytes in memory; lane 8 m + r gives the address of row r of matrix m.
Register m of lane t holds two elements of matrix m: columns 2 (t mod 4) and the next of row
t div 4, or with ``.trans`` rows 2 (t mod 4) and the next of column t div 4.
"""

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.memory import Bytes

LANES = 32
MATRIX_ROWS = 8
MATRIX_ROW_BYTES = 16


def rows_to_registers(rows: Bytes, is_transposed: bool) -> NDArray[np.uint32]:
    """Memory rows (8 * matrices, 16) as registers (matrices, 32 lanes): `ldmatrix`."""
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, MATRIX_ROWS, 8)
    if is_transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, LANES)


def registers_to_rows(registers: NDArray[np.uint32], is_transposed: bool) -> Bytes:
    """Registers (matrices, 32 lanes) as memory rows (8 * matrices, 16): `stmatrix`."""
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, MATRIX_ROWS, 8)
    if is_transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, MATRIX_ROW_BYTES)

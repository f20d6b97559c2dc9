"""Shared-memory swizzles: which 16-byte chunk of an atom holds which.

A swizzle of W bytes (32, 64, 128) permutes the 16-byte chunks within rows of W bytes. It works on
absolute shared addresses: bits 4 and up of an address are XORed with bits 7 and up, as many bits as
number a row's chunks. So it repeats every 1024 bytes, and copies and matrix operands agree without
knowing where a buffer starts.

The swizzle of 128 bytes also comes with atoms of 32 bytes, for MN-major tf32: then bits 5 and 6 are
XORed with bits 7 and 8.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK = 16  # bytes
PERIOD = 1024  # bytes


def swizzled_chunks(
    chunk_index: NDArray[np.int64], width: int, atom: int = CHUNK
) -> NDArray[np.int64]:
    """Positions of chunks (shared address / 16) under a swizzle of ``width`` bytes; 0 is none.

    atom  bytes that stay together
    """
    if width == 0:
        return chunk_index
    each = atom // CHUNK
    atoms = chunk_index // each
    atoms_in_row = width // atom
    rows = atoms >> (3 if each == 1 else 2)
    return (atoms ^ (rows & (atoms_in_row - 1))) * each + chunk_index % each


@lru_cache(maxsize=1024)
def swizzled_range(
    start_chunk: int, num_chunks: int, width: int, atom: int = CHUNK
) -> NDArray[np.int64]:
    """Positions of consecutive chunks; ``start_chunk`` counts from a multiple of `PERIOD`."""
    positions = swizzled_chunks(np.arange(start_chunk, start_chunk + num_chunks), width, atom)
    positions.setflags(write=False)
    return positions

"""Which queries a key tile is seen by: the range of row blocks, and how much of it needs masks."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class RowRange(NamedTuple):
    """Row blocks of one key tile, visited from the first to the last.

    origin         rows in front of this one see no key of the sequence and are never loaded;
                   everything below counts rows from here
    length         rows from origin to the end of the sequence
    diagonal       key on the causal diagonal of row 0: row i is aligned with key i + diagonal
    first, end     the blocks [first, end) hold every row that sees a key of the tile
    clear_first    in the blocks [clear_first, clear_end) every row sees every key of the tile
    clear_end      that its sequence has; the others need a mask
    """

    origin: Int32
    length: Int32
    diagonal: Int32
    first: Int32
    end: Int32
    clear_first: Int32
    clear_end: Int32


@cute.jit
def first_row_with_keys(
    seqlen_q: Int32, seqlen_k: Int32, right: Int32, has_right: cutlass.Constexpr[bool]
):
    """The first query row that sees a key; every later one does too. seqlen_q where none does."""
    first = Int32(0)
    if const_expr(has_right):
        # Row i sees key 0 from i + seqlen_k - seqlen_q + right = 0 on.
        first = cutlass.min(cutlass.max(seqlen_q - seqlen_k - right, 0), seqlen_q)
    if seqlen_k == 0:
        first = seqlen_q
    return first


@cute.jit
def row_range(
    n_block: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    left: Int32,
    right: Int32,
    has_left: cutlass.Constexpr[bool],
    has_right: cutlass.Constexpr[bool],
    tile_m: cutlass.Constexpr[int],
    tile_n: cutlass.Constexpr[int],
):
    """Row range of the keys [n_block * tile_n, ...) of a sequence; masks as in `key_range`.

    A tile without keys or without rows gets an empty range. Rows behind the last one are no
    reason for a mask: their blocks are filled up with rows that weigh nothing.
    """
    origin = first_row_with_keys(seqlen_q, seqlen_k, right, has_right)
    length = seqlen_q - origin
    diagonal = seqlen_k - seqlen_q + origin
    first_key = n_block * tile_n
    last_key = cutlass.min(first_key + tile_n, seqlen_k) - 1

    end = (length + tile_m - 1) // tile_m
    first = Int32(0)
    clear_first = Int32(0)
    clear_end = end
    if const_expr(has_right):
        first = cutlass.max(first_key - diagonal - right, 0) // tile_m
        clear_first = (cutlass.max(last_key - diagonal - right, 0) + tile_m - 1) // tile_m
    if const_expr(has_left):
        # Rows past the end of what a key is seen by.
        end_row = cutlass.min(last_key - diagonal + left + 1, length)
        end = (cutlass.max(end_row, 0) + tile_m - 1) // tile_m
        clear_end = cutlass.max(first_key - diagonal + left + 1, 0) // tile_m
    if first_key >= seqlen_k:
        end = Int32(0)
    first = cutlass.min(first, end)
    clear_first = cutlass.min(cutlass.max(clear_first, first), end)
    clear_end = cutlass.min(cutlass.max(clear_end, clear_first), end)
    return RowRange(origin, length, diagonal, first, end, clear_first, clear_end)

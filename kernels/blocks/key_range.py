"""Which keys a query tile sees: the range of key blocks, and how much of it needs masks."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class KeyRange(NamedTuple):
    """Key blocks of one query tile, visited from the last to the first.

    origin         keys in front of this one are seen by no row of the sequence and never loaded;
                   everything below counts keys from here
    length         keys from origin to the end of the sequence
    diagonal       key on the causal diagonal of query 0: row i is aligned with key i + diagonal
    first, end     the blocks [first, end) hold every key a row of the tile sees
    clear_first    the blocks [clear_first, clear_end) are seen whole by every row; the others
    clear_end      need a mask. Every row that sees a key sees one behind clear_end * tile_n, or
                   in the last block: it has a running maximum before it meets a clear block
    seen           keys from this one on are seen by no row of the tile
    """

    origin: Int32
    length: Int32
    diagonal: Int32
    first: Int32
    end: Int32
    clear_first: Int32
    clear_end: Int32
    seen: Int32


@cute.jit
def key_range(
    first_row: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    left: Int32,
    right: Int32,
    has_left: cutlass.Constexpr[bool],
    has_right: cutlass.Constexpr[bool],
    tile_m: cutlass.Constexpr[int],
    tile_n: cutlass.Constexpr[int],
):
    """Key range of the ``tile_m`` query rows of a sequence from ``first_row`` on.

    Rows may lie in front of the sequence, where the first of them sees what the mask would show it,
    and behind it.

    Masks are aligned to the bottom right: row i sees the keys from i + seqlen_k - seqlen_q - left
    to i + seqlen_k - seqlen_q + right, both included, where there is such a bound.
    A tile without rows or without keys gets an empty range.
    """
    diagonal = seqlen_k - seqlen_q
    origin = Int32(0)
    if const_expr(has_left):
        origin = cutlass.min(cutlass.max(diagonal - left, 0), seqlen_k)
    length = seqlen_k - origin
    diagonal = diagonal - origin
    last_row = cutlass.min(first_row + tile_m, seqlen_q) - 1

    seen_end = length
    clear_keys = length
    if const_expr(has_right):
        seen_end = cutlass.min(seen_end, last_row + diagonal + right + 1)
        # One less than the first row sees: its last key is left for a block with a mask.
        clear_keys = cutlass.min(clear_keys, first_row + diagonal + right)
    end = (cutlass.max(seen_end, 0) + tile_n - 1) // tile_n
    first = Int32(0)
    clear_first = Int32(0)
    if const_expr(has_left):
        first = cutlass.max(first_row + diagonal - left, 0) // tile_n
        clear_first = (cutlass.max(last_row + diagonal - left, 0) + tile_n - 1) // tile_n
    if first_row >= seqlen_q:
        end = Int32(0)
    first = cutlass.min(first, end)
    clear_end = cutlass.max(cutlass.min(cutlass.max(clear_keys, 0) // tile_n, end), first)
    clear_first = cutlass.min(cutlass.max(clear_first, first), clear_end)
    return KeyRange(origin, length, diagonal, first, end, clear_first, clear_end, seen_end)

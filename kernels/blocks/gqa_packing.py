"""Query heads that share keys, packed into the rows of one tile; and the keys such a tile sees.

Packed row r of a sequence and key head is query position r // group of query head
head_kv * group + r % group, with ``group`` query heads a key head. A decode step of one token then
fills ``group`` rows of a tile, and keys are read once for all of them (FA2's packed GQA).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr


class Sequence(NamedTuple):
    """One sequence of a batch: its queries, and its keys by position in the cache.

    q_start    first query row, in the packed tensor; 0 in a dense one
    q_rows     query positions
    begin_k    first position in use
    end_k      end of the positions in use, appended ones included
    """

    q_start: Int32
    q_rows: Int32
    begin_k: Int32
    end_k: Int32


class PackedRange(NamedTuple):
    """Keys that a tile of packed rows sees, by position in the cache.

    lo, hi       every row sees nothing outside of [lo, hi)
    first, end   the blocks that hold [lo, hi); equal where it is empty
    clear_first  the blocks [clear_first, clear_end) are seen whole by every row; the others need
    clear_end    a mask
    """

    lo: Int32
    hi: Int32
    first: Int32
    end: Int32
    clear_first: Int32
    clear_end: Int32


@cute.jit
def divide(dividend: Int32, divisor: Int32):
    """Quotient of numbers that are not negative: unsigned, which is shorter code."""
    return Int32(Uint32(dividend) // Uint32(divisor))


@cute.jit
def row_limits(
    row: Int32,
    group: Int32,
    sequence: Sequence,
    left: Int32,
    right: Int32,
    has_left: cutlass.Constexpr[bool],
    has_right: cutlass.Constexpr[bool],
):
    """Positions [begin, end) that packed row ``row`` sees; masks are aligned bottom right."""
    aligned = divide(row, group) + sequence.end_k - sequence.q_rows
    begin = sequence.begin_k
    end = sequence.end_k
    if const_expr(has_left):
        begin = cutlass.max(begin, aligned - left)
    if const_expr(has_right):
        end = cutlass.min(end, aligned + right + 1)
    return begin, end


@cute.jit
def packed_range(
    m_block: Int32,
    group: Int32,
    sequence: Sequence,
    left: Int32,
    right: Int32,
    has_left: cutlass.Constexpr[bool],
    has_right: cutlass.Constexpr[bool],
    tile_m: cutlass.Constexpr[int],
    tile_n: cutlass.Constexpr[int],
):
    """What the packed rows [m_block * tile_m, (m_block + 1) * tile_m) of a sequence see.

    A tile without rows or without keys gets an empty range.
    """
    rows = sequence.q_rows * group
    first_row = m_block * tile_m
    last_row = cutlass.max(cutlass.min(first_row + tile_m, rows) - 1, 0)
    limits = (group, sequence, left, right, has_left, has_right)
    lo, clear_hi = row_limits(first_row, *limits)
    clear_lo, hi = row_limits(last_row, *limits)
    is_empty = (first_row >= rows) | (lo >= hi)
    hi = Int32(cutlass.select_(is_empty, lo, hi))
    first = divide(lo, tile_n)
    end = Int32(cutlass.select_(is_empty, first, divide(cutlass.max(hi, 0) + tile_n - 1, tile_n)))
    clear_end = divide(cutlass.max(clear_hi, 0), tile_n)
    clear_first = divide(cutlass.max(clear_lo, 0) + tile_n - 1, tile_n)
    clear_end = cutlass.max(cutlass.min(clear_end, end), first)
    clear_first = cutlass.min(cutlass.max(clear_first, first), clear_end)
    return PackedRange(lo, hi, first, end, clear_first, clear_end)


@cute.jit
def mask_packed(
    scores: cute.Tensor,
    first_key: Int32,
    begin: cute.Tensor,
    end: cute.Tensor,
    has_front: cutlass.Constexpr[bool],
):
    """Set the scores of keys that a row does not see to -inf.

    scores      (2, columns) view of `accumulator.by_row`
    first_key   position of column 0 of this thread; column c is 8 (c/2) + c%2 further
    begin, end  (2,) `row_limits` of this thread's rows
    has_front   whether there is anything to hide in front of ``begin``
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        stop = end[r] - first_key
        start = begin[r] - first_key
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            key = 8 * (c // 2) + c % 2
            hidden = key >= stop
            if const_expr(has_front):
                hidden = hidden | (key < start)
            scores[r, c] = -Float32.inf if hidden else scores[r, c]

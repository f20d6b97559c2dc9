"""Which query tile a tile index means: dense grids, and packed sequences without a host sync."""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

WARP = 32


class Tile(NamedTuple):
    """m_block counts query tiles from the start of sequence ``batch_idx``."""

    m_block: Int32
    head_idx: Int32
    batch_idx: Int32


@cute.jit
def num_slots(total_rows: Int32, batch: Int32, tile_m: cutlass.Constexpr[int]):
    """Tile slots that hold any packing of ``batch`` sequences and the padding behind them.

    Sequence b gets the slots from s(b) = cu_seqlens[b] // tile_m + b on. That is at least
    ceil(length / tile_m) of them for any lengths, and s is known without summing over sequences.
    """
    return total_rows // tile_m + batch + 1


@cute.jit
def count_tiles(
    rows: cute.Tensor,
    cu_seqlens: Optional[cute.Tensor],
    tile_m: cutlass.Constexpr[int],
    is_packed: cutlass.Constexpr[bool],
):
    """(tiles along the rows, batch entries) of a grid over (rows, dim, heads[, batch])."""
    if const_expr(is_packed):
        return num_slots(rows.shape[0], cu_seqlens.shape[0] - 1, tile_m), Int32(1)
    return cute.ceil_div(rows.shape[0], tile_m), rows.shape[3]


@cute.jit
def count_taken(counter: cute.Tensor, calls: Int32):
    """Take a tile: how often CTAs have done so before.

    counter  (1,) int32, 0 before a launch
    calls    that all CTAs of a launch make; behind the last one the counter is 0 again
    """
    return cute.arch.inline_ptx(
        "atom.global.relaxed.gpu.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[counter.iterator.toint(), calls - 1],
    )


@cute.jit
def find_sequence(slot: Int32, cu_seqlens: cute.Tensor, tile_m: cutlass.Constexpr[int]):
    """The last b in [0, batch] with s(b) <= slot, and s(b); see `num_slots`.

    A search by 32 lanes at once: two rounds of loads for a thousand sequences. All lanes of the
    warp must call it; all get the answer.
    """
    lane = cute.arch.lane_idx()
    first = Int32(0)
    end = Int32(cu_seqlens.shape[0])
    while end - first > 1:
        step = (end - first + WARP - 1) // WARP
        probe = first + lane * step
        reached = False
        if probe < end:
            reached = cu_seqlens[probe] // tile_m + probe <= slot
        # Lane 0 always holds; s is increasing, so the lanes that hold come first.
        last = cute.arch.popc(cute.arch.vote_ballot_sync(reached)) - 1
        first = first + last * step
        end = cutlass.min(end, first + step)
    return first, cu_seqlens[first] // tile_m + first


@cute.jit
def locate_tile(
    tile_idx: Int32,
    num_m_blocks: Int32,
    num_heads: Int32,
    num_batches: Int32,
    heads_in_group: Int32,
    total_q: Int32,
    cu_seqlens_q: Optional[cute.Tensor],
    tile_m: cutlass.Constexpr[int],
    longest_first: cutlass.Constexpr[bool],
):
    """Map a tile index to its query tile.

    num_m_blocks    query tiles of a sequence, or slots of all sequences when packed
    num_batches     1 when packed
    heads_in_group  (head, batch) pairs that go through all their query tiles together, so that
                    their keys and values stay in L2
    longest_first   causal: the last query tile of a sequence, which sees most keys, comes first
    """
    pairs = num_heads * num_batches
    in_group = heads_in_group * num_m_blocks
    group = tile_idx // in_group
    inside = tile_idx - group * in_group
    # The last group may be smaller.
    members = cutlass.min(heads_in_group, pairs - group * heads_in_group)
    block = inside // members
    pair = group * heads_in_group + (inside - block * members)
    if const_expr(cu_seqlens_q is not None):
        batch_idx, first_slot = find_sequence(block, cu_seqlens_q, tile_m)
        m_block = block - first_slot
        if const_expr(longest_first):
            end = total_q
            if batch_idx < cu_seqlens_q.shape[0] - 1:
                end = cu_seqlens_q[batch_idx + 1]
            rows = end - cu_seqlens_q[batch_idx]
            blocks = (rows + tile_m - 1) // tile_m
            # A slot of no tile keeps an index past the end.
            if m_block < blocks:
                m_block = blocks - 1 - m_block
        return Tile(m_block, pair, batch_idx)
    batch_idx = pair // num_heads
    m_block = num_m_blocks - 1 - block if const_expr(longest_first) else block
    return Tile(m_block, pair - batch_idx * num_heads, batch_idx)

"""Zeros that the sums of dQ begin with, written shortly before they are added to.

Zeros written all at once, before anything is added, would go to memory and come back from there. So
only the first `LOTS_AHEAD` lots of heads are zeroed beforehand, by `kernels.backward_prepare`. Each
tile of a lot zeroes its share of the lot so many further, by bulk copies of zeros in shared memory,
which take no thread's time, and counts itself when they are done. A tile adds nothing before all
those of the lot so many in front have been counted. They are tiles with lower numbers, which CTAs
take in order, and only when they run: every one of them is done or at work, and nobody waits in a
circle.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.pipelines.sm90_backward import LOTS_AHEAD, ZERO_BYTES


class Lots(NamedTuple):
    """Heads by lots, and what their sums need.

    sums      the first one
    counters  (lots,) int32, 0 at first: tiles that have zeroed their share of each
    tiles     of a lot; the last one may have fewer
    pieces    of `ZERO_BYTES` in the sums of a lot, and of all
    """

    sums: cute.Pointer
    counters: cute.Tensor
    tiles: Int32
    pieces: Int32
    all_pieces: Int32


def lots_of_heads(
    sums: cute.Tensor, counters: cute.Tensor, heads_in_lot: Int32, tiles_in_lot: Int32
):
    """sums  (batch or 1, heads_q, blocks, elements of a block) fp32, contiguous."""
    pieces_of_head = sums.shape[2] * (sums.shape[3] * (Float32.width // 8) // ZERO_BYTES)
    return Lots(
        sums.iterator,
        counters,
        tiles_in_lot,
        heads_in_lot * pieces_of_head,
        sums.shape[0] * sums.shape[1] * pieces_of_head,
    )


@cute.jit
def zero_ahead(lots: Lots, tile_idx: Int32, zeros: cute.Pointer):
    """A warp: request a tile's share of zeros, if there is a lot to write them for.

    zeros  `ZERO_BYTES` of them, in shared memory
    """
    tiles = afresh(lots.tiles)
    lot = tile_idx // tiles
    each = (lots.pieces + tiles - 1) // tiles
    share = (tile_idx - lot * tiles) * each
    first = (lot + LOTS_AHEAD) * lots.pieces
    end = cutlass.min(first + cutlass.min(share + each, lots.pieces), lots.all_pieces)
    if lot + LOTS_AHEAD >= cute.size(lots.counters):
        end = Int32(0)
    first = cute.arch.make_warp_uniform(first + share)
    end = cute.arch.make_warp_uniform(end)
    for piece in cutlass.range(first, end, 32, unroll=1):
        mine = piece + cute.arch.lane_idx()
        target = Int64(lots.sums.toint()) + Int64(mine) * ZERO_BYTES
        # A predicate instead of a branch, behind which ptxas would take nothing for uniform.
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0;\n"
            "@p cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], "
            f"{ZERO_BYTES}; }}",
            read_only_args=[target, zeros.toint(), Int32(mine < end)],
        )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def count_zeroed(lots: Lots, tile_idx: Int32):
    """The same warp: wait for its copies, and say that they are done."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.sync_warp()
    lot = tile_idx // afresh(lots.tiles) + LOTS_AHEAD
    is_speaker = (cute.arch.lane_idx() == 0) & (lot < cute.size(lots.counters))
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0;\n@p red.release.gpu.global.add.s32 [{$r0}], 1; }",
        read_only_args=[(lots.counters.iterator + lot).toint(), Int32(is_speaker)],
    )


@cute.jit
def is_zeroed(lots: Lots, tile_idx: Int32):
    """Whether a tile may add to its sums, and sees the zeros if so."""
    lot = tile_idx // afresh(lots.tiles)
    found = lots.tiles
    if (lot >= LOTS_AHEAD) & (lot < cute.size(lots.counters)):
        found = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[(lots.counters.iterator + lot).toint()],
        )
    return found >= lots.tiles


@cute.jit
def wait_for_zeros(lots: Lots, tile_idx: Int32):
    """Wait until a tile may add to its sums. By every thread that does: no barrier is needed."""
    may_add = is_zeroed(lots, tile_idx)
    while not may_add:
        may_add = is_zeroed(lots, tile_idx)


@cute.jit
def afresh(value: Int32):
    """The same value, from which nothing is worked out long before it is used.

    There are no registers to keep quotients in while products run.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )

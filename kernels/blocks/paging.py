"""Where a key lies in a cache of pages, and copies that gather rows from pages of any size.

A cache is (slots, rows, heads, dim). With a page table, position p of sequence b lies in row
p % rows of slot page_table[b, p // rows]. Without, a sequence has one slot: its own, or the one
that cache_batch_idx names.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa4.kernels.blocks.gqa_packing import divide

CHUNK = 8  # elements of 16 bits in the 16 bytes that a lane copies


class Addressing(NamedTuple):
    """How positions become rows of a cache.

    table      page table (batch, pages), slots (batch,), or None: the sequence's own slot
    rows       rows of a slot: the page size, or the cache's capacity
    num_slots  slots of the cache; as a slot it lies outside, where TMA reads zeros
    """

    table: Optional[cute.Tensor]
    rows: Int32
    num_slots: Int32


@cute.jit
def locate_position(
    addressing: Addressing, batch_idx: Int32, position: Int32, is_live: cutlass.Boolean
):
    """(slot, row in it) of a position; the slot outside for one that is not live.

    The table is read for live positions only: elsewhere it may hold anything.
    """
    table = addressing.table
    if const_expr(table is None):
        return Int32(cutlass.select_(is_live, batch_idx, addressing.num_slots)), position
    slot = addressing.num_slots
    row = position
    if const_expr(cute.rank(table) == 1):
        if is_live:
            slot = table[batch_idx]
    else:
        page = divide(position, addressing.rows)
        row = position - page * addressing.rows
        if is_live:
            slot = table[batch_idx, page]
    return slot, row


@cute.jit
def swizzled(row: Int32, chunk: Int32, rows: cutlass.Constexpr[int], dim: cutlass.Constexpr[int]):
    """Element offset of a 16-byte chunk in a K-major (rows, dim) tile as wgmma and TMA lay it out.

    Dims go in slabs of 64 (32 where 64 does not divide dim), each (rows, slab) row after row;
    chunks trade places within a row by the row's number: swizzle 128B (64B).
    """
    slab = 64 if dim % 64 == 0 else 32
    chunks = slab // CHUNK
    turn = row % 8 if const_expr(slab == 64) else row // 2 % 4
    column = (chunk % chunks) ^ turn
    return (chunk // chunks) * (rows * slab) + row * slab + column * CHUNK


@cute.jit
def copy_chunk(target: cute.Pointer, source: cute.Pointer, is_live: cutlass.Boolean):
    """cp.async of 16 bytes from global to shared memory; zeros, and no read, unless live."""
    size = Int32(cutlass.select_(is_live, Int32(16), Int32(0)))
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[Int32(target.toint()), Int64(source.toint()), size],
    )


@cute.jit
def gather_rows(
    tile: cute.Pointer,
    cache: cute.Tensor,
    slot: Int32,
    row: Int32,
    is_live: Int32,
    head_idx: Int32,
    rows: cutlass.Constexpr[int],
    dim: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
):
    """Start the copies of ``rows`` rows of one head into a swizzled (rows, dim) tile.

    tile       in shared memory
    cache      (slots, rows, heads, dim), unit last stride; chunks past its dim become zeros
    slot, row  where the lane's own row lies: lane l of warp w owns row w * rows / warps + l
    is_live    0 or 1; a row that is not live becomes zeros

    All lanes of ``warps`` warps call it together; the caller commits the group and waits for it.
    """
    per_warp = rows // warps
    chunks = dim // CHUNK
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx() % warps
    slot_stride, row_stride, head_stride = (Int64(s) for s in cache.stride[:3])
    base = cache.iterator + Int64(head_idx) * head_stride
    dim_chunks = cache.shape[3] // CHUNK
    mine = Int32(slot)
    # Not unrolled whole: a producer has few registers for so many addresses.
    for i in cutlass.range(per_warp * chunks // 32, unroll=4):
        index = lane + 32 * i
        owner = index // chunks
        chunk = index - owner * chunks
        slot_i = cute.arch.shuffle_sync(mine, offset=owner)
        row_i = cute.arch.shuffle_sync(row, offset=owner)
        live_i = (cute.arch.shuffle_sync(is_live, offset=owner) != 0) & (chunk < dim_chunks)
        offset = Int64(slot_i) * slot_stride + Int64(row_i) * row_stride + Int64(chunk * CHUNK)
        offset = Int64(cutlass.select_(live_i, offset, Int64(0)))
        target = tile + swizzled(warp * per_warp + owner, chunk, rows, dim)
        copy_chunk(target, base + offset, live_i)

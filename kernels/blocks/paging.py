"""Where a key lies in a cache of pages, and copies that gather rows from pages of any size.

A cache is (slots, rows, heads, dim). With a page table, position p of sequence b lies in row
p % rows of slot page_table[b, p // rows]. Without, a sequence has one slot: its own, or the one
that cache_batch_idx names.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from fa4.kernels.blocks.gqa_packing import divide

CHUNK = 8  # elements of 16 bits in the 16 bytes that a lane copies
CHUNK_BYTES = 16
LOW_HALF = 2**32 - 1


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
    turn = row & 7 if const_expr(slab == 64) else row >> 1 & 3
    column = (chunk % chunks) ^ turn
    return (chunk // chunks) * (rows * slab) + row * slab + column * CHUNK


@cute.jit
def copy_chunk(target: Int32, source: Int64, is_live: cutlass.Boolean):
    """cp.async of 16 bytes from global to shared memory; zeros, and no read, unless live."""
    size = Int32(cutlass.select_(is_live, Int32(CHUNK_BYTES), Int32(0)))
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, size],
    )


@cute.jit
def row_address(cache: cute.Tensor, slot: Int32, row: Int32, head_idx: Int32):
    """(high, low) halves of the address of a row of one head, as `gather_rows` takes it."""
    offset = Int64(slot) * Int64(cache.stride[0]) + Int64(row) * Int64(cache.stride[1])
    offset = offset + Int64(head_idx) * Int64(cache.stride[2])
    address = Int64((cache.iterator + offset).toint())
    return Int32(address >> 32), Int32(address & Int64(LOW_HALF))


@cute.jit
def gather_rows(
    tile: cute.Pointer,
    high: Int32,
    low: Int32,
    live: Int32,
    dim_chunks: Int32,
    rows: cutlass.Constexpr[int],
    dim: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
):
    """Start the copies of ``rows`` rows of one head into a swizzled (rows, dim) tile.

    tile        in shared memory
    high, low   `row_address` of the lane's own row: lane l of warp w owns row w * rows / warps + l
    live        bit l says whether the row of lane l is live; others become zeros, and their
                address is not used
    dim_chunks  16-byte chunks of a row; chunks behind them become zeros

    All lanes of ``warps`` warps call it together.
    """
    per_warp = rows // warps
    chunks = dim // CHUNK
    lane = cute.arch.lane_idx()
    first = (cute.arch.warp_idx() % warps) * per_warp
    target = Int32(tile.toint())
    same_chunk = 32 % chunks == 0  # a lane copies the same chunk of all of its rows
    if const_expr(same_chunk):
        live = Int32(cutlass.select_(lane % chunks < dim_chunks, live, Int32(0)))
    for i in cutlass.range_constexpr(per_warp * chunks // 32):
        index = Uint32(lane + 32 * i)
        owner = Int32(index // chunks)
        chunk = Int32(index % chunks)
        source = joined(
            cute.arch.shuffle_sync(high, offset=owner), cute.arch.shuffle_sync(low, offset=owner)
        )
        is_live = (live >> owner) & 1 != 0
        if const_expr(not same_chunk):
            is_live = is_live & (chunk < dim_chunks)
        where = swizzled(first + owner, chunk, rows, dim) * 2
        copy_chunk(target + where, source + Int64(chunk * CHUNK_BYTES), is_live)


@cute.jit
def joined(high: Int32, low: Int32):
    """The 64 bits of two halves."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high]
    )

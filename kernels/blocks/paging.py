"""Where a key lies in a cache of pages, and copies that gather rows from pages of any size.

A cache is (slots, rows, heads, dim). With a page table, position p of sequence b lies in row
p % rows of slot page_table[b, p // rows]. Without, a sequence has one slot: its own, or the one
that cache_batch_idx names.
"""

import math
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from fa4.kernels.blocks.gqa_packing import divide

CHUNK = 8  # elements of 16 bits in the 16 bytes that a lane copies
CHUNK_BYTES = 16
ASYNC_BYTES = 4  # the least that cp.async copies
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
def copy_chunk(
    target: Int32, source: Int64, is_live: cutlass.Boolean, align: cutlass.Constexpr[int]
):
    """cp.async of 16 bytes from global to shared memory; zeros, and no read, unless live.

    align  of the source: 16, 8 or 4
    """
    size = Int32(cutlass.select_(is_live, Int32(align), Int32(0)))
    # Past L1, which only copies of 16 bytes can be.
    where = "cg" if const_expr(align == CHUNK_BYTES) else "ca"
    for i in cutlass.range_constexpr(0, CHUNK_BYTES, align):
        cute.arch.inline_ptx(
            f"cp.async.{where}.shared.global [{{$r0}} + {i}], [{{$r1}} + {i}], {align}, {{$r2}};",
            read_only_args=[target, source, size],
        )


def vector_at(pointer: cute.Pointer, size: int, align: int):
    """``size`` neighbouring elements at a pointer that is a multiple of ``align`` bytes."""
    # `Pointer.align` would round the address up at run time.
    aligned = cute.make_ptr(
        pointer.value_type, pointer.toint(), pointer.memspace, assumed_align=align
    )
    return cute.make_tensor(aligned, cute.make_layout(size))


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
    align: cutlass.Constexpr[int],
    held_chunks: cutlass.Constexpr[int],
):
    """Start the copies of ``rows`` rows of one head into a swizzled (rows, dim) tile.

    tile        in shared memory
    high, low   `row_address` of the lane's own row: lane l of warp w owns row w * rows / warps + l
    live        bit l says whether the row of lane l is live; others become zeros, and their
                address is not used
    dim_chunks  16-byte chunks of a row; chunks behind them become zeros
    align       bytes that addresses of rows are multiples of. Copies are asynchronous from 4 on;
                with 2, which cp.async cannot, they are done when this returns
    held_chunks that a lane then loads before it stores the first: they need its registers

    All lanes of ``warps`` warps call it together.
    """
    chunks = dim // CHUNK
    first = (cute.arch.warp_idx() % warps) * (rows // warps)
    count = rows // warps * chunks // 32
    if const_expr(align >= ASYNC_BYTES):
        target = Int32(tile.toint())
        for i in cutlass.range_constexpr(count):
            owner, chunk, source, is_live = row_chunk(i, high, low, live, dim_chunks, chunks)
            where = swizzled(first + owner, chunk, rows, dim) * 2
            copy_chunk(target + where, source, is_live, align)
    else:
        held = math.gcd(held_chunks, count)
        values = cute.make_rmem_tensor((CHUNK, held), tile.value_type)
        targets = cute.make_rmem_tensor(held, Int32)
        for i in cutlass.range(0, count, held, unroll=1):
            for j in cutlass.range_constexpr(held):
                owner, chunk, source, is_live = row_chunk(
                    i + j, high, low, live, dim_chunks, chunks
                )
                targets[j] = swizzled(first + owner, chunk, rows, dim)
                values[None, j].fill(tile.value_type(0.0))
                if is_live:
                    row = cute.make_ptr(tile.value_type, source, cute.AddressSpace.gmem)
                    values[None, j].store(vector_at(row, CHUNK, align).load())
            for j in cutlass.range_constexpr(held):
                target = vector_at(tile + targets[j], CHUNK, CHUNK_BYTES)
                target.store(values[None, j].load())


@cute.jit
def row_chunk(
    i: Int32,
    high: Int32,
    low: Int32,
    live: Int32,
    dim_chunks: Int32,
    chunks: cutlass.Constexpr[int],
):
    """The i-th chunk that a lane copies, of rows of ``chunks`` chunks; see `gather_rows`.

    Returns (the lane whose row it is of, chunk of the row, its address, whether it is live).
    """
    lane = cute.arch.lane_idx()
    index = Uint32(lane + 32 * i)
    owner = Int32(index // chunks)
    chunk = Int32(index % chunks)
    if const_expr(32 % chunks == 0):
        # A lane copies the same chunk of all of its rows: one test does for all.
        live = Int32(cutlass.select_(lane % chunks < dim_chunks, live, Int32(0)))
        is_live = (live >> owner) & 1 != 0
    else:
        is_live = ((live >> owner) & 1 != 0) & (chunk < dim_chunks)
    source = joined(
        cute.arch.shuffle_sync(high, offset=owner), cute.arch.shuffle_sync(low, offset=owner)
    )
    return owner, chunk, source + Int64(chunk * CHUNK_BYTES), is_live


@cute.jit
def joined(high: Int32, low: Int32):
    """The 64 bits of two halves."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high]
    )

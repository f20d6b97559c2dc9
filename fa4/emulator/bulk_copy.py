"""`cp.async.bulk` without a tensor map: bytes in a row, copied or added in the background.

    global to shared memory      completes its bytes at an mbarrier; may go to several CTAs at once
    shared to another CTA's      completes its bytes at an mbarrier there
    shared to global memory      joins the bulk group of the warp; as cp.reduce also adds float32

Addresses and sizes are multiples of 16 bytes. The scheduler decides when a copy happens.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.data_movement import address
from fa4.emulator.errors import Misaligned
from fa4.emulator.instructions import Modifiers, instruction
from fa4.emulator.memory import AddressSpace, Space
from fa4.emulator.ptx import Instruction

if TYPE_CHECKING:
    from fa4.emulator.barriers import MBarrier
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Warp

Array = np.ndarray[Any, Any]

UNIT = 16  # bytes: alignment of addresses, and what sizes are multiples of


class BulkCopies:
    """The bulk copies of one warp; every active lane issues one."""

    def __init__(self, warp: Warp):
        self.warp = warp

    def to_shared(
        self,
        source_space: int,
        where: Array,
        source: Array,
        nbytes: Array,
        barrier: Array,
        mask: Array,
    ) -> None:
        line = self.warp.calling_line()
        for lane in np.flatnonzero(mask):
            size = int(nbytes[lane])
            action = functools.partial(
                self._copy_and_complete,
                (Space(source_space), int(source[lane])),
                int(where[lane]),
                size,
                self.warp.mbarrier_at(int(barrier[lane])),
            )
            self.warp.defer(action, line)

    def _copy_and_complete(
        self, source: tuple[Space, int], where: int, nbytes: int, barrier: MBarrier
    ) -> None:
        _copy(self.warp.memory, source, (Space.SHARED, where), nbytes)
        barrier.complete_tx(nbytes)

    def to_global(
        self, adds: bool, where: Array, source: Array, nbytes: Array, mask: Array
    ) -> None:
        line = self.warp.calling_line()
        for lane in np.flatnonzero(mask):
            action = functools.partial(
                _add_f32 if adds else _copy,
                self.warp.memory,
                (Space.SHARED, int(source[lane])),
                (Space.GLOBAL, int(where[lane])),
                int(nbytes[lane]),
            )
            self.warp.open_copies.append(self.warp.defer(action, line))


def _copy(
    memory: AddressSpace, source: tuple[Space, int], target: tuple[Space, int], nbytes: int
) -> None:
    _write(memory, target, _read(memory, source, nbytes))


def _add_f32(
    memory: AddressSpace, source: tuple[Space, int], target: tuple[Space, int], nbytes: int
) -> None:
    total = _read(memory, source, nbytes).view(np.float32) + _read(memory, target, nbytes).view(
        np.float32
    )
    _write(memory, target, total.view(np.uint8))


def _read(memory: AddressSpace, place: tuple[Space, int], nbytes: int) -> Array:
    if nbytes % UNIT:
        raise Misaligned(f"A bulk copy has {nbytes} bytes; it must be a multiple of {UNIT}.")
    return np.frombuffer(memory.read(*place, nbytes, UNIT), np.uint8)


def _write(memory: AddressSpace, place: tuple[Space, int], data: Array) -> None:
    space, start = place
    addresses = start + UNIT * np.arange(len(data) // UNIT, dtype=np.uint64)
    memory.store(space, addresses, data.reshape(-1, UNIT))


# -- instructions ----------------------------------------------------------------------------------


@instruction("cp.async.bulk.global.shared::cta")
def _from_shared(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    m.required("bulk_group")
    _to_global(e, i, m, adds=False)


@instruction("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def _to_shared(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    source_space = Space.GLOBAL if m.required("global", "shared::cta") == "global" else Space.SHARED
    m.required("mbarrier::complete_tx::bytes")
    is_multicast = m.take("multicast::cluster")
    has_hint = m.take("L2::cache_hint")
    if len(i.operands) != 4 + is_multicast + has_hint:
        raise e.unknown(f"{len(i.operands)} operands")
    where, source = address(e, i.operands[0]), address(e, i.operands[1])
    size, barrier = e.read(i.operands[2], "u32"), address(e, i.operands[3])
    active = e.active()
    copy = f"w.bulk_copies.to_shared({int(source_space)}, %s, {source}, {size}, %s, %s)"
    if is_multicast:
        ranks = e.read(i.operands[4], "u16")
        targets = f"w.cluster_copies.targets({where}, {barrier}, {ranks}, False, {active})"
        e.line(f"for place, signalled, lane in {targets}:")
        e.line("    " + copy % ("place", "signalled", "lane"))
    else:
        e.line(copy % (where, barrier, active))


@instruction("cp.reduce.async.bulk.global.shared::cta")
def _bulk_reduction(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    m.required("bulk_group")
    m.required("add")
    m.required("f32")
    _to_global(e, i, m, adds=True)


def _to_global(e: Emitter, i: Instruction, m: Modifiers, adds: bool) -> None:
    if len(i.operands) != 3 + m.take("L2::cache_hint"):
        raise e.unknown(f"{len(i.operands)} operands")
    where, source = address(e, i.operands[0]), address(e, i.operands[1])
    size = e.read(i.operands[2], "u32")
    e.line(f"w.bulk_copies.to_global({adds}, {where}, {source}, {size}, {e.active()})")

"""`cp.async`: each lane copies 4, 8 or 16 bytes from global to shared memory in the background.

Lanes close the copies that they have issued into groups (`cp.async.commit_group`) and wait for all
groups but the latest ones, or let an mbarrier count the end of their copies. The scheduler decides
when a copy happens (scheduler.py), at the latest when somebody waits for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.data_movement import address
from fa4.emulator.instructions import Modifiers, instruction
from fa4.emulator.memory import Space
from fa4.emulator.ptx import Immediate, Instruction, Register
from fa4.emulator.register_kinds import LANES

if TYPE_CHECKING:
    from fa4.emulator.barriers import MBarrier
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Deferred, Warp

Array = np.ndarray[Any, Any]


@dataclass
class _LaneQueue:
    """Copies of lanes that have committed and waited together so far.

    open    since the last commit
    groups  committed and not waited for, oldest first
    """

    lanes: Array
    open: list[Deferred] = field(default_factory=list)
    groups: list[list[Deferred]] = field(default_factory=list)


class AsyncCopies:
    """The copies of one warp.

    A copy instruction is one unit: it happens for all of its lanes when the first of them waits.
    """

    def __init__(self, warp: Warp):
        self.warp = warp
        self.queues = [_LaneQueue(np.ones(LANES, np.bool_))]

    def copy(self, where: Array, source: Array, nbytes: int, used: Array, mask: Array) -> None:
        """`used` of `nbytes` come from the source, the rest is zero."""
        if not mask.any():
            return
        action = functools.partial(self._copy, where, source, nbytes, used, mask)
        copy = self.warp.defer(action, self.warp.calling_line())
        for queue in self.queues:
            if (queue.lanes & mask).any():
                queue.open.append(copy)

    def _copy(self, where: Array, source: Array, nbytes: int, used: Array, mask: Array) -> None:
        memory = self.warp.memory
        whole = mask & (used >= nbytes)
        data = memory.load(Space.GLOBAL, source, nbytes, whole)
        for lane in np.flatnonzero(mask & (used < nbytes) & (used > 0)):
            count = int(used[lane])
            read = memory.read(Space.GLOBAL, int(source[lane]), count, nbytes)
            data[lane, :count] = np.frombuffer(read, np.uint8)
        memory.store(Space.SHARED, where, data, mask)

    def commit(self, mask: Array) -> None:
        for queue in self._queues_of(mask):
            queue.groups.append(queue.open)
            queue.open = []

    def wait(self, pending: int, mask: Array) -> None:
        """All groups but the latest `pending` are complete."""
        for queue in self._queues_of(mask):
            count = max(0, len(queue.groups) - pending)
            for copy in (copy for group in queue.groups[:count] for copy in group):
                copy.complete()
            del queue.groups[:count]

    def wait_all(self, mask: Array) -> None:
        self.commit(mask)
        self.wait(0, mask)

    def arrive(self, where: Array, is_counted: bool, mask: Array) -> None:
        """Each lane arrives at an mbarrier when the copies that it has issued are complete.

        is_counted  the barrier's count provides for these arrivals (.noinc); otherwise they are
                    added to what the phase waits for
        """
        for lane in np.flatnonzero(mask):
            barrier = self.warp.mbarrier_at(int(where[lane]))
            if not is_counted:
                barrier.pending += 1
            (queue,) = [queue for queue in self.queues if queue.lanes[lane]]
            issued = [copy for group in (*queue.groups, queue.open) for copy in group]
            self.warp.defer(
                functools.partial(_complete_and_arrive, issued, barrier), self.warp.calling_line()
            )

    def _queues_of(self, mask: Array) -> list[_LaneQueue]:
        """The queues of these lanes, parted from those of the others."""
        found: list[_LaneQueue] = []
        others: list[_LaneQueue] = []
        for queue in self.queues:
            inside, outside = queue.lanes & mask, queue.lanes & ~mask
            if inside.any() and outside.any():
                others.append(_LaneQueue(outside, [*queue.open], [[*g] for g in queue.groups]))
                queue.lanes = inside
            (found if inside.any() else others).append(queue)
        self.queues = found + others
        return found


def _complete_and_arrive(copies: list[Deferred], barrier: MBarrier) -> None:
    for copy in copies:
        copy.complete()
    barrier.arrive()


# -- instructions ----------------------------------------------------------------------------------


@instruction("cp.async.ca", "cp.async.cg")
def _copy(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    m.required("shared", "shared::cta")
    m.required("global")
    has_hint = m.take("L2::cache_hint")
    m.one_of("L2::64B", "L2::128B", "L2::256B")
    where, source, size, *rest = i.operands[: len(i.operands) - has_hint]
    allowed = (4, 8, 16) if i.parts[2] == "ca" else (16,)
    if not isinstance(size, Immediate) or size.value not in allowed:
        raise e.unknown(f"its size must be one of {allowed}")
    used = e.translation.constant("u32", int(size.value))
    if len(rest) > 1:
        raise e.unknown(f"{len(i.operands)} operands")
    for operand in rest:
        if isinstance(operand, Register) and e.declared(operand) == "pred":  # the source is ignored
            zero = e.translation.constant("u32", 0)
            used = e.local(f"where({e.read(operand, 'pred')}, {zero}, {used})")
        else:
            used = e.read(operand, "u32")
    e.line(
        f"w.async_copies.copy({address(e, where)}, {address(e, source)}, {size.value}, {used}, "
        f"{e.active()})"
    )


@instruction("cp.async.commit_group")
def _commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"w.async_copies.commit({e.active()})")


@instruction("cp.async.wait_group")
def _wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    (pending,) = i.operands
    if not isinstance(pending, Immediate):
        raise e.unknown("its number of groups must be a constant")
    e.line(f"w.async_copies.wait({pending.value}, {e.active()})")


@instruction("cp.async.wait_all")
def _wait_all(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    e.line(f"w.async_copies.wait_all({e.active()})")


@instruction("cp.async.mbarrier.arrive")
def _arrive(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    is_counted = m.take("noinc")
    m.one_of("shared", "shared::cta")
    m.kind("b64")
    e.line(f"w.async_copies.arrive({address(e, i.operands[0])}, {is_counted}, {e.active()})")

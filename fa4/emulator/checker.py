"""Race detector: accesses to shared memory that nothing orders, whatever order this run took.

Happens-before with vector clocks (Mattern 1989), kept for actors: each warp, the TMA loads of each
mbarrier, the bulk stores of each warp, the wgmmas of each warpgroup. An access is stamped with its
actor's epoch; a later access conflicts with it unless the later one's clock has reached that epoch.
Clocks travel along mbarrier phases (arrivals and finished TMA loads to waiters), named barriers, the
cluster's barrier, and waits for bulk and wgmma groups.

A clock has three rows: what is ordered before; what of that passed a fence.proxy.async, which the
async proxy (TMA, wgmma) needs to see generic writes; and what passed a fence that makes mbarrier
initialisations visible to it. A fence anywhere between the two accesses counts, by whichever warp.

Also found: mbarriers used without ordering after their initialisation, copies that nobody waits for
before shared memory is given up.

What it takes for granted: lanes of a warp are one actor; a wgmma wait of one warp covers its
warpgroup; arrivals release and waits acquire, whatever their semantics; a generic read needs no
proxy fence before an async write. Global memory is not followed. Atomics do not conflict with each
other, and order nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.async_copy import AsyncCopies
from fa4.emulator.barriers import MBarrier
from fa4.emulator.errors import (
    DataRace,
    EmulationError,
    Location,
    MissingProxyFence,
    UnfinishedCopy,
    UnknownInstruction,
)
from fa4.emulator.memory import AddressSpace, Allocation, Bytes, SharedMemory, Space
from fa4.emulator.tensor_core import Operand, operand_ranges
from fa4.emulator.warp import Deferred, Warp
from fa4.emulator.warpgroup_mma import MmaShape

if TYPE_CHECKING:
    from fa4.emulator.execute import Cta

Array = NDArray[Any]
Clock = NDArray[np.int32]  # (rows, actors): the epoch of each actor that is known
Cells = slice | NDArray[np.int64]

_WORD = 4  # bytes of a shadow cell, until a narrower access is seen
_MAX_MBARRIERS = 256  # of a CTA, initialised anew included


class Row(IntEnum):
    """Rows of a clock; see the module's docstring."""

    ORDERED = 0
    FENCED = 1
    INITIALISED = 2


@dataclass(frozen=True)
class Actor:
    """Whatever accesses memory in an order of its own.

    index     column of the clocks
    is_async  whether it belongs to the async proxy
    """

    index: int
    name: str
    is_async: bool


@dataclass(frozen=True)
class Access:
    """One access of an actor.

    epoch  of the actor; later epochs are ordered after it wherever they are known
    what   for messages, such as "a TMA load"
    line   of the PTX text
    """

    actor: Actor
    epoch: int
    what: str
    line: int | None
    is_atomic: bool = False

    def __str__(self) -> str:
        place = "" if self.line is None else f" (PTX line {self.line})"
        return f"{self.what} by {self.actor.name}{place}"


class Shadow:
    """Who wrote each cell of a memory last, and who read it since.

    name        of the memory
    cell_bytes  per cell; it shrinks to a byte when a narrower access comes
    writes      (cells,) number of the last write in the detector's list of accesses, 0 for none
    reads       by actor, the same of its latest read since
    """

    def __init__(self, name: str, nbytes: int, cell_bytes: int = _WORD):
        self.name = name
        self.cell_bytes = cell_bytes
        self.writes = np.zeros(-(-nbytes // cell_bytes), np.int32)
        self.reads: dict[int, NDArray[np.int32]] = {}

    def range(self, offset: int, nbytes: int) -> slice:
        self._fit(offset | nbytes)
        return slice(offset // self.cell_bytes, (offset + nbytes) // self.cell_bytes)

    def lanes(self, offsets: Array, nbytes: int) -> Cells:
        """Cells of accesses of `nbytes` each."""
        self._fit(nbytes)  # accesses are aligned to their size
        first = offsets // self.cell_bytes
        return (first[:, None] + np.arange(nbytes // self.cell_bytes)).reshape(-1)

    def reads_of(self, actor: Actor) -> NDArray[np.int32]:
        reads = self.reads.get(actor.index)
        if reads is None:
            reads = self.reads[actor.index] = np.zeros_like(self.writes)
        return reads

    def _fit(self, multiple: int) -> None:
        if multiple % self.cell_bytes:
            self.writes = np.repeat(self.writes, self.cell_bytes)
            self.reads = {a: np.repeat(reads, self.cell_bytes) for a, reads in self.reads.items()}
            self.cell_bytes = 1


@dataclass
class _BarrierState:
    """What waiters of an mbarrier learn.

    initialised  the access that initialised it
    loads        actor of the TMA loads that complete at it
    issued       of those loads; the latest epoch
    pending      what arrived in the phase that is not complete
    completed    what arrived in all phases before
    phase        that `pending` belongs to
    """

    barrier: MBarrier
    initialised: Access
    loads: Actor
    pending: Clock
    completed: Clock
    rank: int
    issued: int = 0
    issue_line: int | None = None
    phase: int = 0

    def settle(self) -> None:
        """Notice that the barrier has completed phases since the last call."""
        if self.phase != self.barrier.phase:
            np.maximum(self.completed, self.pending, out=self.completed)
            self.pending[:] = 0
            self.phase = self.barrier.phase


@dataclass(frozen=True)
class _Issue:
    """When an asynchronous copy was issued.

    clock   of the warp then
    line    of the PTX text
    number  of cp.asyncs that the warp had issued then, it included
    """

    clock: Clock
    line: int
    number: int


@dataclass
class _Generation:
    """What has arrived at one generation of a barrier."""

    number: int
    clock: Clock


@dataclass
class _Warpgroup:
    """wgmmas of a warpgroup: epochs by the running number of their chain."""

    actor: Actor
    epochs: dict[int, int] = field(default_factory=dict)
    latest: int = 0


class RaceDetector:
    """What is known about the shared memory of one cluster."""

    def __init__(self, cluster: Sequence[SharedMemory], warps: int):
        self.shadows = {
            id(shared.allocation): Shadow(shared.allocation.name, shared.size) for shared in cluster
        }
        self.accesses: list[Access | None] = [None]
        self.actors: list[Actor] = []
        # Warps, their stores, their copies, their warpgroups.
        self._capacity = len(cluster) * (4 * warps + _MAX_MBARRIERS)
        self.barriers: dict[int, _BarrierState] = {}  # by the identity of the barrier
        self.generations: dict[Any, _Generation] = {}
        self.warpgroups: dict[tuple[int, int], _Warpgroup] = {}
        self.clocks: dict[tuple[int, int], Clock] = {}  # of warps, by rank and index
        self.running = len(cluster) * warps

    def actor(self, name: str, is_async: bool) -> Actor:
        actor = Actor(len(self.actors), name, is_async)
        if actor.index == self._capacity:
            raise UnknownInstruction(
                f"The race detector follows at most {_MAX_MBARRIERS} mbarriers a CTA."
            )
        self.actors.append(actor)
        return actor

    def clock(self) -> Clock:
        return np.zeros((len(Row), self._capacity), np.int32)

    # -- accesses --------------------------------------------------------------------------------

    def shadow_of(self, allocation: Allocation) -> Shadow | None:
        return self.shadows.get(id(allocation))

    def read(self, shadow: Shadow, cells: Cells, access: Access, clock: Clock) -> None:
        """An access that must come after the last write of its cells."""
        self.require_visible(shadow, cells, access, clock)
        shadow.reads_of(access.actor)[cells] = self._number(access)

    def require_visible(self, shadow: Shadow, cells: Cells, access: Access, clock: Clock) -> None:
        """What `read` checks, without a trace."""
        for number in _distinct(shadow.writes[cells]):
            earlier = self.accesses[number]
            if earlier is not None:
                self._require_before(earlier, True, access, clock, shadow, cells, shadow.writes)

    def write(self, shadow: Shadow, cells: Cells, access: Access, clock: Clock) -> None:
        """An access that must come after the last write of its cells and all reads since."""
        for number in _distinct(shadow.writes[cells]):
            earlier = self.accesses[number]
            if earlier is not None and not (earlier.is_atomic and access.is_atomic):
                self._require_before(earlier, True, access, clock, shadow, cells, shadow.writes)
        for reads in shadow.reads.values():
            numbers = _distinct(reads[cells])
            for number in numbers:
                earlier = self.accesses[number]
                if earlier is not None:
                    self._require_before(earlier, False, access, clock, shadow, cells, reads)
            if numbers != {0}:
                reads[cells] = 0
        shadow.writes[cells] = self._number(access)

    def _number(self, access: Access) -> int:
        self.accesses.append(access)
        return len(self.accesses) - 1

    def _require_before(
        self,
        earlier: Access,
        earlier_writes: bool,
        access: Access,
        clock: Clock,
        shadow: Shadow,
        cells: Cells,
        numbers: NDArray[np.int32],
    ) -> None:
        index, epoch = earlier.actor.index, earlier.epoch
        if clock[Row.ORDERED, index] < epoch:
            raise DataRace(
                f"Unordered accesses to {self._place(earlier, shadow, cells, numbers)}: {access} "
                f"comes after {earlier} in this run, but nothing orders them."
            )
        if not (earlier_writes and access.actor.is_async) or earlier.actor.is_async:
            return
        if clock[Row.FENCED, index] < epoch:
            raise MissingProxyFence(
                f"{access} touches {self._place(earlier, shadow, cells, numbers)} after {earlier} "
                "without a fence.proxy.async between them."
            )

    def _place(
        self, earlier: Access, shadow: Shadow, cells: Cells, numbers: NDArray[np.int32]
    ) -> str:
        touched = np.arange(numbers.size)[cells]
        cell = next(c for c in touched.tolist() if self.accesses[numbers[c]] is earlier)
        return f"byte {cell * shadow.cell_bytes} of {shadow.name}"

    # -- mbarriers -------------------------------------------------------------------------------

    def initialise(self, barrier: MBarrier, rank: int, access: Access) -> None:
        loads = self.actor(f"TMA to {barrier.name}", is_async=True)
        self.barriers[id(barrier)] = _BarrierState(
            barrier, access, loads, self.clock(), self.clock(), rank
        )

    def barrier(self, barrier: MBarrier, clock: Clock, row: Row, user: str) -> _BarrierState:
        """The state of a barrier that is used by someone with this clock."""
        state = self.barriers[id(barrier)]
        first = state.initialised
        if clock[Row.ORDERED, first.actor.index] < first.epoch:
            raise DataRace(f"{user} uses {barrier.name}, but nothing orders it after {first}.")
        if clock[row, first.actor.index] < first.epoch:
            raise MissingProxyFence(
                f"{user} uses {barrier.name} after {first} without a fence.mbarrier_init or "
                "fence.proxy.async between them."
            )
        state.settle()
        return state

    def generation(self, key: Any, number: int) -> _Generation:
        """What arrives at a barrier of another kind while its count of generations is `number`."""
        found = self.generations.get(key)
        if found is None or found.number != number:
            found = self.generations[key] = _Generation(number, self.clock())
        return found

    # -- the end ---------------------------------------------------------------------------------

    def warp_exited(self) -> None:
        self.running -= 1
        if self.running == 0:
            for state in self.barriers.values():
                if state.issued:
                    self._require_waited(state)

    def _require_waited(self, state: _BarrierState) -> None:
        known = max(
            clock[Row.ORDERED, state.loads.index]
            for (rank, _), clock in self.clocks.items()
            if rank == state.rank
        )
        if known < state.issued:
            error = unfinished_load(state)
            if state.issue_line is not None:
                error.locate(Location(state.issue_line))
            raise error


def unfinished_load(state: _BarrierState) -> UnfinishedCopy:
    return UnfinishedCopy(
        f"The CTA gives up its shared memory while a TMA load to {state.barrier.name} may still "
        "write to it: no warp has waited for it."
    )


def _distinct(numbers: NDArray[np.int32]) -> set[int]:
    if numbers.size <= 256:
        return set(numbers.tolist())
    # Tiles were written by few accesses, in long runs.
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])
    return {int(numbers[0]), *numbers[changes + 1].tolist()}


class WatchedMemory(AddressSpace):
    """A warp's view of memory, which tells the race detector of generic accesses."""

    def __init__(self, space: AddressSpace, warp: CheckedWarp):
        super().__init__(space.global_memory, space.cluster)
        self.parameters = space.parameters
        self.warp = warp
        self.is_atomic = False
        self._parts: list[Any] = []

    def load(
        self, space: Space | None, addresses: Array, nbytes: int, mask: Array | None = None
    ) -> Bytes:
        result = super().load(space, addresses, nbytes, mask)
        if not self.is_atomic:  # the store that follows is checked
            self._note(nbytes, "a load", self.warp.races.read)
        return result

    def store(
        self, space: Space | None, addresses: Array, data: Bytes, mask: Array | None = None
    ) -> None:
        super().store(space, addresses, data, mask)
        what = "an atomic" if self.is_atomic else "a store"
        self._note(data.shape[1], what, self.warp.races.write)

    def _resolve(self, *access: Any) -> Any:
        self._parts = super()._resolve(*access)
        return self._parts

    def _note(self, nbytes: int, what: str, check: Callable[..., None]) -> None:
        for allocation, _, offsets in self._parts:
            shadow = self.warp.races.shadow_of(allocation)
            if shadow is not None:
                access, clock = self.warp.access(what, self.is_atomic)
                check(shadow, shadow.lanes(offsets, nbytes), access, clock)


class WatchedCopies(AsyncCopies):
    """The cp.asyncs of a warp: who waits for them is told to the race detector."""

    warp: CheckedWarp

    def copy(self, where: Array, source: Array, nbytes: int, used: Array, mask: Array) -> None:
        self.warp.issue_copy()
        super().copy(where, source, nbytes, used, mask)

    def wait(self, pending: int, mask: Array) -> None:
        complete = [
            copy
            for queue in self._queues_of(mask)
            for group in queue.groups[: max(0, len(queue.groups) - pending)]
            for copy in group
        ]
        super().wait(pending, mask)
        row = self.warp.clock[Row.ORDERED]
        numbers = (self.warp.copy_numbers[copy] for copy in complete)
        row[self.warp.copies.index] = max(numbers, default=row[self.warp.copies.index])

    def arrive(self, where: Array, is_counted: bool, mask: Array) -> None:
        # The phase that waits for this arrival is the one that is open now.
        index = self.warp.copies.index
        for state in self.warp.barriers(where, mask):
            state.pending[Row.ORDERED, index] = self.warp.copied
        super().arrive(where, is_counted, mask)


class CheckedWarp(Warp):
    """A warp whose accesses and synchronisation the race detector follows.

    actor   of its generic accesses
    stores  actor of its bulk stores
    copies  actor of its cp.asyncs, which belong to the generic proxy
    clock   what is ordered before its next instruction
    """

    def __init__(self, cta: Cta, index: int, live: Array):
        super().__init__(cta, index, live)
        assert cta.races is not None
        self.races = cta.races
        self.memory = WatchedMemory(cta.memory, self)
        place = f"warp {index} of CTA rank {cta.rank}"
        self.actor = self.races.actor(place, is_async=False)
        self.stores = self.races.actor(f"the bulk stores of {place}", is_async=True)
        self.copies = self.races.actor(f"the cp.asyncs of {place}", is_async=False)
        self.async_copies: AsyncCopies = WatchedCopies(self)
        self.copy_numbers: dict[Deferred, int] = {}
        self.clock = self.races.clock()
        self.clock[Row.ORDERED, self.actor.index] = 1
        self.races.clocks[cta.rank, index] = self.clock
        self._barrier_arrived: _Generation | None = None
        self._cluster_arrived: _Generation | None = None
        self._issue: _Issue | None = None  # of the copy that happens now
        self.copied = 0  # epoch of the latest cp.async
        self._stored = 0  # epoch of the latest bulk store
        self._store_groups: list[int] = []
        self._multiplied = 0  # epoch of the latest wgmma
        self._matrix_groups: list[int] = []

    # -- clocks ----------------------------------------------------------------------------------

    def access(self, what: str, is_atomic: bool = False) -> tuple[Access, Clock]:
        """A generic access that happens now, and what is ordered before it."""
        if self._issue is not None:
            issue = self._issue
            return Access(self.copies, issue.number, "a cp.async", issue.line), issue.clock
        epoch = int(self.clock[Row.ORDERED, self.actor.index])
        return Access(self.actor, epoch, what, self._line(), is_atomic), self.clock

    def next_epoch(self) -> None:
        """What comes later is not part of what was passed on before."""
        self.clock[Row.ORDERED, self.actor.index] += 1

    def acquire(self, other: Clock) -> None:
        np.maximum(self.clock, other, out=self.clock)

    def release(self, other: Clock) -> None:
        np.maximum(other, self.clock, out=other)
        self.next_epoch()

    def _line(self) -> int | None:
        """PTX line of the instruction that is being executed."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.program.filename:
                return self.program.python_lines[frame.f_lineno - 1]
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def fence(self, opcode: str) -> None:
        super().fence(opcode)
        rows: tuple[Row, ...] = ()
        if opcode.startswith("fence.mbarrier_init"):
            rows = (Row.INITIALISED,)
        elif opcode in _PROXY_FENCES:
            rows = (Row.FENCED, Row.INITIALISED)
        for row in rows:
            self.clock[row] = self.clock[Row.ORDERED]
        if rows:
            self.next_epoch()

    # -- memory ----------------------------------------------------------------------------------

    def atomic(
        self,
        space: int | None,
        operation: str,
        where: Array,
        values: tuple[Array, ...],
        mask: Array,
    ) -> Array:
        assert isinstance(self.memory, WatchedMemory)
        self.memory.is_atomic = True
        try:
            return super().atomic(space, operation, where, values, mask)
        finally:
            self.memory.is_atomic = False

    # -- barriers --------------------------------------------------------------------------------

    def mbarrier_init(self, where: Array, count: Array, mask: Array) -> None:
        super().mbarrier_init(where, count, mask)
        access, _ = self.access("mbarrier.init")
        for _, address in self._mbarriers(where, mask):
            rank = self.memory.shared_at(address)[0].rank
            self.races.initialise(self._mbarrier(address), rank, access)

    def mbarrier_expect_tx(self, where: Array, nbytes: Array, mask: Array) -> None:
        self.barriers(where, mask)
        super().mbarrier_expect_tx(where, nbytes, mask)

    def mbarrier_complete_tx(self, where: Array, nbytes: Array, mask: Array) -> None:
        for state in self.barriers(where, mask):
            np.maximum(state.pending, self.clock, out=state.pending)
        super().mbarrier_complete_tx(where, nbytes, mask)
        self.next_epoch()

    def mbarrier_arrive(
        self, where: Array, value: Array | None, expects: bool, drop: bool, mask: Array
    ) -> Array:
        states = self.barriers(where, mask)
        for state in states:
            np.maximum(state.pending, self.clock, out=state.pending)
        tokens = super().mbarrier_arrive(where, value, expects, drop, mask)
        for state in states:
            if state.phase != state.barrier.phase:
                state.settle()
                # Lanes that arrived behind the one that completed the phase.
                if state.barrier.pending != state.barrier.count:
                    np.maximum(state.pending, self.clock, out=state.pending)
        if states:
            self.next_epoch()
        return tokens

    def mbarrier_wait(
        self, where: Array, value: Array, is_parity: bool, blocks: bool, mask: Array
    ) -> Array | None:
        done = super().mbarrier_wait(where, value, is_parity, blocks, mask)
        if done is not None:
            for state in self.barriers(where, mask & done):
                self.acquire(state.completed)
        return done

    def barriers(self, where: Array, mask: Array) -> Iterable[_BarrierState]:
        """The mbarriers that lanes name, each once; this warp may use them now."""
        return [
            self.races.barrier(
                self._mbarrier(address), self.clock, Row.ORDERED, f"warp {self.index}"
            )
            for address in dict.fromkeys(where[mask].tolist())
        ]

    def named_barrier_sync(self, number: int, threads: int | None, mask: Array) -> bool:
        if self._named_wait is None:
            self._barrier_arrived = self._named_generation(number)
            self.release(self._barrier_arrived.clock)
        passed = super().named_barrier_sync(number, threads, mask)
        if passed:
            assert self._barrier_arrived is not None
            self.acquire(self._barrier_arrived.clock)
        return passed

    def named_barrier_arrive(self, number: int, threads: int | None, mask: Array) -> None:
        self.release(self._named_generation(number).clock)
        super().named_barrier_arrive(number, threads, mask)

    def _named_generation(self, number: int) -> _Generation:
        key = (self.cta.rank, number)
        return self.races.generation(key, self.cta.named_barriers.generation(number))

    def cluster_barrier_arrive(self, mask: Array) -> None:
        barrier = self.cta.cluster_barrier
        self._cluster_arrived = self.races.generation("cluster", barrier.generation)
        self.release(self._cluster_arrived.clock)
        super().cluster_barrier_arrive(mask)

    def cluster_barrier_wait(self, mask: Array) -> bool:
        passed = super().cluster_barrier_wait(mask)
        if passed:
            assert self._cluster_arrived is not None
            self.acquire(self._cluster_arrived.clock)
        return passed

    # -- copies ----------------------------------------------------------------------------------

    def _defer(self, action: Callable[[], None], line: int) -> Deferred:
        issued = _Issue(self.clock.copy(), line, self.copied)
        self.next_epoch()

        def checked() -> None:
            self._issue = issued
            try:
                action()
            finally:
                self._issue = None

        deferred = super()._defer(checked, line)
        self.copy_numbers[deferred] = issued.number
        return deferred

    def _load_tile(
        self, decoded: Any, shared: Any, offset: int, index: tuple[int, ...], barrier: MBarrier
    ) -> None:
        assert self._issue is not None
        clock, line = self._issue.clock, self._issue.line
        state = self.races.barrier(barrier, clock, Row.INITIALISED, "A TMA load")
        state.issued += 1
        state.issue_line = line
        if self.races.running == 0:
            raise unfinished_load(state)
        shadow = self.races.shadows[id(shared.allocation)]
        access = Access(state.loads, state.issued, "a TMA load", line)
        self.races.write(shadow, shadow.range(offset, decoded.tile_bytes), access, clock)
        state.pending[Row.ORDERED, state.loads.index] = state.issued
        super()._load_tile(decoded, shared, offset, index, barrier)

    def tma_store(
        self,
        where: Array,
        map_address: Array,
        coordinates: tuple[Array, ...],
        reduction: str | None,
        mask: Array,
    ) -> None:
        what = "a TMA store" if reduction is None else "a TMA reduction"
        for lane in np.flatnonzero(mask):
            nbytes = self._tensor_map(map_address[lane]).tile_bytes
            shared, offset = self.memory.shared_at(int(where[lane]), "A TMA store")
            self.read_by_store(shared, offset, nbytes, what)
        super().tma_store(where, map_address, coordinates, reduction, mask)

    def read_by_store(self, shared: SharedMemory, offset: int, nbytes: int, what: str) -> None:
        """A bulk copy out of shared memory, which a bulk group will complete, starts now."""
        self._stored += 1
        shadow = self.races.shadows[id(shared.allocation)]
        access = Access(self.stores, self._stored, what, self._line())
        self.races.read(shadow, shadow.range(offset, nbytes), access, self.clock)

    def bulk_commit(self, mask: Array) -> None:
        super().bulk_commit(mask)
        if mask.any():
            self._store_groups.append(self._stored)

    def bulk_wait(self, pending: int, reads_only: bool, mask: Array) -> None:
        super().bulk_wait(pending, reads_only, mask)
        if mask.any():
            self._acquire_groups(self._store_groups, pending, self.stores)

    def _acquire_groups(self, groups: list[int], pending: int, actor: Actor) -> None:
        """All groups but the latest are complete; `groups` has their last epochs."""
        count = max(0, len(groups) - pending)
        if count:
            self.clock[Row.ORDERED, actor.index] = max(
                groups[count - 1], self.clock[Row.ORDERED, actor.index]
            )
            del groups[:count]

    def issue_copy(self) -> None:
        self.copied += 1

    # -- wgmma -----------------------------------------------------------------------------------

    def wgmma(
        self, full: bool, shape: tuple[Any, ...], start: Any, steps: tuple[Any, ...]
    ) -> Array:
        number = self._chains
        result = super().wgmma(full, shape, start, steps)
        group = self._warpgroup()
        is_first = number not in group.epochs
        if is_first:
            group.latest += 1
            group.epochs[number] = group.latest
        self._multiplied = group.epochs[number]
        access = Access(group.actor, self._multiplied, "a wgmma", self._line())
        shared = self.cta.shared
        shadow = self.races.shadows[id(shared.allocation)]
        # The emulator reads for all four warps at the first one; each must have had the right to.
        check = self.races.read if is_first else self.races.require_visible
        for begin, end in _operands(MmaShape(*shape), steps):
            check(shadow, shadow.range(begin, end - begin), access, self.clock)
        return result

    def _warpgroup(self) -> _Warpgroup:
        place = self.cta.rank, self.index // 4
        group = self.races.warpgroups.get(place)
        if group is None:
            name = f"the wgmmas of warpgroup {place[1]} of CTA rank {place[0]}"
            group = _Warpgroup(self.races.actor(name, is_async=True))
            self.races.warpgroups[place] = group
        return group

    def wgmma_commit(self, full: bool) -> None:
        super().wgmma_commit(full)
        self._matrix_groups.append(self._multiplied)

    def wgmma_wait(self, pending: int, full: bool) -> None:
        super().wgmma_wait(pending, full)
        self._acquire_groups(self._matrix_groups, pending, self._warpgroup().actor)

    # -- the end ---------------------------------------------------------------------------------

    def _part(self, group: Any, following: int) -> None:
        super()._part(group, following)
        if self.groups:
            return
        try:
            if self.clock[Row.ORDERED, self.stores.index] < self._stored:
                raise UnfinishedCopy(
                    "The warp exits while its bulk stores may still read shared memory: there is "
                    "no cp.async.bulk.wait_group for them."
                )
            self.races.warp_exited()
        except EmulationError as error:
            error.locate(self.location(self.program.first_lines[group.block]))
            raise


# That the accesses to shared memory pass.
_PROXY_FENCES = (
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.shared::cluster",
)


def _operands(shape: MmaShape, steps: Sequence[Any]) -> Iterable[tuple[int, int]]:
    """Byte ranges of shared memory that a chain of wgmmas reads."""
    b = tuple(int(b[0]) for _, b, _ in steps)
    yield from operand_ranges(
        b, shape.n, major_mn=shape.b_transposed, operand=Operand(shape.b_kind)
    )
    if not shape.a_in_registers:
        a = tuple(int(a[0]) for a, _, _ in steps)
        yield from operand_ranges(a, 64, major_mn=shape.a_transposed, operand=Operand(shape.a_kind))

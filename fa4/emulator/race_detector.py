"""Vector clocks and shadow memory: are two accesses ordered, whatever order this run took?

Happens-before with vector clocks (Mattern 1989), kept for actors: each warp, and whatever works on
its own for it: the TMA loads of each mbarrier, a warp's bulk stores, its cp.asyncs, its tcgen05
products and stores to tensor memory, its wgmmas. An access is stamped with its actor's
epoch; a later access of the same cells conflicts with it unless the later one's clock has reached
that epoch. checker.py makes the clocks travel.

A clock has three rows: what is ordered before; what of that passed a fence.proxy.async, which the
async proxy (TMA, tensor cores) needs to see generic writes; and what passed a fence that makes
mbarrier initialisations visible to it. A fence anywhere between two accesses counts, by whichever
warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.barriers import MBarrier
from fa4.emulator.errors import (
    DataRace,
    Location,
    MissingProxyFence,
    UnfinishedCopy,
    UnknownInstruction,
)
from fa4.emulator.memory import Allocation, SharedMemory
from fa4.emulator.tensor_memory import TMEM_COLUMNS, TMEM_LANES

Array = NDArray[Any]
Clock = NDArray[np.int32]  # (rows, actors): the epoch of each actor that is known
Cells = slice | NDArray[np.int64] | tuple[slice, slice] | tuple[NDArray[np.int64], ...]

_WORD = 4  # bytes of a shadow cell, until a narrower access is seen
_LANES = 16  # of a shadow cell of tensor memory, which has one column
_ACTORS_PER_WARP = 6
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
    line: int
    is_atomic: bool = False

    def __str__(self) -> str:
        return f"{self.what} by {self.actor.name} (PTX line {self.line})"


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

    def describe(self, cell: int) -> str:
        return f"byte {cell * self.cell_bytes} of {self.name}"

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


class TensorShadow(Shadow):
    """The same for tensor memory: `writes` is (groups of 16 lanes, columns)."""

    def __init__(self, name: str):
        super().__init__(name, 0)
        self.writes = np.zeros((TMEM_LANES // _LANES, TMEM_COLUMNS), np.int32)

    def describe(self, cell: int) -> str:
        group, column = divmod(cell, TMEM_COLUMNS)
        return f"lane {_LANES * group}, column {column} of {self.name}"

    def block(self, column: int, columns: int, lanes: slice | None = None) -> Cells:
        """Cells of all lanes, or of whole groups of them; a step is one of groups."""
        groups = slice(None)
        if lanes is not None:
            groups = slice(lanes.start // _LANES, lanes.stop // _LANES, lanes.step)
        return groups, slice(column, column + columns)

    def lanes_block(self, column: int, columns: int, lanes: Array) -> Cells:
        """Cells of groups that have any of these lanes."""
        groups = np.unique(lanes // _LANES)
        return np.ix_(groups, np.arange(column, column + columns))

    def forget(self, cells: Cells) -> None:
        self.writes[cells] = 0
        for reads in self.reads.values():
            reads[cells] = 0


@dataclass
class BarrierState:
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
    issue_line: int = 0
    phase: int = 0

    def settle(self) -> None:
        """Notice that the barrier has completed phases since the last call."""
        if self.phase != self.barrier.phase:
            np.maximum(self.completed, self.pending, out=self.completed)
            self.pending[:] = 0
            self.phase = self.barrier.phase


@dataclass
class Generation:
    """What has arrived at one generation of a barrier."""

    number: int
    clock: Clock


class RaceDetector:
    """What is known about the shared and tensor memory of one cluster.

    accesses  all that were recorded, by number; 0 is none
    clocks    of the warps, by rank of the CTA and number
    running   warps that have not exited
    """

    def __init__(self, cluster: Sequence[SharedMemory], warps: int):
        self.shadows = {
            id(shared.allocation): Shadow(shared.allocation.name, shared.size) for shared in cluster
        }
        self.accesses: list[Access | None] = [None]
        self.actors: list[Actor] = []
        self.tensor_shadows = [
            TensorShadow(f"tensor memory of CTA rank {shared.rank}") for shared in cluster
        ]
        self._capacity = len(cluster) * (_ACTORS_PER_WARP * warps + _MAX_MBARRIERS)
        self.barriers: dict[int, BarrierState] = {}  # by the identity of the barrier
        self.generations: dict[Any, Generation] = {}
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
        for number in _distinct(shadow.writes[cells]):
            earlier = self.accesses[number]
            if earlier is not None:
                self._require_before(earlier, True, access, clock, shadow, cells, shadow.writes)
        shadow.reads_of(access.actor)[cells] = self._number(access)

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
        touched = np.arange(numbers.size).reshape(numbers.shape)[cells].reshape(-1)
        flat = numbers.reshape(-1)
        cell = next(c for c in touched.tolist() if self.accesses[flat[c]] is earlier)
        return shadow.describe(cell)

    # -- mbarriers -------------------------------------------------------------------------------

    def initialise(self, barrier: MBarrier, rank: int, access: Access) -> None:
        loads = self.actor(f"TMA to {barrier.name}", is_async=True)
        self.barriers[id(barrier)] = BarrierState(
            barrier, access, loads, self.clock(), self.clock(), rank
        )

    def barrier(self, barrier: MBarrier, clock: Clock, row: Row, user: str) -> BarrierState:
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

    def generation(self, key: Any, number: int) -> Generation:
        """What arrives at a barrier of another kind while its count of generations is `number`."""
        found = self.generations.get(key)
        if found is None or found.number != number:
            found = self.generations[key] = Generation(number, self.clock())
        return found

    # -- the end ---------------------------------------------------------------------------------

    def warp_exited(self) -> None:
        self.running -= 1
        if self.running == 0:
            for state in self.barriers.values():
                if state.issued:
                    self._require_waited(state)

    def _require_waited(self, state: BarrierState) -> None:
        known = max(
            clock[Row.ORDERED, state.loads.index]
            for (rank, _), clock in self.clocks.items()
            if rank == state.rank
        )
        if known < state.issued:
            error = unfinished_load(state)
            error.locate(Location(state.issue_line))
            raise error


def unfinished_load(state: BarrierState) -> UnfinishedCopy:
    return UnfinishedCopy(
        f"The CTA gives up its shared memory while a TMA load to {state.barrier.name} may still "
        "write to it: no warp has waited for it."
    )


def _distinct(numbers: NDArray[np.int32]) -> set[int]:
    numbers = numbers.reshape(-1)
    if numbers.size <= 256:
        return set(numbers.tolist())
    # Tiles were written by few accesses, in long runs.
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])
    return {int(numbers[0]), *numbers[changes + 1].tolist()}

"""Race detector: accesses to shared and tensor memory that nothing orders.

`CheckedWarp` is a warp whose every access and synchronisation is told to race_detector.py. Clocks
travel along mbarrier phases (arrivals and finished TMA loads to waiters), named barriers, the
cluster's barrier, tcgen05 commits, and waits for bulk, cp.async and wgmma groups.

Reported are unordered accesses, generic writes that the async proxy sees without a proxy fence,
mbarriers used without ordering after their initialisation, and copies that nobody waits for before
shared memory is given up.

What it takes for granted: lanes of a warp are one actor; a warp of a warpgroup reads its own rows
of A and all of B, and its wait covers that alone; arrivals release, waits acquire, whatever their
semantics; a generic read needs no proxy fence before an async write; tcgen05.ld is over when it is
issued, tcgen05.st when it is waited for, and the tcgen05 fences are not needed. Atomics do not
conflict with each other, and order nothing. Global memory is not followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa4.emulator import tensor_core
from fa4.emulator.async_copy import AsyncCopies
from fa4.emulator.barriers import MBarrier
from fa4.emulator.bulk_copy import BulkCopies
from fa4.emulator.checker_tcgen05 import WatchedTcgen05
from fa4.emulator.cluster_copy import ClusterCopies
from fa4.emulator.cluster_launch_control import ANSWER_BYTES, ClusterLaunchControl
from fa4.emulator.errors import EmulationError, UnfinishedCopy
from fa4.emulator.memory import AddressSpace, Bytes, SharedMemory, Space
from fa4.emulator.operand_cells import operand_cells
from fa4.emulator.race_detector import (
    Access,
    Actor,
    BarrierState,
    Cells,
    Clock,
    Generation,
    Row,
    Shadow,
    unfinished_load,
)
from fa4.emulator.tcgen05 import Tcgen05
from fa4.emulator.tensor_core import Operand
from fa4.emulator.warp import Deferred, Warp
from fa4.emulator.warpgroup_mma import MmaShape

if TYPE_CHECKING:
    from fa4.emulator.execute import Cta

Array = NDArray[Any]


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


class WatchedMemory(AddressSpace):
    """A warp's view of memory, which tells the race detector of generic accesses."""

    def __init__(self, space: AddressSpace, warp: CheckedWarp):
        super().__init__(space.global_memory, space.cluster)
        self.parameters = space.parameters
        self.warp = warp
        self.is_atomic = False
        self.is_muted = False
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
        for allocation, _, offsets in () if self.is_muted else self._parts:
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


class WatchedClusterCopies(ClusterCopies):
    """st.async of a warp: they belong to their mbarriers, as TMA loads do."""

    warp: CheckedWarp

    def _store(self, where: Array, data: Array, barrier: Array, mask: Array) -> None:
        for lane in np.flatnonzero(mask):
            shared, offset = self.warp.memory.shared_at(int(where[lane]), "st.async")
            signalled = self.warp.mbarrier_at(int(barrier[lane]))
            self.warp.written_by_copy(shared, offset, data.shape[1], signalled, "a st.async")
        with self.warp.unwatched():
            super()._store(where, data, barrier, mask)


class WatchedBulkCopies(BulkCopies):
    """cp.async.bulk of a warp without a tensor map."""

    warp: CheckedWarp

    def _copy_and_complete(
        self, source: tuple[Space, int], where: int, nbytes: int, barrier: MBarrier
    ) -> None:
        shared, offset = self.warp.memory.shared_at(where, "A bulk copy")
        self.warp.written_by_copy(shared, offset, nbytes, barrier, "a bulk copy")
        if source[0] == Space.SHARED:
            shared, offset = self.warp.memory.shared_at(source[1], "A bulk copy")
            self.warp.read_by_copy(shared, offset, nbytes, barrier, "a bulk copy")
        with self.warp.unwatched():
            super()._copy_and_complete(source, where, nbytes, barrier)

    def to_global(
        self, adds: bool, where: Array, source: Array, nbytes: Array, mask: Array
    ) -> None:
        for lane in np.flatnonzero(mask):
            shared, offset = self.warp.memory.shared_at(int(source[lane]), "A bulk copy")
            self.warp.read_by_store(shared, offset, int(nbytes[lane]), "a bulk copy")
        super().to_global(adds, where, source, nbytes, mask)


class WatchedLaunchControl(ClusterLaunchControl):
    """Requests for other clusters' work: answers belong to their mbarriers, as TMA loads do."""

    warp: CheckedWarp

    def _answer(self, targets: list[tuple[int, int]]) -> None:
        for place, signalled in targets:
            shared, offset = self.warp.memory.shared_at(place, "try_cancel")
            barrier = self.warp.mbarrier_at(signalled)
            self.warp.written_by_copy(shared, offset, ANSWER_BYTES, barrier, "a try_cancel")
        with self.warp.unwatched():
            super()._answer(targets)


class CheckedWarp(Warp):
    """A warp whose accesses and synchronisation the race detector follows.

    actor     of its generic accesses
    stores    actor of its bulk stores
    copies    actor of its cp.asyncs, which belong to the generic proxy
    products  actor of its wgmmas
    clock     what is ordered before its next instruction
    """

    def __init__(self, cta: Cta, index: int, live: Array):
        super().__init__(cta, index, live)
        assert cta.races is not None
        self.races = cta.races
        self.memory = self._watched = WatchedMemory(cta.memory, self)
        place = f"warp {index} of CTA rank {cta.rank}"
        self.actor = self.races.actor(place, is_async=False)
        self.stores = self.races.actor(f"the bulk stores of {place}", is_async=True)
        self.copies = self.races.actor(f"the cp.asyncs of {place}", is_async=False)
        self.products = self.races.actor(f"the wgmmas of {place}", is_async=True)
        self.async_copies: AsyncCopies = WatchedCopies(self)
        self.cluster_copies: ClusterCopies = WatchedClusterCopies(self)
        self.bulk_copies: BulkCopies = WatchedBulkCopies(self)
        self.launch_control: ClusterLaunchControl = WatchedLaunchControl(self)
        self.tcgen05: Tcgen05 = WatchedTcgen05(self)
        self.copy_numbers: dict[Deferred, int] = {}
        self.clock = self.races.clock()
        self.clock[Row.ORDERED, self.actor.index] = 1
        self.races.clocks[cta.rank, index] = self.clock
        self._barrier_arrived: Generation | None = None
        self._cluster_arrived: Generation | None = None
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
        return Access(self.actor, epoch, what, self.calling_line(), is_atomic), self.clock

    def next_epoch(self) -> None:
        """What comes later is not part of what was passed on before."""
        self.clock[Row.ORDERED, self.actor.index] += 1

    def acquire(self, other: Clock) -> None:
        np.maximum(self.clock, other, out=self.clock)

    def release(self, other: Clock) -> None:
        np.maximum(other, self.clock, out=other)
        self.next_epoch()

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
        self._watched.is_atomic = True
        try:
            return super().atomic(space, operation, where, values, mask)
        finally:
            self._watched.is_atomic = False

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """For accesses that were told to the detector in another way."""
        self._watched.is_muted = True
        try:
            yield
        finally:
            self._watched.is_muted = False

    # -- barriers --------------------------------------------------------------------------------

    def mbarrier_init(self, where: Array, count: Array, mask: Array) -> None:
        super().mbarrier_init(where, count, mask)
        access, _ = self.access("mbarrier.init")
        for _, address in self._mbarriers(where, mask):
            rank = self.memory.shared_at(address)[0].rank
            self.races.initialise(self.mbarrier_at(address), rank, access)

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

    def barriers(self, where: Array, mask: Array) -> Iterable[BarrierState]:
        """The mbarriers that lanes name, each once; this warp may use them now."""
        return [
            self.races.barrier(
                self.mbarrier_at(address), self.clock, Row.ORDERED, f"warp {self.index}"
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

    def _named_generation(self, number: int) -> Generation:
        key = (self.cta.rank, number)
        return self.races.generation(key, self.cta.named_barriers.generation(number))

    def cluster_barrier_arrive(self, is_aligned: bool, mask: Array) -> None:
        barrier = self.cta.cluster_barrier
        self._cluster_arrived = self.races.generation("cluster", barrier.generation)
        self.release(self._cluster_arrived.clock)
        super().cluster_barrier_arrive(is_aligned, mask)

    def cluster_barrier_wait(self, is_aligned: bool, mask: Array) -> bool:
        passed = super().cluster_barrier_wait(is_aligned, mask)
        if passed:
            assert self._cluster_arrived is not None
            self.acquire(self._cluster_arrived.clock)
        return passed

    # -- copies ----------------------------------------------------------------------------------

    def defer(self, action: Callable[[], None], line: int) -> Deferred:
        issued = _Issue(self.clock.copy(), line, self.copied)
        self.next_epoch()

        def checked() -> None:
            outer, self._issue = self._issue, issued
            try:
                action()
            finally:
                self._issue = outer

        deferred = super().defer(checked, line)
        self.copy_numbers[deferred] = issued.number
        return deferred

    def _load_tile(
        self, decoded: Any, shared: Any, offset: int, index: tuple[int, ...], barrier: MBarrier
    ) -> None:
        self.written_by_copy(shared, offset, decoded.tile_bytes, barrier, "a TMA load")
        super()._load_tile(decoded, shared, offset, index, barrier)

    def written_by_copy(
        self, shared: SharedMemory, offset: int, nbytes: int, barrier: MBarrier, what: str
    ) -> None:
        """A copy to shared memory that completes at an mbarrier happens now."""
        assert self._issue is not None
        clock, line = self._issue.clock, self._issue.line
        state = self.races.barrier(barrier, clock, Row.INITIALISED, what)
        state.issued += 1
        state.issue_line = line
        if self.races.running == 0:
            raise unfinished_load(state)
        shadow = self.races.shadows[id(shared.allocation)]
        access = Access(state.loads, state.issued, what, line)
        self.races.write(shadow, shadow.range(offset, nbytes), access, clock)
        state.pending[Row.ORDERED, state.loads.index] = state.issued

    def read_by_copy(
        self, shared: SharedMemory, offset: int, nbytes: int, barrier: MBarrier, what: str
    ) -> None:
        """The source of the latest `written_by_copy`, where that is in shared memory too."""
        assert self._issue is not None
        clock, line = self._issue.clock, self._issue.line
        state = self.races.barriers[id(barrier)]
        shadow = self.races.shadows[id(shared.allocation)]
        access = Access(state.loads, state.issued, what, line)
        self.races.read(shadow, shadow.range(offset, nbytes), access, clock)

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
        access = Access(self.stores, self._stored, what, self.calling_line())
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
        result = super().wgmma(full, shape, start, steps)
        self._multiplied += 1
        access = Access(self.products, self._multiplied, "a wgmma", self.calling_line())
        shadow = self.races.shadows[id(self.cta.shared.allocation)]
        form = MmaShape(*shape)
        self.races.read(shadow, _wgmma_b(shadow, form, steps), access, self.clock)
        if not form.a_in_registers:
            cells = _wgmma_a(shadow, form, steps, self.index % tensor_core.WARPS)
            self.races.read(shadow, cells, access, self.clock)
        return result

    def wgmma_commit(self, full: bool) -> None:
        super().wgmma_commit(full)
        self._matrix_groups.append(self._multiplied)

    def wgmma_wait(self, pending: int, full: bool) -> None:
        super().wgmma_wait(pending, full)
        self._acquire_groups(self._matrix_groups, pending, self.products)

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


def _wgmma_b(shadow: Shadow, shape: MmaShape, steps: Sequence[Any]) -> Cells:
    """What a chain of wgmmas reads of B in shared memory."""
    b = [tensor_core.decode_descriptor(int(b[0])) for _, b, _ in steps]
    return operand_cells(shadow, b, shape.n, shape.b_transposed, Operand(shape.b_kind))


def _wgmma_a(shadow: Shadow, shape: MmaShape, steps: Sequence[Any], warp: int) -> Cells:
    """What a warp's part of it reads of A there: its own 16 rows, where they lie apart."""
    a = [tensor_core.decode_descriptor(int(a[0])) for a, _, _ in steps]
    rows = tensor_core.ROWS
    if not shape.a_transposed:
        # K-major rows come in groups of 8; see tensor_core.py.
        rows = tensor_core.WARP_ROWS
        groups = warp * rows // 8
        a = [replace(step, start=step.start + groups * step.stride_offset) for step in a]
    return operand_cells(shadow, a, rows, shape.a_transposed, Operand(shape.a_kind))

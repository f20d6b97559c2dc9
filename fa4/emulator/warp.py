"""One warp: its registers, where its lanes are, and what instructions do beyond arithmetic.

Translated blocks (translate.py) call the methods of `Warp`. A blocking method returns that it
could not go on and leaves a `Wait` behind; the scheduler (scheduler.py) runs the warp again when
that is over.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator import local_memory, tensor_map, warp_mma
from fa4.emulator.async_copy import AsyncCopies
from fa4.emulator.barriers import MBarrier
from fa4.emulator.bulk_copy import BulkCopies
from fa4.emulator.cluster_copy import ClusterCopies
from fa4.emulator.cluster_launch_control import ClusterLaunchControl
from fa4.emulator.errors import BarrierMisuse, EmulationError, Location, UnknownInstruction
from fa4.emulator.local_memory import LocalMemory
from fa4.emulator.matrix_fragments import registers_to_rows, rows_to_registers
from fa4.emulator.memory import OFFSET_MASK, RANK_SHIFT, AddressSpace, Space
from fa4.emulator.mma_descriptor_sm100 import MmaForm
from fa4.emulator.register_kinds import KINDS, LANES
from fa4.emulator.tcgen05 import Tcgen05
from fa4.emulator.translate import BLOCKED, DIVERGED, EXITED
from fa4.emulator.warpgroup_mma import MmaShape

if TYPE_CHECKING:
    from fa4.emulator.execute import Cta

Array = np.ndarray[Any, Any]
ALL_LANES = np.ones(LANES, np.bool_)
LANE_NUMBERS = np.arange(LANES, dtype=np.uint32)
_NO_LANE = bytes(LANES)


@dataclass(frozen=True)
class Wait:
    """What a warp waits for."""

    is_over: Callable[[], bool]
    describe: Callable[[], str]
    block: int  # that waits


@dataclass
class LaneGroup:
    """Lanes that are at the same block."""

    block: int
    mask: Array
    is_full: bool
    is_blocked: bool = False


@dataclass
class WarpWork:
    """What a warp did.

    block_runs               how often it ran each block
    loaded_bytes, stored_bytes  of TMA tiles that it copied
    tensor_flop              of its tcgen05.mma by kind, those of both CTAs of a pair
    operand_bytes            that these read of shared memory
    """

    block_runs: list[int]
    loaded_bytes: int = 0
    stored_bytes: int = 0
    tensor_flop: dict[str, int] = field(default_factory=dict)
    operand_bytes: int = 0

    def add(self, other: WarpWork) -> None:
        pairs = zip(self.block_runs, other.block_runs, strict=True)
        self.block_runs = [mine + others for mine, others in pairs]
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        for kind, flop in other.tensor_flop.items():
            self.tensor_flop[kind] = self.tensor_flop.get(kind, 0) + flop
        self.operand_bytes += other.operand_bytes


class Deferred:
    """A part of an asynchronous copy that has not happened yet."""

    def __init__(self, action: Callable[[], None]):
        self.action = action
        self.is_done = False

    def complete(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.action()


class Warp:
    """See the module's docstring.

    groups    lanes by where they are, lowest block first; empty when all have exited
    waits     what the groups wait for, while none can go on
    work      what it has done so far
    """

    def __init__(self, cta: Cta, index: int, live: Array):
        self.cta = cta
        self.index = index
        self.program = cta.program
        self.memory: AddressSpace = cta.memory
        self.live = live
        self.groups = [LaneGroup(0, live, bool(live.all()))]
        self.waits: list[Wait] = []
        self.work = WarpWork([0] * len(self.program.blocks))
        # One array serves all registers of a type: arrays are never changed in place.
        self.registers: list[Array] = [_ZEROS[kind] for kind in self.program.storage]
        self._current = self.groups[0]
        self._cluster_lanes = ~ALL_LANES  # that have arrived at the cluster's barrier
        self._cluster_passing = ~ALL_LANES  # that may go on behind it and have not yet
        self._parted: list[tuple[int, Array]] = []  # block and mask of each part
        self._named_wait: tuple[int, int] | None = None
        self._symbols: dict[str, Array] = {}
        self._chains = 0
        self._fences = 0  # wgmma.fence reached so far
        self._is_at_fence = False
        self.open_copies: list[Deferred] = []
        self._copy_groups: list[list[Deferred]] = []
        self.async_copies = AsyncCopies(self)
        self.tcgen05 = Tcgen05(self)
        self.bulk_copies = BulkCopies(self)
        self.local_memory = LocalMemory(
            local_memory.offsets_of(cta.program.kernel)[1],
            cta.launch_state.options.check_unwritten,
        )
        self.cluster_copies = ClusterCopies(self)
        self.launch_control = ClusterLaunchControl(self)

    # -- running ---------------------------------------------------------------------------------

    @property
    def has_exited(self) -> bool:
        return not self.groups

    def can_run(self) -> bool:
        return bool(self.groups) and (not self.waits or any(wait.is_over() for wait in self.waits))

    def run(self, max_blocks: int) -> int:
        """Run until nothing can go on, or for a number of blocks; returns the blocks that ran."""
        self.waits.clear()
        for group in self.groups:
            group.is_blocked = False
        blocks, registers, block_runs = self.program.blocks, self.registers, self.work.block_runs
        done = 0
        while done < max_blocks:
            group = self.groups[0]
            if group.is_blocked:
                unblocked = [other for other in self.groups if not other.is_blocked]
                if not unblocked:
                    break
                group = unblocked[0]
            self._current = group
            try:
                following = blocks[group.block](self, registers, group.mask, group.is_full)
            except EmulationError as error:
                self._locate(error)
                raise
            if following == BLOCKED:
                group.is_blocked = True
                continue
            done += 1
            block_runs[group.block] += 1
            if following >= 0:
                group.block = following
            else:
                self._part(group, following)
                if not self.groups:
                    break
            if len(self.groups) > 1:
                self._rejoin()
        if any(not group.is_blocked for group in self.groups):
            self.waits.clear()  # of groups that are blocked while others can go on
        return done

    def _part(self, group: LaneGroup, following: int) -> None:
        self.groups.remove(group)
        if following == DIVERGED:
            self.groups.extend(LaneGroup(block, mask, False) for block, mask in self._parted)
        elif following != EXITED:
            raise AssertionError(f"a block returned {following}")
        elif not self.groups:
            self.cta.warp_exited(self)

    def _rejoin(self) -> None:
        """Merge groups at one block and put the lowest block first."""
        self.groups.sort(key=lambda group: group.block)
        merged = [self.groups[0]]
        for group in self.groups[1:]:
            last = merged[-1]
            if group.block == last.block:
                last.mask = last.mask | group.mask
                last.is_full = bool(last.mask.all())
                last.is_blocked = False
            else:
                merged.append(group)
        self.groups = merged

    def _locate(self, error: EmulationError) -> None:
        line = self.program.ptx_line(error)
        if line is not None:
            error.locate(self.location(line))

    def location(self, line: int) -> Location:
        text = self.program.module.line_text(line)
        source = self.program.sources.get(line)
        if source is not None:
            text = f"{text} from {source}"
        return Location(line, text, self.cta.position, self.index)

    def calling_line(self) -> int:
        """PTX line of the instruction that is being executed; 0 outside of any."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.program.filename:
                return self.program.python_lines[frame.f_lineno - 1]
            frame = frame.f_back
        return 0

    def describe(self) -> str:
        """One line for a deadlock report."""
        waits = []
        for wait in self.waits:
            place = self.location(self.program.first_lines[wait.block])
            waits.append(f"{wait.describe()} at PTX line {place.line} ({place.text})")
        what = "; ".join(waits) or "nothing: it could go on"
        return f"CTA {self.cta.position} warp {self.index} waits for {what}"

    def wait_for(self, is_over: Callable[[], bool], describe: Callable[[], str]) -> None:
        self.waits.append(Wait(is_over, describe, self._current.block))

    # -- control ---------------------------------------------------------------------------------

    def branch(self, condition: Array, mask: Array, taken: int, following: int) -> int:
        taking = condition & mask
        bits = taking.tobytes()
        if bits == _NO_LANE:
            return following
        if bits == mask.tobytes():
            return taken
        self._parted = [(taken, taking), (following, mask & ~condition)]
        return DIVERGED

    def indexed_branch(self, index: Array, mask: Array, targets: tuple[int, ...]) -> int:
        wanted = np.unique(index[mask])
        if wanted[-1] >= len(targets):
            raise EmulationError(f"brx.idx to target {wanted[-1]} of {len(targets)}.")
        if len(wanted) == 1:
            return targets[wanted[0]]
        self._parted = [(targets[number], mask & (index == number)) for number in wanted]
        return DIVERGED

    def leave(self, leaving: Array, mask: Array, following: int) -> int:
        """Lanes exit; the others of the mask go on."""
        staying = mask & ~leaving
        self.live = self.live & ~leaving
        if not staying.any():
            return EXITED
        if leaving.any():
            self._current.mask, self._current.is_full = staying, False
        return following

    def trap(self, mask: Array) -> None:
        if mask.any():
            raise EmulationError("The kernel executed trap.", int(np.argmax(mask)))

    def require_converged(self, member_mask: Array, mask: Array) -> None:
        """An instruction for all lanes of a member mask needs them here together."""
        named = (member_mask[int(np.argmax(mask))] >> LANE_NUMBERS & np.uint32(1)).astype(np.bool_)
        if not np.array_equal(named & self.live, mask):
            raise EmulationError(
                "An instruction for the lanes "
                f"{np.flatnonzero(named & self.live).tolist()} is executed by the lanes "
                f"{np.flatnonzero(mask).tolist()} alone: the warp has diverged."
            )

    def converged(self, member_mask: Array, mask: Array) -> bool:
        """bar.warp.sync: False to wait for the lanes of a member mask that are elsewhere."""
        named = (member_mask[int(np.argmax(mask))] >> LANE_NUMBERS & np.uint32(1)).astype(np.bool_)
        if (mask & ~named).any():
            self.require_converged(member_mask, mask)
        if not (named & self.live & ~mask).any():
            return True
        self.wait_for(
            lambda: not (named & self.live & ~mask).any(),  # the others have exited
            lambda: f"lanes {np.flatnonzero(named & self.live & ~mask).tolist()} of its warp",
        )
        return False

    def require_whole(self, full: bool, what: str) -> None:
        if not full and not np.array_equal(self._current.mask, self.live):
            raise EmulationError(f"{what} is executed by a part of the warp.")

    def uniform(self, values: Array, mask: Array) -> int:
        active = values[mask]
        if (active != active[0]).any():
            raise EmulationError(f"Lanes disagree about an operand: {np.unique(active).tolist()}.")
        return int(active[0])

    # -- constants -------------------------------------------------------------------------------

    def symbol(self, name: str) -> Array:
        """Address of a variable or parameter, or a special register, in all lanes."""
        value = self._symbols.get(name)
        if value is None:
            value = self._symbols[name] = self._symbol(name)
        return value

    def _symbol(self, name: str) -> Array:
        cta, kernel = self.cta, self.program.kernel
        if name in kernel.parameters:
            return np.full(LANES, kernel.parameters[name].offset, np.uint64)
        if name in kernel.local:
            return np.full(LANES, local_memory.offsets_of(kernel)[0][name], np.uint64)
        if name in cta.shared_symbols:
            address = cta.shared_symbols[name] | cta.rank << RANK_SHIFT
            return np.full(LANES, address, np.uint64)
        if name == "%laneid":
            return LANE_NUMBERS
        if name.startswith("%tid."):
            return cta.thread_indices[name[-1]][self.index * LANES : (self.index + 1) * LANES]
        special = cta.special_registers.get(name)
        if name == "%warpid":
            special = self.index
        if special is None:
            raise UnknownInstruction(f"Symbol {name} is not emulated.")
        return np.full(LANES, special, np.uint32)

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> Array:
        return self.cta.launch_state.parameter(offset, dtype)

    # -- memory ----------------------------------------------------------------------------------

    def load(self, space: int | None, where: Array, nbytes: int, mask: Array) -> Array:
        return self.memory.load(_space(space), where, nbytes, mask)

    def store(self, space: int | None, where: Array, data: Array, mask: Array) -> None:
        self.memory.store(_space(space), where, data, mask)

    def atomic(
        self,
        space: int | None,
        operation: str,
        where: Array,
        values: tuple[Array, ...],
        mask: Array,
    ) -> Array:
        """(lanes, elements) of what was there before; values are (lanes, elements).

        Lanes that have one address come one after the other.
        """
        dtype, nbytes = values[0].dtype, values[0][0].nbytes
        active = np.flatnonzero(mask)
        if len(np.unique(where[active])) == len(active):
            parts = [mask]
        else:
            parts = [np.arange(LANES) == lane for lane in active]
        old = np.zeros_like(values[0])
        for part in parts:
            before = self.load(space, where, nbytes, part).view(dtype)
            after = np.ascontiguousarray(_ATOMICS[operation](before, *values), dtype)
            self.store(space, where, after.view(np.uint8), part)
            old[part] = before[part]
        return old

    def map_address(self, where: Array, rank: Array) -> Array:
        return (where & np.uint32(OFFSET_MASK)) | (rank << np.uint32(RANK_SHIFT))

    def stmatrix(
        self, where: Array, registers: tuple[Array, ...], transposed: bool, full: bool
    ) -> None:
        self.require_whole(full, "stmatrix")
        rows = registers_to_rows(np.stack(registers), transposed)
        self.memory.store(Space.SHARED, where[: len(rows)], rows)

    def ldmatrix(self, where: Array, count: int, transposed: bool, full: bool) -> Array:
        self.require_whole(full, "ldmatrix")
        rows = self.memory.load(Space.SHARED, where[: 8 * count], 16)
        return rows_to_registers(rows, transposed)

    def fence(self, opcode: str) -> None:
        """Accesses happen in the order in which warps run: a fence orders nothing more."""

    # -- lanes together --------------------------------------------------------------------------

    def elected(self, mask: Array, full: bool) -> Array:
        return _LANE_IS[0] if full else _LANE_IS[int(np.argmax(mask))]

    def leader(self, mask: Array) -> Array:
        return np.full(LANES, np.argmax(mask), np.uint32)

    def lane_of_equals(self, mask: Array, operands: Iterable[Array]) -> Array:
        """The lowest lane of a mask alone, where all of its lanes have the same operands."""
        if all((operand[mask] == operand[mask][:1]).all() for operand in operands):
            return self.elected(mask, False) & mask
        return mask

    def shuffle_sources(self, mode: str, lane: Array, clamp: Array) -> tuple[Array, Array]:
        return _shuffle_sources(mode, lane.tobytes(), clamp.tobytes())

    def vote_ballot(self, value: Array, mask: Array) -> Array:
        bits = int.from_bytes(np.packbits(value & mask, bitorder="little").tobytes(), "little")
        return np.full(LANES, bits, np.uint32)

    def vote_any(self, value: Array, mask: Array) -> Array:
        return np.full(LANES, (value & mask).any())

    def vote_all(self, value: Array, mask: Array) -> Array:
        return np.full(LANES, (value | ~mask).all())

    def vote_uni(self, value: Array, mask: Array) -> Array:
        return self.vote_all(value, mask) | ~self.vote_any(value, mask)

    def reduce_lanes(self, operation: str, value: Array, mask: Array) -> Array:
        function: Any = _REDUCTIONS[operation]
        return np.full(LANES, function.reduce(value[mask], dtype=value.dtype))

    def reduce_float_lanes(
        self, operation: str, absolute: bool, keeps_nan: bool, value: Array, mask: Array
    ) -> Array:
        return np.full(LANES, _extreme(value[mask], operation, absolute, keeps_nan))

    # -- barriers --------------------------------------------------------------------------------

    def mbarrier_at(self, where: int) -> MBarrier:
        shared, offset = self.memory.shared_at(where, "An mbarrier operation")
        return self.cta.cluster[shared.rank].mbarriers.at(offset)

    def _mbarriers(self, where: Array, mask: Array) -> Iterable[tuple[int, int]]:
        """(lane, address) of the active lanes."""
        return ((int(lane), int(where[lane])) for lane in np.flatnonzero(mask))

    def mbarrier_init(self, where: Array, count: Array, mask: Array) -> None:
        """Lanes that do the same are one: kernels forget to elect one."""
        lanes = {
            (address, int(count[lane])): lane for lane, address in self._mbarriers(where, mask)
        }
        for (address, _), lane in lanes.items():
            shared, offset = self.memory.shared_at(address, "mbarrier.init")
            shared.require_range(offset, 8, "mbarrier.init")
            self.cta.cluster[shared.rank].mbarriers.init(offset, int(count[lane]))

    def mbarrier_inval(self, where: Array, _value: None, mask: Array) -> None:
        for _, address in self._mbarriers(where, mask):
            shared, offset = self.memory.shared_at(address, "mbarrier.inval")
            self.cta.cluster[shared.rank].mbarriers.invalidate(offset)

    def mbarrier_expect_tx(self, where: Array, nbytes: Array, mask: Array) -> None:
        for lane, address in self._mbarriers(where, mask):
            self.mbarrier_at(address).expect_tx(int(nbytes[lane]))

    def mbarrier_complete_tx(self, where: Array, nbytes: Array, mask: Array) -> None:
        for lane, address in self._mbarriers(where, mask):
            self.mbarrier_at(address).complete_tx(int(nbytes[lane]))

    def mbarrier_arrive(
        self, where: Array, value: Array | None, expects: bool, drop: bool, mask: Array
    ) -> Array:
        """`value` is a lane's number of bytes where it expects some, otherwise of arrivals."""
        if value is None and mask.all() and (where == where[0]).all():
            barrier = self.mbarrier_at(int(where[0]))
            if barrier.pending >= LANES:  # the usual case, in which no phase ends in the middle
                return np.full(LANES, barrier.arrive(LANES, 0, drop), np.uint64)
        tokens = np.zeros(LANES, np.uint64)
        for lane, address in self._mbarriers(where, mask):
            number = 1 if value is None else int(value[lane])
            arrivals, nbytes = (1, number) if expects else (number, 0)
            tokens[lane] = self.mbarrier_at(address).arrive(arrivals, nbytes, drop)
        return tokens

    def mbarrier_wait(
        self, where: Array, value: Array, is_parity: bool, blocks: bool, mask: Array
    ) -> Array | None:
        """Which lanes' phases are complete; None to wait, when none is.

        Hardware may answer false at any time, and kernels ask again. Here a warp sleeps instead,
        sooner or later, so that a phase that never completes is a deadlock and not an endless loop.
        """
        lane = int(np.argmax(mask))
        address, operand = int(where[lane]), int(value[lane])
        if (where[mask] == where[lane]).all() and (value[mask] == value[lane]).all():
            barrier = self.mbarrier_at(address)
            is_complete = barrier.test_parity if is_parity else barrier.test_state
            if is_complete(operand):
                return ALL_LANES
            if not blocks or self.cta.launch_state.gives_up():
                return ~ALL_LANES
            self._wait_for_phase(barrier, operand, is_parity)
            return None
        done = np.zeros(LANES, np.bool_)
        for lane, address in self._mbarriers(where, mask):
            barrier = self.mbarrier_at(address)
            is_complete = barrier.test_parity if is_parity else barrier.test_state
            done[lane] = is_complete(int(value[lane]))
        if done.any() or not blocks or self.cta.launch_state.gives_up():
            return done
        for lane, address in self._mbarriers(where, mask):
            self._wait_for_phase(self.mbarrier_at(address), int(value[lane]), is_parity)
        return None

    def _wait_for_phase(self, barrier: MBarrier, operand: int, is_parity: bool) -> None:
        is_complete = barrier.test_parity if is_parity else barrier.test_state
        self.wait_for(
            lambda: is_complete(operand),
            lambda: f"{'parity' if is_parity else 'state'} {operand} of {barrier.describe()}",
        )

    def named_barrier_sync(self, number: int, threads: int | None, mask: Array) -> bool:
        self.require_whole(False, "bar.sync")
        named = self.cta.named_barriers
        if self._named_wait is None:
            count = self.cta.threads if threads is None else threads
            self._named_wait = number, named.arrive(number, count)
        waited = self._named_wait
        if not named.passed(*waited):
            self.wait_for(lambda: named.passed(*waited), lambda: named.describe(waited[0]))
            return False
        self._named_wait = None
        return True

    def named_barrier_arrive(self, number: int, threads: int | None, mask: Array) -> None:
        self.require_whole(False, "bar.arrive")
        if threads is None:
            raise BarrierMisuse("bar.arrive needs a number of threads.")
        self.cta.named_barriers.arrive(number, threads)

    def cluster_barrier_arrive(self, is_aligned: bool, mask: Array) -> None:
        """The warp arrives when all of its lanes have."""
        if is_aligned:
            self.require_whole(False, "barrier.cluster.arrive.aligned")
        if (self._cluster_lanes & mask).any():
            raise BarrierMisuse(
                f"warp {self.index} arrives twice at the cluster's barrier without a wait between."
            )
        self._cluster_lanes = self._cluster_lanes | mask
        if not (self.live & ~self._cluster_lanes).any():
            self.cta.cluster_barrier.arrive((self.cta.rank, self.index))

    def cluster_barrier_wait(self, is_aligned: bool, mask: Array) -> bool:
        if is_aligned:
            self.require_whole(False, "barrier.cluster.wait.aligned")
        if not (mask & ~self._cluster_passing).any():  # other lanes of the warp were here first
            self._cluster_passing = self._cluster_passing & ~mask
            return True
        if (mask & ~self._cluster_lanes).any():
            raise BarrierMisuse(
                f"warp {self.index} waits at the cluster's barrier without arriving."
            )
        barrier, key = self.cta.cluster_barrier, (self.cta.rank, self.index)
        if barrier.is_over(key):
            barrier.wait(key)
            self._cluster_passing = self._cluster_lanes & ~mask
            self._cluster_lanes = ~ALL_LANES
            return True
        self.wait_for(lambda: barrier.is_over(key), barrier.describe)
        return False

    # -- copies ----------------------------------------------------------------------------------

    def tma_load(
        self,
        where: Array,
        map_address: Array,
        coordinates: tuple[Array, ...],
        barrier_address: Array,
        mask: Array,
    ) -> None:
        line = self.calling_line()
        for lane in np.flatnonzero(mask):
            decoded = self._tensor_map(map_address[lane])
            if tensor_map.are_of_rows(decoded, coordinates):
                decoded = tensor_map.of_gathered_rows(decoded)
            shared, offset = self.memory.shared_at(int(where[lane]), "A TMA load")
            barrier = self.mbarrier_at(int(barrier_address[lane]))
            index = tuple(int(coordinate[lane]) for coordinate in coordinates)
            self.work.loaded_bytes += decoded.tile_bytes
            action = functools.partial(self._load_tile, decoded, shared, offset, index, barrier)
            self.defer(action, line)

    def _load_tile(
        self, decoded: Any, shared: Any, offset: int, index: tuple[int, ...], barrier: MBarrier
    ) -> None:
        memory = self.memory.global_memory
        barrier.complete_tx(tensor_map.load_tile(decoded, memory, shared, offset, index))

    def tma_store(
        self,
        where: Array,
        map_address: Array,
        coordinates: tuple[Array, ...],
        reduction: str | None,
        mask: Array,
    ) -> None:
        line = self.calling_line()
        fold = None if reduction is None else tensor_map.Reduction(reduction)
        for lane in np.flatnonzero(mask):
            decoded = self._tensor_map(map_address[lane])
            shared, offset = self.memory.shared_at(int(where[lane]), "A TMA store")
            index = tuple(int(coordinate[lane]) for coordinate in coordinates)
            self.work.stored_bytes += decoded.tile_bytes
            memory = self.memory.global_memory
            action = functools.partial(
                tensor_map.store_tile, decoded, memory, shared, offset, index, fold
            )
            self.open_copies.append(self.defer(action, line))

    def _tensor_map(self, generic: np.uint64) -> Any:
        packed = self.memory.read(
            None, int(generic), tensor_map.MAP_BYTES, tensor_map.MAP_ALIGNMENT
        )
        return tensor_map.decode(packed)

    def defer(self, action: Callable[[], None], line: int) -> Deferred:
        def located() -> None:
            try:
                action()
            except EmulationError as error:
                error.locate(self.location(line))
                raise

        deferred = Deferred(located)
        self.cta.launch_state.defer(deferred)
        return deferred

    def bulk_commit(self, mask: Array) -> None:
        """Groups are a warp's here, not a lane's: kernels let one elected lane store."""
        if mask.any():
            self._copy_groups.append(self.open_copies)
            self.open_copies = []

    def bulk_wait(self, pending: int, reads_only: bool, mask: Array) -> None:
        """All groups but the latest `pending` complete, reads and writes at once."""
        if not mask.any():
            return
        count = max(0, len(self._copy_groups) - pending)
        for group in self._copy_groups[:count]:
            for copy in group:
                copy.complete()
        del self._copy_groups[:count]

    # -- matrices --------------------------------------------------------------------------------

    def mma_sync(
        self,
        a_kind: str,
        b_kind: str,
        a: tuple[Array, ...],
        b: tuple[Array, ...],
        c: tuple[Array, ...],
        full: bool,
    ) -> Array:
        self.require_whole(full, "mma.sync")
        return warp_mma.multiply(a_kind, b_kind, a, b, c)

    mma_form = MmaForm  # for translated blocks

    def reduce_columns(
        self, registers: Array, operation: str, absolute: bool, keeps_nan: bool
    ) -> Array:
        """Least or largest of each lane's registers (registers, lanes): tcgen05.ld.red."""
        return _extreme(registers, operation, absolute, keeps_nan)

    # -- warpgroups ------------------------------------------------------------------------------

    def give_registers(self, count: int, full: bool) -> None:
        self._check_registers(count, full)
        self.cta.register_pool.give(self.index, count)

    def take_registers(self, count: int, full: bool) -> bool:
        """False to wait until other warps have given enough."""
        self._check_registers(count, full)
        pool = self.cta.register_pool
        if pool.take(self.index, count):
            return True
        self.wait_for(
            lambda: pool.has(self.index, count),
            lambda: f"{count} registers a thread ({pool.free // LANES} of its CTA's are free)",
        )
        return False

    def _check_registers(self, count: int, full: bool) -> None:
        self.require_whole(full, "setmaxnreg")
        if not 24 <= count <= 256 or count % 8:
            raise EmulationError(
                f"setmaxnreg asks for {count} registers; allowed are multiples of 8 in 24..256."
            )

    def wgmma_fence(self, full: bool) -> bool:
        """The warps of a warpgroup meet here; False to wait for the others.

        The wgmmas that follow are executed when the first warp reaches them. What each of the four
        has stored for its own rows of A must be there by then.
        """
        self.require_whole(full, "wgmma.fence")
        if not self._is_at_fence:
            self._is_at_fence = True
            self._fences += 1
        first = self.index // 4 * 4
        others = self.cta.warps[first : first + 4]
        count = self._fences

        def is_over() -> bool:
            return all(other.has_exited or other._fences >= count for other in others)

        if is_over():
            self._is_at_fence = False
            return True
        self.wait_for(is_over, lambda: "the other warps of its warpgroup")
        return False

    def wgmma_commit(self, full: bool) -> None:
        self.require_whole(full, "wgmma.commit_group")

    def wgmma_wait(self, pending: int, full: bool) -> None:
        """Results are in the registers since the wgmma; see wgmma_registers.py."""
        self.require_whole(full, "wgmma.wait_group")

    def wgmma(
        self, full: bool, shape: tuple[Any, ...], start: Any, steps: tuple[Any, ...]
    ) -> Array:
        if not full:
            raise EmulationError("wgmma is executed by a part of the warp.")
        first = MmaShape(*shape)
        plain = [
            (a if first.a_in_registers else int(a[0]), int(b[0]), bool(adds[0]))
            for a, b, adds in steps
        ]
        number = self._chains
        self._chains += 1
        group = self.cta.matrix_units[self.index // 4]
        return group.chain(number, self.index % 4, first, np.asarray(start), plain)


def _space(space: int | None) -> Space | None:
    return None if space is None else Space(space)


_ZEROS = {name: np.zeros(LANES, kind.dtype) for name, kind in KINDS.items() if not kind.packed}

_LANE_IS = [np.arange(LANES) == lane for lane in range(LANES)]

_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _extreme(values: Array, operation: str, absolute: bool, keeps_nan: bool) -> Array:
    """Least or largest along the first axis; a NaN loses unless it is kept."""
    values = np.abs(values) if absolute else values
    function: Any = _REDUCTIONS[operation]
    if values.dtype == np.float32 and not keeps_nan:
        function = {"min": np.fmin, "max": np.fmax}[operation]
    return function.reduce(values, axis=0)


_ATOMICS: dict[str, Callable[..., Any]] = {
    **_REDUCTIONS,
    "exch": lambda before, value: value,
    "cas": lambda before, compare, value: np.where(before == compare, value, before),
    "inc": lambda before, limit: np.where(before >= limit, before.dtype.type(0), before + 1),
    "dec": lambda before, limit: np.where((before == 0) | (before > limit), limit, before - 1),
}


@functools.lru_cache(maxsize=1024)
def _shuffle_sources(mode: str, lanes: bytes, clamps: bytes) -> tuple[Array, Array]:
    """Source lane of each lane of shfl.sync, and whether it is in range (PTX ISA, shfl.sync)."""
    operand = np.frombuffer(lanes, np.uint32).astype(np.int64) & 31
    clamp_operand = np.frombuffer(clamps, np.uint32).astype(np.int64)
    clamp, segment = clamp_operand & 31, clamp_operand >> 8 & 31
    lane = np.arange(LANES)
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - operand
        valid = source >= highest
    elif mode == "down":
        source = lane + operand
        valid = source <= highest
    elif mode == "bfly":
        source = lane ^ operand
        valid = source <= highest
    else:
        source = lowest | (operand & ~segment)
        valid = source <= highest
    return np.where(valid, source, lane), valid

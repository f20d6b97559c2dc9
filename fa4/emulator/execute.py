"""Runs one launch: its clusters by themselves (parallel.py), the warps of a cluster in turns.

A kernel in which a cluster waits for one with a higher number does not end here: it is reported as
a deadlock where it waits at a barrier, and does not return where it spins on global memory.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa4.emulator.barriers import ClusterBarrier, MBarriers, NamedBarriers
from fa4.emulator.checker import CheckedWarp
from fa4.emulator.launch_record import Dim3, Launch
from fa4.emulator.memory import AddressSpace, GlobalMemory, SharedMemory
from fa4.emulator.parallel import num_processes, run_clusters
from fa4.emulator.ptx import SharedVariable
from fa4.emulator.race_detector import RaceDetector
from fa4.emulator.register_kinds import LANES
from fa4.emulator.register_pool import RegisterPool
from fa4.emulator.scheduler import Scheduler, policy
from fa4.emulator.tensor_memory import TensorMemory
from fa4.emulator.translate import Program, translate
from fa4.emulator.warp import Deferred, Warp, WarpWork
from fa4.emulator.warpgroup_mma import WarpgroupMma

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Options:
    """How a launch is run.

    schedule         see scheduler.py; results must not depend on it
    seed             of the schedules that draw random numbers
    check_unwritten  report reads of shared memory that nothing wrote
    check_races      report accesses to shared memory that nothing orders; see checker.py
    processes        that clusters are spread over, None for as many as are worth it
    together         clusters in flight at the same time, for kernels whose CTAs wait for others
    """

    schedule: str = "round_robin"
    seed: int = 0
    check_unwritten: bool = True
    check_races: bool = False
    processes: int | None = None
    together: int = 1


@dataclass
class Statistics:
    """What a launch took.

    instructions  warp-instructions executed
    warps         work by warp of a CTA, all CTAs together; see costs.py
    """

    instructions: int = 0
    warps: dict[int, WarpWork] = field(default_factory=dict)

    def add(self, other: Statistics) -> None:
        self.instructions += other.instructions
        for index, work in other.warps.items():
            self.add_warp(index, work)

    def add_warp(self, index: int, work: WarpWork) -> None:
        if index in self.warps:
            self.warps[index].add(work)
        else:
            self.warps[index] = replace(work)


class LaunchState:
    """What all CTAs of a launch share."""

    def __init__(self, launch: Launch, program: Program, memory: GlobalMemory, options: Options):
        self.launch = launch
        self.program = program
        self.global_memory = memory
        self.options = options
        self.scheduler = self.new_scheduler(0)
        self._parameters: dict[tuple[int, str], Array] = {}
        self._first_unstarted = 0  # cluster; those before it run, have run or were taken
        self._taken: set[int] = set()  # clusters whose work others do

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> Array:
        key = (offset, dtype.str)
        value = self._parameters.get(key)
        if value is None:
            value = np.repeat(np.frombuffer(self.launch.params, dtype, 1, offset), LANES)
            self._parameters[key] = value
        return value

    def new_scheduler(self, cluster: int) -> Scheduler:
        """Of its own for each cluster, so that the order in which clusters run does not matter."""
        seed = self.options.seed + (cluster << 32)
        return Scheduler(policy(self.options.schedule, seed, polls=self.options.together > 1))

    def begin_cluster(self, number: int) -> bool:
        """Whether a cluster still has to run: another may have taken its work."""
        self._first_unstarted = max(self._first_unstarted, number + 1)
        return number not in self._taken

    def take_cluster(self) -> Dim3 | None:
        """Position of the first CTA of the next cluster, which will not run; None if all have
        begun."""
        counts = _cluster_counts(self.launch)
        if self._first_unstarted >= math.prod(counts):
            return None
        number = self._first_unstarted
        self._first_unstarted += 1
        self._taken.add(number)
        return _positions(self.launch, counts, number)[0]

    def defer(self, copy: Deferred) -> None:
        self.scheduler.defer(copy)

    def gives_up(self) -> bool:
        return self.scheduler.policy.gives_up()


@dataclass(eq=False)
class Cta:
    """One thread block: its shared memory, barriers and warps."""

    launch_state: LaunchState
    position: Dim3
    rank: int
    cluster: list[Cta]
    memory: AddressSpace
    shared: SharedMemory
    shared_symbols: dict[str, int]
    cluster_barrier: ClusterBarrier
    races: RaceDetector | None = None
    named_barriers: NamedBarriers = field(default_factory=NamedBarriers)
    register_pool: RegisterPool = field(init=False)
    mbarriers: MBarriers = field(init=False)
    matrix_units: list[WarpgroupMma] = field(init=False)
    tensor_memory: TensorMemory = field(init=False)
    thread_indices: dict[str, Array] = field(init=False)
    special_registers: dict[str, int] = field(init=False)
    warps: list[Warp] = field(init=False)

    def __post_init__(self) -> None:
        self.mbarriers = MBarriers(self.rank)
        count = -(-self.threads // LANES)
        self.register_pool = RegisterPool(count, self.program.kernel.ctas_per_sm)
        self.matrix_units = [WarpgroupMma(self.shared) for _ in range(-(-count // 4))]
        self.tensor_memory = TensorMemory(
            f"tensor memory of CTA rank {self.rank}", self.launch_state.options.check_unwritten
        )
        self.thread_indices = _thread_indices(self.launch_state.launch.block, count * LANES)
        self.special_registers = _special_registers(
            self.launch_state.launch, self.position, self.rank
        )
        lanes = np.arange(count * LANES) < self.threads
        make_warp = Warp if self.races is None else CheckedWarp
        self.warps = [
            make_warp(self, index, lanes[index * LANES : (index + 1) * LANES])
            for index in range(count)
        ]

    @property
    def program(self) -> Program:
        return self.launch_state.program

    @property
    def threads(self) -> int:
        return self.launch_state.launch.threads

    def warp_exited(self, warp: Warp) -> None:
        self.cluster_barrier.exit((self.rank, warp.index))


def run_launch(launch: Launch, memory: GlobalMemory, options: Options | None = None) -> Statistics:
    """Execute a launch; kernels touch what is registered in `memory`.

    Raises EmulationError for whatever a kernel does wrong, `UnknownInstruction` for PTX that is not
    modelled.
    """
    program = translate(launch.ptx, launch.entry)
    state = LaunchState(launch, program, memory, options or Options())
    counts = _cluster_counts(launch)
    run = functools.partial(_run_cluster, state, counts)
    numbers = range(math.prod(counts))
    together = state.options.together
    if together > 1:
        statistics = Statistics()
        with np.errstate(all="ignore"):
            for first in numbers[::together]:
                statistics.add(_run_clusters(state, counts, numbers[first : first + together]))
        return statistics
    requested = state.options.processes
    statistics = Statistics()
    with np.errstate(all="ignore"):
        if requested is None and program.cluster_seconds is None:
            # How long a cluster takes is not known yet: the first one runs alone and tells.
            start = time.perf_counter()
            statistics.add(run(0))
            program.cluster_seconds = time.perf_counter() - start
            numbers = numbers[1:]
        processes = 1
        if len(numbers) > 1 and program.clusters_are_independent:
            processes = num_processes(requested, len(numbers) * (program.cluster_seconds or 0.0))
        for other in run_clusters(run, numbers, processes, memory):
            statistics.add(other)
    return statistics


def _run_cluster(state: LaunchState, counts: Dim3, number: int) -> Statistics:
    return _run_clusters(state, counts, range(number, number + 1))


def _run_clusters(state: LaunchState, counts: Dim3, numbers: range) -> Statistics:
    """Clusters that are in flight at the same time, so that their CTAs may wait for each other."""
    ctas = []
    for number in numbers:
        if state.begin_cluster(number):
            ctas += _cluster(state, _positions(state.launch, counts, number))
    if not ctas:
        return Statistics()
    state.scheduler = state.new_scheduler(numbers[0])
    state.scheduler.run([warp for cta in ctas for warp in cta.warps])
    for cta in ctas:
        cta.tensor_memory.require_freed()
    statistics = Statistics()
    sizes = state.program.instructions
    for warp in (warp for cta in ctas for warp in cta.warps):
        statistics.add_warp(warp.index, warp.work)
        runs = zip(warp.work.block_runs, sizes, strict=True)
        statistics.instructions += sum(count * size for count, size in runs)
    return statistics


def _cluster_counts(launch: Launch) -> Dim3:
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise ValueError(f"cluster {launch.cluster} does not divide the grid {launch.grid}.")
    x, y, z = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    return x, y, z


def _positions(launch: Launch, counts: Dim3, number: int) -> list[Dim3]:
    """Positions of the CTAs of a cluster, by rank: x runs fastest."""
    first = _position(number, counts)
    return [
        (
            first[0] * launch.cluster[0] + inside[0],
            first[1] * launch.cluster[1] + inside[1],
            first[2] * launch.cluster[2] + inside[2],
        )
        for inside in (_position(rank, launch.cluster) for rank in range(math.prod(launch.cluster)))
    ]


def _position(number: int, counts: Any) -> Dim3:
    return number % counts[0], number // counts[0] % counts[1], number // counts[0] // counts[1]


def _cluster(state: LaunchState, positions: list[Dim3]) -> list[Cta]:
    static, symbols = _shared_layout(state.program)
    size = static + state.launch.shared_bytes
    shared = [
        SharedMemory.create(size, rank, state.options.check_unwritten)
        for rank in range(len(positions))
    ]
    space = AddressSpace(state.global_memory, shared, state.launch.params)
    warps = -(-state.launch.threads // LANES)
    barrier = ClusterBarrier(len(positions) * warps)
    races = RaceDetector(shared, warps) if state.options.check_races else None
    ctas: list[Cta] = []
    for rank, position in enumerate(positions):
        ctas.append(Cta(state, position, rank, ctas, space, shared[rank], symbols, barrier, races))
    return ctas


def _shared_layout(program: Program) -> tuple[int, dict[str, int]]:
    """Where shared variables lie: static ones in order, the dynamic part behind them."""
    variables: list[SharedVariable] = [
        *program.module.shared.values(),
        *program.kernel.shared.values(),
    ]
    offsets: dict[str, int] = {}
    end = 0
    for variable in sorted(variables, key=lambda variable: variable.size == 0):
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return end, offsets


def _thread_indices(block: Dim3, threads: int) -> dict[str, Array]:
    number = np.arange(threads, dtype=np.uint32)
    x, y = np.uint32(block[0]), np.uint32(block[1])
    return {"x": number % x, "y": number // x % y, "z": number // (x * y)}


def _special_registers(launch: Launch, position: Dim3, rank: int) -> dict[str, int]:
    found = {
        "%cluster_ctarank": rank,
        "%cluster_nctarank": math.prod(launch.cluster),
        "%nwarpid": -(-launch.threads // LANES),
    }
    for axis, name in enumerate("xyz"):
        found |= {
            f"%ntid.{name}": launch.block[axis],
            f"%ctaid.{name}": position[axis],
            f"%nctaid.{name}": launch.grid[axis],
            f"%cluster_ctaid.{name}": position[axis] % launch.cluster[axis],
            f"%cluster_nctaid.{name}": launch.cluster[axis],
            f"%clusterid.{name}": position[axis] // launch.cluster[axis],
            f"%nclusterid.{name}": launch.grid[axis] // launch.cluster[axis],
        }
    return found

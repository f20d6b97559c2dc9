"""Clusters of one launch in several processes.

Clusters that do not talk to each other may run in any order, so also at the same time. Each process
takes the next cluster that nobody has; what they write goes to memory that they share, and is
copied to its owners at the end. Results, reports of faults and statistics are those of one process.

Processes are forked: they inherit the translated kernel, and take a few milliseconds to start.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from fa4.emulator.errors import EmulationError
from fa4.emulator.memory import Allocation, GlobalMemory
from fa4.emulator.ptx import Instruction, Kernel

# Below this many seconds of work to come, starting processes does not pay.
WORTHWHILE_SECONDS = 0.2

Result = TypeVar("Result")


def num_processes(requested: int | None, seconds_to_come: float) -> int:
    """How many processes to use; 1 where this system or process cannot fork.

    requested  None for as many as there are cores, if the work to come is worth it
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if not can_fork or multiprocessing.current_process().daemon:
        return 1
    if requested is not None:
        return requested
    return num_cores() if seconds_to_come > WORTHWHILE_SECONDS else 1


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def clusters_are_independent(kernel: Kernel) -> bool:
    """Whether nothing in a kernel's text can make one cluster see what another one does.

    Atomics on global memory are not atomic between processes, and their order would differ from
    run to run; loads with an ordering wait for other clusters; clusters can take work from others.
    """
    return not any(_reaches_other_clusters(i) for i in kernel.instructions)


def _reaches_other_clusters(i: Instruction) -> bool:
    is_shared = any(part.startswith("shared") for part in i.parts)
    if i.parts[0] in ("clusterlaunchcontrol", "multimem"):
        return True
    if i.parts[0] in ("atom", "red"):
        return not is_shared
    if i.parts[:2] == ("cp", "reduce"):
        return "global" in i.parts
    orderings = ("acquire", "relaxed", "volatile", "mmio")
    return i.parts[0] == "ld" and not is_shared and any(part in orderings for part in i.parts)


@dataclass
class _Outcome(Generic[Result]):
    """What one process did: results of its clusters, and the cluster whose run raised."""

    results: list[Result] = field(default_factory=list)
    failed: int | None = None
    error: BaseException | None = None


def run_clusters(
    run: Callable[[int], Result], numbers: range, processes: int, memory: GlobalMemory
) -> list[Result]:
    """Call `run` for each number, in several processes, and return what it returned, in no order.

    run     may write to the memory, and to nothing else that counts
    Raises what `run` raised for the lowest number for which it raises.
    """
    processes = min(processes, len(numbers))
    context = multiprocessing.get_context("fork") if processes > 1 else None
    if context is None:
        return [run(number) for number in numbers]
    counter = context.Value("q", numbers.start)
    connections, workers = [], []
    with _shared_memory(memory):
        try:
            for _ in range(processes - 1):
                receiver, sender = context.Pipe(duplex=False)
                worker = context.Process(
                    target=_work_in_child, args=(run, numbers, counter, sender), daemon=True
                )
                with warnings.catch_warnings():
                    # Python warns of threads that a fork leaves behind; the child needs none.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    worker.start()
                sender.close()
                connections.append(receiver)
                workers.append(worker)
            outcomes = [_work(run, numbers, counter)]
            for receiver, worker in zip(connections, workers, strict=True):
                outcomes.append(_receive(receiver, worker))
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    if failures:
        # Numbers are given out in order, and all below a failed one were run to their end.
        first = min(failures, key=lambda outcome: outcome.failed or 0)
        assert first.error is not None
        raise first.error
    return [result for outcome in outcomes for result in outcome.results]


def _work(run: Callable[[int], Result], numbers: range, counter: Any) -> _Outcome[Result]:
    outcome: _Outcome[Result] = _Outcome()
    while True:
        with counter.get_lock():
            number = counter.value
            counter.value = number + 1
        if number >= numbers.stop:
            return outcome
        try:
            outcome.results.append(run(number))
        except Exception as error:  # noqa: BLE001  raised again by `run_clusters`
            outcome.failed, outcome.error = number, error
            with counter.get_lock():
                counter.value = numbers.stop
            return outcome


def _work_in_child(run: Callable[[int], Result], numbers: range, counter: Any, sender: Any) -> None:
    gc.freeze()  # what is inherited would be copied when it is looked through
    outcome = _work(run, numbers, counter)
    if outcome.error is not None and not isinstance(outcome.error, EmulationError):
        # Exceptions of the emulator itself may hold anything.
        text = "".join(traceback.format_exception(outcome.error))
        outcome.error = RuntimeError(f"A process of the emulator failed:\n{text}")
    sender.send(outcome)
    sender.close()


def _receive(receiver: Any, worker: Any) -> _Outcome[Any]:
    try:
        outcome: _Outcome[Any] = receiver.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(
            f"A process of the emulator died with exit code {worker.exitcode}."
        ) from None
    return outcome


@contextlib.contextmanager
def _shared_memory(memory: GlobalMemory) -> Iterator[None]:
    """Let what is written in the block be seen by processes that are forked in it."""
    restored: list[tuple[Allocation, Any, Any]] = []
    extents: list[tuple[int, np.ndarray[Any, Any]]] = []
    for first, end, allocations in _writable_extents(memory.allocations):
        extent = _shared_bytes(end - first)
        for allocation in allocations:
            start = allocation.address - first
            view = extent[start : start + allocation.bytes.size]
            view[:] = allocation.bytes
            restored.append((allocation, allocation.bytes, allocation.written))
            allocation.bytes = view
            if allocation.written is not None:
                written = _shared_bytes(allocation.written.size).view(np.bool_)
                written[:] = allocation.written
                allocation.written = written
        extents.append((first, extent))
    try:
        yield
    finally:
        for allocation, data, written in restored:
            data[:] = allocation.bytes
            if written is not None:
                written[:] = allocation.written
            allocation.bytes, allocation.written = data, written


def _shared_bytes(size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _writable_extents(
    allocations: Sequence[Allocation],
) -> Iterator[tuple[int, int, list[Allocation]]]:
    """(first address, end, allocations) of each run of overlapping ones that has a writable one."""
    group: list[Allocation] = []
    end = 0
    for allocation in [*sorted(allocations, key=lambda a: a.address), None]:
        if group and (allocation is None or allocation.address >= end):
            if any(member.writable for member in group):
                yield group[0].address, end, group
            group = []
        if allocation is not None:
            end = max(end, allocation.end) if group else allocation.end
            group.append(allocation)

"""Clusters in several processes: the same results, statistics and reports as in one."""

import multiprocessing
import os
import time

import numpy as np
import pytest

from fa4.emulator import parallel
from fa4.emulator.errors import OutOfBounds
from fa4.emulator.execute import Statistics
from fa4.emulator.memory import GlobalMemory
from fa4.emulator.parallel import clusters_are_independent, num_processes, run_clusters
from fa4.emulator.ptx import parse
from tests.emulator.ptx_kernels import kernel_text, run_body

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked"
)

# Thread t of CTA c writes 1000 c + t to element 32 c + t of array 0; %r1 is c.
FILL = """
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r1, 32, %r60;
    mul.wide.u32 %rd10, %r2, 4;
    add.s64 %rd10, %rd10, %rd0;
    mad.lo.u32 %r3, %r1, 1000, %r60;
    st.global.b32 [%rd10], %r3;
"""
COUNT = "    atom.global.add.u32 %r5, [%rd0], 1;\n"


def filled(ctas: int) -> np.ndarray:
    cta, thread = np.divmod(np.arange(32 * ctas), 32)
    return (1000 * cta + thread).astype(np.uint32)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 3, 20])
def test_results_and_statistics_do_not_depend_on_processes(processes: int, cluster: int) -> None:
    array = np.zeros(32 * 8, np.uint32)
    statistics = run_body(FILL, [array], grid=8, cluster=cluster, processes=processes)
    assert np.array_equal(array, filled(8))
    alone = run_body(FILL, [array], grid=8, cluster=cluster, processes=1)
    assert statistics == alone


def test_random_schedules_do_not_depend_on_processes() -> None:
    """A lane of several warps writes last: which one is drawn for each cluster by itself."""
    body = FILL.replace("mad.lo.u32 %r2, %r1, 32, %r60;", "mov.b32 %r2, %r1;")
    results = []
    for processes in (1, 2):
        array = np.zeros(16, np.uint32)
        run_body(
            body, [array], threads=256, grid=16, schedule="random", seed=5, processes=processes
        )
        results.append(array)
    assert np.array_equal(*results)
    assert len(set(results[0] % 1000)) > 1, "every cluster drew the same order"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_fault_of_the_first_cluster_is_reported(processes: int) -> None:
    """CTAs 3 to 7 write behind the array."""
    array = np.zeros(32 * 3, np.uint32)
    with pytest.raises(OutOfBounds, match="store of 4 bytes") as raised:
        run_body(FILL, [array], grid=8, processes=processes)
    location = raised.value.location
    assert location is not None
    assert (location.cta, location.warp, location.lane) == ((3, 0, 0), 0, 0)
    assert np.array_equal(array, filled(3))


@pytest.mark.parametrize("processes", [1, 2])
def test_atomics_keep_their_order(processes: int) -> None:
    array = np.zeros(1, np.uint32)
    tickets = np.zeros(32 * 8, np.uint32)
    body = COUNT + FILL.replace("%rd10, %rd0", "%rd10, %rd1").replace("], %r3", "], %r5")
    run_body(body, [array, tickets], grid=8, processes=processes)
    assert array[0] == 256
    assert np.array_equal(tickets, np.arange(256))


@pytest.mark.parametrize(
    ("body", "independent"),
    [
        (FILL, True),
        ("atom.shared.add.u32 %r5, [%r4], 1;", True),
        ("ld.shared.acquire.cta.b32 %r5, [%r4];", True),
        (COUNT, False),
        ("atom.add.u32 %r5, [%rd0], 1;", False),
        ("red.release.gpu.global.add.u32 [%rd0], 1;", False),
        ("ld.acquire.gpu.global.b32 %r5, [%rd0];", False),
        ("ld.volatile.global.b32 %r5, [%rd0];", False),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd0], [%r4], 16;", False),
        ("clusterlaunchcontrol.try_cancel.async.shared::cta.b128 [%r4], [%r5];", False),
    ],
)
def test_kernels_whose_clusters_may_meet_are_known(body: str, independent: bool) -> None:
    (kernel,) = parse(kernel_text(body, 1)).kernels.values()
    assert clusters_are_independent(kernel) == independent


# -- without a kernel ------------------------------------------------------------------------------


def memory_of(*arrays: np.ndarray, **options) -> GlobalMemory:
    memory = GlobalMemory()
    for array in arrays:
        memory.register("array", array.ctypes.data, array.view(np.uint8), **options)
    return memory


def test_all_processes_take_part() -> None:
    def run(number: int) -> tuple[int, int]:
        time.sleep(0.05)
        return number, os.getpid()

    results = run_clusters(run, range(1, 9), 3, GlobalMemory())
    assert sorted(number for number, _ in results) == list(range(1, 9))
    assert len({process for _, process in results}) == 3


def test_overlapping_memory_is_shared_as_one() -> None:
    whole = np.zeros(64, np.uint8)
    memory = memory_of(whole[:48], whole[16:])

    def run(number: int) -> Statistics:
        memory.allocations[number % 2].bytes[16 + number] = number
        return Statistics()

    run_clusters(run, range(2, 10), 2, memory)
    expected = np.zeros(64, np.uint8)
    for number in range(2, 10):
        expected[16 + number + 16 * (number % 2)] = number
    assert np.array_equal(whole, expected)
    assert all(np.shares_memory(allocation.bytes, whole) for allocation in memory.allocations)


def test_what_was_written_is_known_afterwards() -> None:
    array = np.zeros(16, np.uint8)
    memory = memory_of(array, initialised=False)
    (allocation,) = memory.allocations
    before = allocation.written

    def run(number: int) -> None:
        assert allocation.written is not None
        allocation.written[number] = True

    run_clusters(run, range(4, 8), 2, memory)
    assert allocation.written is before
    assert np.flatnonzero(before).tolist() == [4, 5, 6, 7]


def test_error_of_the_lowest_number_is_raised_and_later_ones_are_not_begun() -> None:
    array = np.zeros(100, np.uint8)
    memory = memory_of(array)

    def run(number: int) -> None:
        if number == 3:
            time.sleep(0.2)
            raise OutOfBounds("three")
        if number == 4:
            raise OutOfBounds("four")
        memory.allocations[0].bytes[number] = 1

    with pytest.raises(OutOfBounds, match="three"):
        run_clusters(run, range(100), 2, memory)
    assert array[:3].all()
    assert not array[3:].any()


def test_other_exceptions_of_a_process_arrive_with_their_traceback() -> None:
    parent = os.getpid()

    def fail_in_the_child(number: int) -> None:
        time.sleep(0.02)
        if os.getpid() != parent:
            raise ZeroDivisionError("where it was")

    with pytest.raises(RuntimeError, match=r"fail_in_the_child(.|\n)*ZeroDivisionError"):
        run_clusters(fail_in_the_child, range(20), 2, GlobalMemory())


def test_process_that_dies_is_an_error() -> None:
    parent = os.getpid()

    def die_in_the_child(number: int) -> None:
        time.sleep(0.02)
        if os.getpid() != parent:
            os._exit(7)

    with pytest.raises(RuntimeError, match="exit code 7"):
        run_clusters(die_in_the_child, range(20), 2, GlobalMemory())
    assert not multiprocessing.active_children()


def test_processes_are_as_many_as_cores_when_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "num_cores", lambda: 5)
    assert num_processes(None, seconds_to_come=10.0) == 5
    assert num_processes(None, seconds_to_come=0.01) == 1
    assert num_processes(3, seconds_to_come=0.01) == 3
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert num_processes(3, seconds_to_come=10.0) == 1

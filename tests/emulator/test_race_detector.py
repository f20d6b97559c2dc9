"""Clocks, shadow cells and the cells of operands, without kernels; test_checker.py has those."""

import numpy as np
import pytest

from fa4.emulator.barriers import MBarrier
from fa4.emulator.errors import DataRace, MissingProxyFence, UnknownInstruction
from fa4.emulator.memory import SharedMemory
from fa4.emulator.operand_cells import operand_cells
from fa4.emulator.race_detector import Access, RaceDetector, Row, Shadow, TensorShadow
from fa4.emulator.tensor_core import MatrixDescriptor, Operand


def detector() -> tuple[RaceDetector, Shadow]:
    shared = SharedMemory.create(4096)
    races = RaceDetector([shared], warps=2)
    return races, races.shadows[id(shared.allocation)]


def test_access_conflicts_until_the_clock_has_reached_its_epoch():
    races, shadow = detector()
    writer, reader = races.actor("writer", False), races.actor("reader", False)
    races.write(shadow, slice(3, 9), Access(writer, 4, "a store", 10), races.clock())
    clock = races.clock()
    read = Access(reader, 1, "a load", 20)
    clock[Row.ORDERED, writer.index] = 3
    with pytest.raises(DataRace, match=r"byte 12 of shared.*a load by reader \(PTX line 20\)"):
        races.read(shadow, slice(0, 16), read, clock)
    races.read(shadow, slice(0, 3), read, clock)  # other cells
    clock[Row.ORDERED, writer.index] = 4
    races.read(shadow, slice(0, 16), read, clock)


def test_write_conflicts_with_every_reader_since_the_last_write():
    races, shadow = detector()
    actors = [races.actor(f"reader {number}", False) for number in range(3)]
    for actor in actors:
        races.read(shadow, slice(0, 4), Access(actor, 1, "a load", 1), races.clock())
    clock = races.clock()
    clock[Row.ORDERED, [actor.index for actor in actors[:2]]] = 1
    write = Access(actors[0], 2, "a store", 2)
    with pytest.raises(DataRace, match="after a load by reader 2"):
        races.write(shadow, slice(2, 3), write, clock)
    clock[Row.ORDERED, actors[2].index] = 1
    races.write(shadow, slice(2, 3), write, clock)
    # The write came after these reads, and whoever comes after it does too.
    clock = races.clock()
    clock[Row.ORDERED, actors[0].index] = 2
    races.write(shadow, slice(2, 3), Access(actors[1], 2, "a store", 3), clock)


def test_async_proxy_needs_a_fence_after_generic_writes_only():
    races, shadow = detector()
    warp, copies = races.actor("warp", False), races.actor("copies", True)
    races.write(shadow, slice(0, 4), Access(warp, 1, "a store", 1), races.clock())
    races.write(shadow, slice(4, 8), Access(copies, 1, "a TMA load", 2), races.clock())
    clock = races.clock()
    clock[Row.ORDERED] = 1
    product = Access(races.actor("wgmmas", True), 1, "a wgmma", 3)
    with pytest.raises(MissingProxyFence, match="byte 0 "):
        races.read(shadow, slice(0, 8), product, clock)
    races.read(shadow, slice(4, 8), product, clock)
    clock[Row.FENCED, warp.index] = 1
    races.read(shadow, slice(0, 8), product, clock)


def test_conflict_in_a_long_range_is_found_wherever_it_is():
    races, shadow = detector()
    actor = races.actor("writer", False)
    races.write(shadow, slice(700, 701), Access(actor, 1, "a store", 1), races.clock())
    with pytest.raises(DataRace, match="byte 2800 "):
        races.read(shadow, slice(0, 1024), Access(actor, 1, "a load", 2), races.clock())


def test_waiters_of_an_mbarrier_learn_of_complete_phases_only():
    races, _ = detector()
    warp = races.actor("warp", False)
    barrier = MBarrier(count=2)
    races.initialise(barrier, 0, Access(warp, 0, "mbarrier.init", 1))
    clock = races.clock()
    state = races.barrier(barrier, clock, Row.ORDERED, "a test")
    state.pending[Row.ORDERED, warp.index] = 5
    barrier.arrive()
    state = races.barrier(barrier, clock, Row.ORDERED, "a test")
    assert state.completed[Row.ORDERED, warp.index] == 0
    barrier.arrive()
    state = races.barrier(barrier, clock, Row.ORDERED, "a test")
    assert state.completed[Row.ORDERED, warp.index] == 5
    assert not state.pending.any()


def test_more_mbarriers_than_the_clocks_have_room_for_are_refused():
    races, _ = detector()
    for number in range(races.clock().shape[1]):
        races.actor(f"loads of {number}", True)
    with pytest.raises(UnknownInstruction, match="at most 256 mbarriers"):
        races.actor("loads of one more", True)


def test_cells_of_tensor_memory_are_columns_of_sixteen_lanes():
    shadow = TensorShadow("tensor memory")
    shadow.writes[shadow.block(8, 4)] = 1
    assert shadow.writes.sum() == 8 * 4
    shadow.writes[shadow.block(100, 2, slice(32, 64))] = 2
    assert np.argwhere(shadow.writes == 2).tolist() == [[2, 100], [2, 101], [3, 100], [3, 101]]
    shadow.writes[shadow.block(200, 1, slice(16, 128, 2))] = 3
    assert np.argwhere(shadow.writes == 3)[:, 0].tolist() == [1, 3, 5, 7]
    assert shadow.describe(3 * 512 + 101) == "lane 48, column 101 of tensor memory"


@pytest.mark.parametrize("start", [1024, 2048 + 32])
@pytest.mark.parametrize("rows", [8, 64])
def test_cells_of_a_swizzled_operand_are_those_of_its_elements(start, rows):
    step = MatrixDescriptor(start, leading_offset=16, stride_offset=1024, swizzle=128)
    row, column = np.ogrid[:rows, : Operand.BF16.k]
    address = start + row % 8 * 128 + row // 8 * 1024 + 2 * column
    address = address ^ (address >> 7 & 7) << 4
    shadow = Shadow("shared memory", 16384)
    cells = operand_cells(shadow, [step], rows, False, Operand.BF16)
    assert np.arange(4096)[cells].tolist() == np.unique(address // 4).tolist()


def test_cells_of_a_whole_operand_are_one_range():
    steps = [MatrixDescriptor(3072 + 32 * k, 16, 1024, 128) for k in range(4)]
    shadow = Shadow("shared memory", 65536)
    assert operand_cells(shadow, steps, 128, False, Operand.BF16) == slice(768, 768 + 4096)

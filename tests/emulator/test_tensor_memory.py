"""Tensor memory: allocation, what may be read, and which lanes and columns registers hold."""

import numpy as np
import pytest

from fa4.emulator.errors import Misaligned, OutOfBounds, UnwrittenRead
from fa4.emulator.tensor_memory import (
    SHAPES,
    RegisterAccess,
    TensorMemory,
    TensorMemoryMisuse,
    load_registers,
    registers_of,
    store_registers,
)


@pytest.fixture
def memory() -> TensorMemory:
    memory = TensorMemory()
    assert memory.allocate(128) == 0
    return memory


# -- allocation ------------------------------------------------------------------------------------


def test_allocations_do_not_overlap_and_fill_gaps() -> None:
    memory = TensorMemory()
    starts = [memory.allocate(columns) for columns in (128, 32, 256)]
    assert starts == [0, 128, 160]
    memory.deallocate(0, 128)
    assert memory.allocate(64) == 0
    assert memory.allocate(128) is None
    assert not memory.has_room(128)
    assert memory.has_room(64)


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_sizes_are_powers_of_two_from_32_to_512(columns: int) -> None:
    with pytest.raises(TensorMemoryMisuse, match=f"names {columns} columns"):
        TensorMemory().allocate(columns)


def test_allocation_after_the_permit_was_given_up_is_an_error(memory: TensorMemory) -> None:
    memory.relinquish_permit()
    with pytest.raises(TensorMemoryMisuse, match=r"after tcgen05\.relinquish_alloc_permit"):
        memory.allocate(32)
    memory.deallocate(0, 128)


@pytest.mark.parametrize(("address", "columns"), [(0, 64), (32, 128), (1 << 16, 128)])
def test_only_a_whole_allocation_can_be_given_back(
    memory: TensorMemory, address: int, columns: int
) -> None:
    with pytest.raises(TensorMemoryMisuse, match="128 columns at 0"):
        memory.deallocate(address, columns)


def test_what_is_left_at_the_end_is_an_error(memory: TensorMemory) -> None:
    with pytest.raises(TensorMemoryMisuse, match=r"not given back .* 128 columns at 0"):
        memory.require_freed()
    memory.deallocate(0, 128)
    memory.require_freed()


# -- access ----------------------------------------------------------------------------------------


def test_access_beyond_an_allocation_is_an_error(memory: TensorMemory) -> None:
    with pytest.raises(OutOfBounds, match="columns 124 to 132"):
        load_registers(memory, 124, 0, RegisterAccess("32x32b", 8), "tcgen05.ld")
    with pytest.raises(OutOfBounds, match="allocations: none"):
        TensorMemory().read(0, 1, slice(0, 32), "tcgen05.ld")


def test_read_of_what_nothing_wrote_names_lane_and_column(memory: TensorMemory) -> None:
    store_registers(
        memory, 4, 1, RegisterAccess("32x32b", 2), np.zeros((2, 32), np.uint32), "tcgen05.st"
    )
    load_registers(memory, 4, 1, RegisterAccess("32x32b", 2), "tcgen05.ld")
    with pytest.raises(UnwrittenRead, match="lane 32, column 6"):
        load_registers(memory, 4, 1, RegisterAccess("32x32b", 4), "tcgen05.ld")
    with pytest.raises(UnwrittenRead, match="lane 0, column 4"):
        load_registers(memory, 4, 0, RegisterAccess("32x32b", 2), "tcgen05.ld")


def test_a_new_allocation_holds_nothing(memory: TensorMemory) -> None:
    store_registers(
        memory, 0, 0, RegisterAccess("32x32b", 1), np.zeros((1, 32), np.uint32), "tcgen05.st"
    )
    memory.deallocate(0, 128)
    memory.allocate(128)
    with pytest.raises(UnwrittenRead):
        load_registers(memory, 0, 0, RegisterAccess("32x32b", 1), "tcgen05.ld")


def test_unwritten_words_are_poison_where_reads_are_not_checked() -> None:
    memory = TensorMemory(check_unwritten=False)
    memory.allocate(32)
    words = load_registers(memory, 0, 0, RegisterAccess("32x32b", 1), "tcgen05.ld")
    assert np.isnan(words.view(np.float32)).all()


@pytest.mark.parametrize(("warp", "lane"), [(0, 32), (1, 64), (5, 0 + 16), (2, 65)])
def test_a_warp_reaches_its_quarter_only(memory: TensorMemory, warp: int, lane: int) -> None:
    with pytest.raises(Misaligned, match=f"warp {warp} names lane {lane}"):
        load_registers(memory, lane << 16, warp, RegisterAccess("32x32b", 1), "tcgen05.ld")


@pytest.mark.parametrize("lane", [0, 64])
def test_the_quarter_may_be_named_or_not(memory: TensorMemory, lane: int) -> None:
    values = np.arange(32, dtype=np.uint32).reshape(1, 32)
    store_registers(memory, lane << 16 | 7, 6, RegisterAccess("32x32b", 1), values, "tcgen05.st")
    assert np.array_equal(memory.words[7, 64:96], values[0])


# -- registers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "16x32bx2"])
@pytest.mark.parametrize("repeat", [1, 4])
def test_a_load_returns_what_a_store_of_the_shape_wrote(
    memory: TensorMemory, shape: str, repeat: int
) -> None:
    values = np.arange(registers_of(shape, repeat) * 32, dtype=np.uint32).reshape(-1, 32)
    access = RegisterAccess(shape, repeat)
    store_registers(memory, 3, 2, access, values, "tcgen05.st")
    assert np.array_equal(load_registers(memory, 3, 2, access, "tcgen05.ld"), values)


def test_16x256b_holds_rows_as_an_accumulator_of_mma_does(memory: TensorMemory) -> None:
    memory.words[:16, :128] = np.arange(16)[:, None] + 100 * np.arange(128)
    assert memory.written is not None
    memory.written[:16] = True
    words = load_registers(memory, 16 << 16, 0, RegisterAccess("16x256b", 2), "tcgen05.ld")
    assert words[:, 5].tolist() == [  # thread 5: lanes 17 and 25, columns 2, 3 and 10, 11
        1702,
        1703,
        2502,
        2503,
        1710,
        1711,
        2510,
        2511,
    ]

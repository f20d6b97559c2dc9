"""tcgen05.cp: which row goes to which lanes, and what becomes of narrow elements."""

import numpy as np
import pytest

from fa4.emulator.errors import OutOfBounds, UnwrittenRead
from fa4.emulator.memory import SharedMemory
from fa4.emulator.tensor_copy import SHAPES, copy_rows
from fa4.emulator.tensor_memory import TensorMemory

VERSION = 1 << 46
START = 2048


@pytest.fixture
def shared() -> SharedMemory:
    shared = SharedMemory.create(32 * 1024)
    shared.bytes[:] = np.random.default_rng(0).integers(0, 256, shared.size)
    shared.mark_written(0, shared.size)
    return shared


@pytest.fixture
def memory() -> TensorMemory:
    memory = TensorMemory()
    memory.allocate(64)
    return memory


def descriptor(leading: int, stride: int, swizzle: int) -> int:
    return START >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | VERSION | swizzle << 61


def lanes_of(name: str, row: int) -> list[int]:
    if name == "4x256b":
        return [32 * row]
    if name == "64x128b.warpx2::02_13":  # warps 0 and 2 hold the first 32 rows
        return [row, row + 64]
    if name == "64x128b.warpx2::01_23":  # warps 0 and 1 do
        return [row, row + 32] if row < 32 else [row + 32, row + 64]
    if name == "32x128b.warpx4":
        return [row, row + 32, row + 64, row + 96]
    return [row]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("swizzle", [0, 2])
def test_rows_go_to_their_lanes(
    shared: SharedMemory, memory: TensorMemory, name: str, swizzle: int
) -> None:
    shape = SHAPES[name]
    leading, stride = (4096, 128) if swizzle == 0 else (0, 1024)
    copy_rows(shared, descriptor(leading, stride, swizzle), memory, 5, shape, None)
    written = np.zeros(128, np.bool_)
    for row in range(shape.rows):
        raw = []
        for chunk in range(shape.chunks):
            if swizzle:
                place = START + row % 8 * 128 + row // 8 * stride + 16 * chunk
                place ^= place >> 3 & 0x70
            else:
                place = START + row % 8 * 16 + row // 8 * stride + chunk * leading
            raw.append(shared.bytes[place : place + 16])
        for lane in lanes_of(name, row):
            found = memory.words[5 : 5 + shape.columns, lane].copy().view(np.uint8)
            assert np.array_equal(found, np.concatenate(raw)), (row, lane)
            written[lane] = True
    assert memory.written is not None
    assert np.array_equal(memory.written[5], written)
    assert not memory.written[5 + shape.columns].any()


@pytest.mark.parametrize(("name", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_narrow_elements_become_bytes(
    shared: SharedMemory, memory: TensorMemory, name: str, bits: int, shift: int
) -> None:
    copy_rows(shared, descriptor(4096, 128, 0), memory, 0, SHAPES["128x256b"], name)
    for row, chunk in [(0, 0), (9, 1), (127, 1)]:
        place = START + row % 8 * 16 + row // 8 * 128 + chunk * 4096
        number = int.from_bytes(shared.bytes[place : place + 16].tobytes(), "little")
        codes = [(number >> bits * i & (1 << bits) - 1) << shift for i in range(16)]
        found = memory.words[4 * chunk : 4 * chunk + 4, row].copy().view(np.uint8)
        assert found.tolist() == codes, (row, chunk)


def test_a_copy_behind_a_lane(shared: SharedMemory, memory: TensorMemory) -> None:
    copy_rows(shared, descriptor(4096, 128, 0), memory, 28 << 16, SHAPES["4x256b"], None)
    assert memory.written is not None
    assert np.flatnonzero(memory.written[0]).tolist() == [28, 60, 92, 124]
    with pytest.raises(OutOfBounds, match="reaches lane 128"):
        copy_rows(shared, descriptor(4096, 128, 0), memory, 32 << 16, SHAPES["4x256b"], None)


def test_faults(memory: TensorMemory) -> None:
    empty = SharedMemory.create(8192)
    with pytest.raises(UnwrittenRead, match=r"tcgen05\.cp reads byte 2048"):
        copy_rows(empty, descriptor(4096, 128, 0), memory, 0, SHAPES["32x128b.warpx4"], None)
    empty.mark_written(0, empty.size)
    with pytest.raises(OutOfBounds, match="columns 62 to 66"):
        copy_rows(empty, descriptor(4096, 128, 0), memory, 62, SHAPES["32x128b.warpx4"], None)

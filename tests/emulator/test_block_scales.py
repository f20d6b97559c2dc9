"""Scale factors in tensor memory, against the formula."""

import numpy as np
import pytest

from fa4.emulator.block_scales import ScaleCopiesDiffer, read_scales, scaled
from fa4.emulator.errors import UnknownInstruction, UnwrittenRead
from fa4.emulator.mma_descriptor_sm100 import Scaling
from fa4.emulator.tensor_memory import TensorMemory

WHAT = "Scale factors of A"


@pytest.fixture
def memory() -> TensorMemory:
    memory = TensorMemory()
    memory.allocate(64)
    words = np.random.default_rng(0).integers(0x70707070, 0x90909090, (64, 32), np.uint32)
    memory.write(0, slice(0, 128), np.tile(words, (1, 4)), "test")
    return memory


@pytest.mark.parametrize(("vectors", "first"), [(1, 0), (1, 3), (2, 2), (4, 0)])
@pytest.mark.parametrize("rows", [128, 256, 24])
def test_scales_are_bytes_of_the_words_of_their_rows(
    memory: TensorMemory, vectors: int, first: int, rows: int
) -> None:
    found = read_scales(memory, 5, first, rows, 1, Scaling(vectors, True), WHAT)
    assert found.shape == (rows, vectors)
    for row in (0, 7, rows - 1):
        word = int(memory.words[5 + row // 32, row % 32])
        for vector in range(vectors):
            code = word >> 8 * (first + vector) & 0xFF
            assert found[row, vector] == 2.0 ** (code - 127), (row, vector)


def test_halves_of_b_lie_in_halves_of_the_lanes(memory: TensorMemory) -> None:
    memory.words[:2, 64:] += 1
    found = read_scales(memory, 0, 0, 128, 2, Scaling(1, True), WHAT)[:, 0]
    assert found[64 + 3] == 2 * found[3]
    assert found[64 + 32 + 3] == 2 * found[32 + 3]


def test_bits_30_and_31_of_an_address_do_not_count(memory: TensorMemory) -> None:
    plain, marked = (
        read_scales(memory, address, 2, 128, 1, Scaling(1, True), WHAT)
        for address in (9, 9 | 2 << 30)
    )
    np.testing.assert_array_equal(plain, marked)
    with pytest.raises(UnknownInstruction, match="start at lane 32"):
        read_scales(memory, 32 << 16, 0, 128, 1, Scaling(1, True), WHAT)


def test_copies_that_differ_are_an_error(memory: TensorMemory) -> None:
    memory.words[0, 64 + 5] += 1
    with pytest.raises(ScaleCopiesDiffer, match="column 0"):
        read_scales(memory, 0, 0, 128, 1, Scaling(4, True), WHAT)
    read_scales(memory, 0, 1, 128, 1, Scaling(1, True), WHAT)  # another byte


def test_a_quarter_that_nothing_wrote_is_an_error() -> None:
    memory = TensorMemory()
    memory.allocate(32)
    memory.write(0, slice(0, 32), np.zeros((4, 32), np.uint32), "test")
    with pytest.raises(UnwrittenRead, match="lane 32, column 0"):
        read_scales(memory, 0, 0, 128, 1, Scaling(1, True), WHAT)


def test_ue4m3_and_nan() -> None:
    memory = TensorMemory()
    memory.allocate(32)
    memory.write(0, slice(0, 128), np.full((1, 128), 0x7F_78_38_01, np.uint32), "test")
    found = read_scales(memory, 0, 0, 32, 1, Scaling(4, False), WHAT)
    np.testing.assert_array_equal(found[0], [2.0**-9, 1.0, 256.0, np.nan])


def test_each_block_of_k_has_its_factor() -> None:
    operand = np.ones((2, 8), np.float32)
    found = scaled(operand, np.array([[1.0, 2.0], [4.0, 2.0**127]]))
    assert found[0].tolist() == [1] * 4 + [2] * 4
    assert found[1].tolist() == [4] * 4 + [2.0**127] * 4

"""Descriptors, operands and accumulators of tcgen05.mma, against the formulas and NumPy.

That the formulas are hardware's is the business of test_blackwell_gemm.py, where CuTe's layouts
decide where things lie.
"""

import numpy as np
import pytest

from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction, UnwrittenRead
from fa4.emulator.float_formats import f32_to_bf16
from fa4.emulator.memory import SharedMemory
from fa4.emulator.mma_descriptor_sm100 import MmaShape, decode_shape
from fa4.emulator.tensor_core import Operand
from fa4.emulator.tensor_core_sm100 import (
    add_product,
    decode_descriptor,
    gather,
    gather_from_tensor_memory,
)
from fa4.emulator.tensor_memory import TensorMemory

VERSION = 1 << 46
BF16 = 1 << 4 | 1 << 7 | 1 << 10  # D f32, A and B bf16


def shape_bits(m: int, n: int, types: int = BF16) -> int:
    return types | n // 8 << 17 | m // 16 << 24


# -- descriptors -----------------------------------------------------------------------------------


def test_matrix_descriptor_is_decoded() -> None:
    found = decode_descriptor(0x123 | 5 << 16 | 64 << 32 | VERSION | 2 << 61)
    assert (found.start, found.leading_offset, found.stride_offset, found.swizzle) == (
        0x1230,
        80,
        1024,
        128,
    )


@pytest.mark.parametrize(
    ("bits", "error"),
    [
        (0, InvalidDescriptor),  # the version of sm_90
        (VERSION | 1 << 49, UnknownInstruction),
        (VERSION | 1 << 52, UnknownInstruction),
        (VERSION | 3 << 61, UnknownInstruction),
    ],
)
def test_other_matrix_descriptors_are_refused(bits: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="Matrix descriptor"):
        decode_descriptor(bits)


# -- operands --------------------------------------------------------------------------------------


def test_mn_major_tf32_has_atoms_of_32_bytes() -> None:
    """Rows of 128 bytes, four of k in an atom, bits 5 and 6 of an address XORed with bits 7, 8."""
    shared = SharedMemory.create(32 * 1024)
    values = np.arange(shared.size // 4, dtype=np.float32)  # exact in tf32 where it is looked at
    shared.bytes[:] = values.view(np.uint8)
    shared.mark_written(0, shared.size)
    rows, start, leading, stride = 64, 2048, 4096, 512
    bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | VERSION | 1 << 61
    found = gather(shared, [bits], rows, True, Operand.TF32, "A")
    for i, j in [(0, 0), (5, 0), (9, 3), (31, 4), (33, 7), (63, 5)]:
        place = start + i % 32 * 4 + i // 32 * leading + j % 4 * 128 + j // 4 * stride
        place ^= place >> 2 & 0x60
        raw = shared.bytes[place : place + 4]
        assert found[i, j] == Operand.TF32.to_f32(raw)[0], (i, j)
    with pytest.raises(InvalidDescriptor, match="atoms have 32 bytes"):
        gather(shared, [bits], rows, True, Operand.BF16, "A")
    with pytest.raises(InvalidDescriptor, match="32-bit elements need 32"):
        gather(shared, [bits & ~(7 << 61) | 2 << 61], rows, True, Operand.TF32, "A")


@pytest.mark.parametrize("nbytes", [1, 2])
def test_operands_are_gathered_by_the_formula(nbytes: int) -> None:
    """MN major with a swizzle of 64 bytes; K major is as for wgmma (test_tensor_core.py)."""
    shared = SharedMemory.create(32 * 1024)
    rng = np.random.default_rng(0)
    shared.bytes[:] = rng.integers(0, 60, shared.size)
    shared.mark_written(0, shared.size)
    operand = {1: Operand.E4M3, 2: Operand.F16}[nbytes]
    rows, start, leading, stride, width = 64, 2048, 4096, 512, 64
    bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | VERSION | 4 << 61
    found = gather(shared, [bits], rows, True, operand, "A")
    assert found.shape == (rows, 32 // nbytes)
    per_row = width // nbytes
    for i, j in [(0, 0), (1, 0), (9, 3), (31, 15), (33, 7), (63, 11)]:
        place = start + i % per_row * nbytes + i // per_row * leading
        place += j % 8 * width + j // 8 * stride
        place ^= place >> 3 & 0x30  # bits 7 and 8 into 4 and 5
        raw = shared.bytes[place : place + nbytes]
        assert found[i, j] == operand.to_f32(raw)[0], (i, j)


def test_an_unwritten_operand_is_an_error() -> None:
    shared = SharedMemory.create(4096)
    shared.mark_written(0, 2048 - 16)
    bits = 1024 >> 4 << 16 | 128 >> 4 << 32 | VERSION
    with pytest.raises(UnwrittenRead, match="byte 2032"):
        gather(shared, [bits], 64, False, Operand.F16, "A")


@pytest.fixture
def memory() -> TensorMemory:
    memory = TensorMemory()
    memory.allocate(256)
    return memory


def test_a_row_of_a_in_tensor_memory_is_a_lane(memory: TensorMemory) -> None:
    values = np.arange(128 * 32).reshape(128, 32) % 251  # exact in bf16
    words = f32_to_bf16(values.astype(np.float32)).view(np.uint32)  # (128, 16)
    memory.write(40, slice(0, 128), words.T, "test")
    found = gather_from_tensor_memory(memory, [40, 48], slice(0, 128), Operand.BF16, "A")
    assert np.array_equal(found, values)


# -- accumulators ----------------------------------------------------------------------------------


def product(shape: MmaShape, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small whole numbers: A of one CTA, B, and A B^T."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-4, 5, (shape.rows, 16)).astype(np.float32)
    b = rng.integers(-4, 5, (shape.n, 16)).astype(np.float32)
    return a, b, shape.a_sign * shape.b_sign * a @ b.T


def test_accumulator_of_128_rows(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64) | 1 << 13, "f16", 1)  # A negated
    a, b, exact = product(shape)
    add_product(memory, 16, shape, a, b, adds=False)
    add_product(memory, 16, shape, a, b, adds=True)
    assert np.array_equal(memory.words[16:80].view(np.float32).T, 2 * exact)


@pytest.mark.parametrize("first", [0, 16])
def test_accumulator_of_64_rows(memory: TensorMemory, first: int) -> None:
    shape = decode_shape(shape_bits(64, 64), "f16", 1)
    a, b, exact = product(shape)
    add_product(memory, first << 16, shape, a, b, adds=False)
    for row in (0, 15, 16, 40, 63):
        lane = 32 * (row // 16) + row % 16 + first
        assert np.array_equal(memory.words[:64, lane].view(np.float32), exact[row]), row
    assert memory.written is not None
    assert memory.written.sum() == 64 * 64


def test_accumulator_of_64_rows_of_a_pair(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64), "f16", 2)
    a, b, exact = product(shape)
    add_product(memory, 0, shape, a, b, adds=False)
    stored = memory.words[:32].view(np.float32)
    assert np.array_equal(stored[:, :64].T, exact[:, :32])
    assert np.array_equal(stored[:, 64:].T, exact[:, 32:])


def test_adding_to_what_nothing_wrote_is_an_error(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64), "f16", 1)
    a, b, _ = product(shape)
    with pytest.raises(UnwrittenRead, match="of D"):
        add_product(memory, 0, shape, a, b, adds=True)


def test_other_lanes_of_an_accumulator_are_refused(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64), "f16", 1)
    a, b, _ = product(shape)
    with pytest.raises(UnknownInstruction, match="starts at lane 16"):
        add_product(memory, 16 << 16, shape, a, b, adds=False)


def test_stationary_accumulators_have_columns_in_parts_of_the_lanes(memory: TensorMemory) -> None:
    for m, parts in ((64, 2), (32, 4)):
        shape = decode_shape(shape_bits(m, 64), "f16", 1, is_ws=True)
        a, b, exact = product(shape)
        add_product(memory, 0, shape, a, b, adds=False)
        columns = 64 // parts
        stored = memory.words[:columns].view(np.float32)
        for part in range(parts):
            lanes = slice(part * m, (part + 1) * m)
            wanted = exact[:, part * columns : (part + 1) * columns]
            assert np.array_equal(stored[:, lanes].T, wanted), (m, part)


def test_parts_of_the_lanes_have_their_own_copies_of_a(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64), "f16", 2)
    a, b, _ = product(shape)
    add_product(memory, 0, shape, np.concatenate((a, 2 * a)), b, adds=False)
    stored = memory.words[:32].view(np.float32)
    assert np.array_equal(stored[:, :64].T, a @ b[:32].T)
    assert np.array_equal(stored[:, 64:].T, 2 * a @ b[32:].T)


def test_half_accumulators_take_the_lower_half_of_words(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64, 0), "f16", 1)  # D, A and B fp16
    a, b, exact = product(shape)
    add_product(memory, 0, shape, a, b, adds=False)
    add_product(memory, 0, shape, a, b, adds=True)
    halves = memory.words[:64].astype(np.uint16).view(np.float16)
    assert np.array_equal(halves.T, 2 * exact)


@pytest.mark.parametrize("saturates", [False, True])
def test_integer_sums_wrap_around_or_saturate(memory: TensorMemory, saturates: bool) -> None:
    bits = shape_bits(128, 16, 2 << 4 | 1 << 7 | 1 << 10 | saturates << 3)
    shape = decode_shape(bits, "i8", 1)
    limit = np.int32(2**31 - 5)
    memory.write(0, slice(0, 128), np.full((16, 128), limit, np.int32).view(np.uint32), "test")
    a, b = np.zeros((128, 32), np.float32), np.zeros((16, 32), np.float32)
    a[:, 0], b[:, 0] = 100, 1
    add_product(memory, 0, shape, a, b, adds=True)
    expected = 2**31 - 1 if saturates else 2**31 - 5 + 100 - 2**32
    assert (memory.words[:16].view(np.int32) == expected).all()


@pytest.mark.parametrize("accumulator", [0, 1])
def test_an_accumulator_can_be_scaled_before_it_is_added_to(
    memory: TensorMemory, accumulator: int
) -> None:
    shape = decode_shape(shape_bits(128, 64, accumulator << 4), "f16", 1)
    a, b, exact = product(shape)
    add_product(memory, 0, shape, a, b, adds=False)
    add_product(memory, 0, shape, a, b, adds=True, scale_exponent=3)
    words = memory.words[:64]
    found = words.view(np.float32) if accumulator else words.astype(np.uint16).view(np.float16)
    assert np.array_equal(found.T, exact + exact / 8)


def test_lanes_can_be_kept(memory: TensorMemory) -> None:
    shape = decode_shape(shape_bits(128, 64), "f16", 1)
    a, b, exact = product(shape)
    add_product(memory, 0, shape, a, b, adds=False)
    kept = np.arange(128) % 3 == 0
    add_product(memory, 0, shape, a, b, adds=True, kept=kept)
    factor = np.where(kept, 1, 2)[:, None]
    assert np.array_equal(memory.words[:64].view(np.float32).T, factor * exact)

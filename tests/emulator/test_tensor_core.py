"""wgmma operands, accumulators and products against rules written an element at a time."""

import numpy as np
import pytest

from fa4.emulator.errors import (
    InvalidDescriptor,
    OutOfBounds,
    UnknownInstruction,
    UnwrittenRead,
)
from fa4.emulator.memory import GlobalMemory, SharedMemory
from fa4.emulator.operand_cells import operand_cells
from fa4.emulator.race_detector import Shadow
from fa4.emulator.tensor_core import (
    Operand,
    a_from_registers,
    decode_descriptor,
    from_registers,
    gather_a,
    gather_b,
    to_registers,
)
from fa4.emulator.tensor_map import ElementType, TensorMap, load_tile

SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(start, leading, stride, swizzle):
    code = SWIZZLE_CODE[swizzle]
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | code << 62


def bf16_bits(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def small_integers(shape, seed=0):
    """Exact in bf16, fp16, tf32 and e5m2 (at most two significant bits there)."""
    return np.random.default_rng(seed).choice([-3.0, -2, -1, 0, 1, 2, 3, 4], shape).astype("f")


def shared_by_rule(matrix, address_of, size=1 << 16):
    """Shared memory with the bf16 elements (i, j) of a matrix at the given addresses."""
    shared = SharedMemory.create(size)
    bits = bf16_bits(matrix)
    for i, j in np.ndindex(*matrix.shape):
        address = address_of(i, j)
        shared.bytes[address : address + 2] = bits[i : i + 1, j].view(np.uint8)
        shared.mark_written(address, 2)
    return shared


def swizzled(address, width):
    return address ^ ((address >> 7) % (width // 16) << 4) if width else address


def test_descriptor_decodes_to_bytes():
    decoded = decode_descriptor(descriptor(0x2A400, 16, 1024, 64))
    assert (decoded.start, decoded.leading_offset) == (0x2A400, 16)
    assert (decoded.stride_offset, decoded.swizzle) == (1024, 64)
    with pytest.raises(UnknownInstruction, match="base offset 1"):
        decode_descriptor(1 << 49)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("start", [0, 1024, 2048 + 256, 32])
def test_k_major_operand(swizzle, start):
    matrix = small_integers((64, 16))
    leading, stride = (2048, 128) if swizzle == 0 else (0, 8 * swizzle + 512)

    def address_of(i, j):
        if swizzle == 0:
            return start + i % 8 * 16 + i // 8 * stride + j // 8 * leading + j % 8 * 2
        return swizzled(start + i % 8 * swizzle + i // 8 * stride + j * 2, swizzle)

    shared = shared_by_rule(matrix, address_of)
    bits = descriptor(start, leading, stride, swizzle)
    a = gather_a(shared, bits, major_mn=False, operand=Operand.BF16)
    assert (a == matrix).all()
    b = gather_b(shared, bits, 24, major_mn=False, operand=Operand.BF16)
    assert (b == matrix[:24]).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("start", [0, 1024, 4096 + 256])
def test_mn_major_operand(swizzle, start):
    matrix = small_integers((128, 16))
    if swizzle:
        leading, stride = 4096, 8 * swizzle
    else:
        leading, stride = 4096, 128

    def address_of(i, j):
        if swizzle == 0:
            return start + i % 8 * 2 + i // 8 * stride + j % 8 * 16 + j // 8 * leading
        across = swizzle // 2
        inside = i % across * 2 + i // across * leading
        return swizzled(start + inside + j % 8 * swizzle + j // 8 * stride, swizzle)

    shared = shared_by_rule(matrix, address_of)
    bits = descriptor(start, leading, stride, swizzle)
    b = gather_b(shared, bits, 128, major_mn=True, operand=Operand.BF16)
    assert (b == matrix).all()


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_k_steps_inside_an_atom_are_a_moved_start(swizzle):
    """What TMA wrote, wgmma reads: K major, every step of 16 along the head dimension."""
    columns = swizzle // 2
    matrix = small_integers((64, columns))
    memory, shared = GlobalMemory(), SharedMemory.create(16384)
    memory.register("q", 0x1000, bf16_bits(matrix).view(np.uint8).ravel())
    tensor_map = TensorMap(
        0x1000, ElementType.BF16, (columns, 64), (2, swizzle), (columns, 64), swizzle
    )
    load_tile(tensor_map, memory, shared, 1024, (0, 0))
    for step in range(columns // 16):
        bits = descriptor(1024, 16, 8 * swizzle, swizzle) + 2 * step
        a = gather_a(shared, bits, major_mn=False, operand=Operand.BF16)
        assert (a == matrix[:, 16 * step : 16 * step + 16]).all()
    steps = tuple(descriptor(1024, 16, 8 * swizzle, swizzle) + 2 * i for i in range(columns // 16))
    assert (gather_a(shared, steps, major_mn=False, operand=Operand.BF16) == matrix).all()


def test_steps_of_a_chain_may_have_several_layouts():
    """Whatever each step has alone, a chain has side by side, and its shadow cells together."""
    shared = SharedMemory.create(16384, check_unwritten=False)
    shared.bytes[:] = np.random.default_rng(0).integers(0, 0x7F, 16384, np.uint8)
    swizzled, plain = descriptor(0, 0, 512, 64), descriptor(8192, 0, 128, 0)
    steps = (swizzled, swizzled + 2, plain, swizzled)
    alone = [gather_a(shared, bits, major_mn=False, operand=Operand.BF16) for bits in steps]
    together = gather_a(shared, steps, major_mn=False, operand=Operand.BF16)
    assert (together == np.concatenate(alone, axis=1)).all()

    shadow = Shadow("shared", 16384, 16)

    def cells(each):
        decoded = [decode_descriptor(bits) for bits in each]
        return {*np.arange(1024)[operand_cells(shadow, decoded, 64, False, Operand.BF16)]}

    assert cells(steps) == set().union(*(cells([bits]) for bits in steps))


def test_values_are_read_transposed_from_two_tiles_of_64_columns():
    """V of the forward kernel: (keys 128, dim 128) as two TMA tiles, read dim by keys."""
    values = small_integers((128, 128))
    memory, shared = GlobalMemory(), SharedMemory.create(1024 + 32768)
    memory.register("v", 0x1000, bf16_bits(values).view(np.uint8).ravel())
    tensor_map = TensorMap(0x1000, ElementType.BF16, (128, 128), (2, 256), (64, 128), 128)
    for half in range(2):
        load_tile(tensor_map, memory, shared, 1024 + 16384 * half, (64 * half, 0))
    for step in range(8):
        bits = descriptor(1024 + 2048 * step, 16384, 1024, 128)
        b = gather_b(shared, bits, 128, major_mn=True, operand=Operand.BF16)
        assert (b == values[16 * step : 16 * step + 16].T).all()
    steps = tuple(descriptor(1024 + 2048 * step, 16384, 1024, 128) for step in range(8))
    assert (gather_b(shared, steps, 128, major_mn=True, operand=Operand.BF16) == values.T).all()


@pytest.mark.parametrize(
    ("operand", "encode"),
    [
        (Operand.F16, lambda x: x.astype(np.float16)),
        (Operand.TF32, lambda x: (x.view(np.uint32) | 0x1FFF).view(np.float32)),
        (Operand.E5M2, lambda x: (x.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)),
        (Operand.E4M3, lambda x: np.where(x == 0, 0, 0x38).astype(np.uint8)),
    ],
)
def test_operand_types(operand, encode):
    matrix = small_integers((64, operand.k))
    if operand == Operand.E4M3:
        matrix = (matrix > 0).astype(np.float32)  # 1.0 is 0x38
    if operand == Operand.TF32:
        matrix = np.abs(matrix) + 1  # low bits of a zero would make it a denormal number
    shared = SharedMemory.create(64 * 32)
    shared.chunks[:] = encode(matrix).view(np.uint8).reshape(-1).view(np.complex128)
    shared.mark_written(0, 64 * 32)
    # Rows of 32 bytes are the atom of the narrowest swizzle; undo it by swizzling the source.
    order = [swizzled(16 * i, 32) // 16 for i in range(128)]
    shared.chunks[order] = shared.chunks.copy()
    a = gather_a(shared, descriptor(0, 0, 256, 32), major_mn=False, operand=operand)
    assert a.shape == (64, operand.k)
    assert (a == matrix).all()


def test_operands_of_one_byte_cannot_be_mn_major():
    with pytest.raises(UnknownInstruction, match="MN-major operands of e4m3"):
        gather_b(SharedMemory.create(65536), 0, 64, major_mn=True, operand=Operand.E4M3)


def test_operand_outside_shared_memory_is_an_error():
    shared = SharedMemory.create(8192, check_unwritten=False)
    with pytest.raises(OutOfBounds, match="B of wgmma touches bytes"):
        gather_b(shared, descriptor(4096, 0, 1024, 128), 64, major_mn=False, operand=Operand.BF16)


def test_operand_that_nothing_wrote_is_an_error_naming_the_byte():
    shared = SharedMemory.create(8192)
    shared.mark_written(0, 8192)
    shared.written[1024 + 128 + 16 + 3] = False  # row 9: chunk 0 lies in place 1
    shared.written[64] = False  # row 0, columns 32 on: not of this step
    bits = descriptor(0, 0, 1024, 128)
    with pytest.raises(UnwrittenRead, match="A of wgmma reads byte 1171 "):
        gather_a(shared, bits, major_mn=False, operand=Operand.BF16)
    shared.written[1171] = True
    gather_a(shared, bits, major_mn=False, operand=Operand.BF16)


@pytest.mark.parametrize("n", [0, 4, 12, 264])
def test_columns_that_no_wgmma_has_are_an_error(n):
    with pytest.raises(InvalidDescriptor, match=f"N = {n}"):
        gather_b(SharedMemory.create(65536), 0, n, major_mn=False, operand=Operand.BF16)


@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
def test_accumulator_order(n):
    matrix = np.arange(64 * n, dtype=np.float32).reshape(64, n)
    registers = to_registers(matrix)
    assert registers.shape == (4, 32, n // 2)
    for warp, lane, register in [(0, 0, 0), (1, 5, 1), (2, 31, 2), (3, 18, n // 2 - 1)]:
        row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
        column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
        assert registers[warp, lane, register] == matrix[row, column]
    assert registers[0, :, 0].flags.c_contiguous
    assert (from_registers(registers) == matrix).all()


@pytest.mark.parametrize("operand", [Operand.BF16, Operand.E5M2, Operand.TF32])
def test_a_from_registers(operand):
    """Each register holds 4 bytes of one row: 2 elements of 16 bits, 4 of 8, 1 of 32."""
    registers = np.random.default_rng(0).integers(0, 1 << 32, (4, 32, 4), dtype=np.uint32)
    words = np.zeros((64, 8), np.uint32)
    for warp, lane, register in np.ndindex(4, 32, 4):
        row = 16 * warp + lane // 4 + 8 * (register % 2)
        words[row, lane % 4 + 4 * (register // 2)] = registers[warp, lane, register]
    a = a_from_registers(registers, operand)
    assert a.shape == (64, operand.k)
    assert np.array_equal(a, operand.to_f32(words.view(np.uint8)), equal_nan=True)


def test_steps_of_one_warp_from_registers():
    """Registers of two steps of warp 2 alone give its 16 rows of both, side by side."""
    registers = np.random.default_rng(0).integers(0, 1 << 32, (4, 32, 8), dtype=np.uint32)
    both = a_from_registers(registers[2:3], Operand.E5M2)
    for step in range(2):
        whole = a_from_registers(registers[:, :, 4 * step : 4 * step + 4], Operand.E5M2)
        columns = slice(32 * step, 32 * step + 32)
        assert np.array_equal(both[:, columns], whole[32:48], equal_nan=True)


def test_accumulator_rows_of_one_warp_are_its_registers():
    matrix = np.arange(64 * 24, dtype=np.float32).reshape(64, 24)
    own = to_registers(matrix[48:])
    assert own.shape == (1, 32, 12)
    assert (own[0] == to_registers(matrix)[3]).all()
    assert (from_registers(own) == matrix[48:]).all()


def test_probabilities_in_accumulator_order_are_the_next_a_operand():
    """The forward kernel packs neighbouring scores and multiplies by V without a shuffle."""
    scores = small_integers((64, 16))
    registers = bf16_bits(np.ascontiguousarray(to_registers(scores))).astype(np.uint32)
    packed = registers[:, :, 0::2] | registers[:, :, 1::2] << 16
    assert (a_from_registers(packed, Operand.BF16) == scores).all()

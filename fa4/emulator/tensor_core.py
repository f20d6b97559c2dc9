"""Tensor cores of sm_90: operands of `wgmma` from shared memory or registers, and its accumulator.

A wgmma computes D[64, n] += A[64, k] B[n, k]^T for the four warps of a warpgroup, with rows of
k = 32 bytes. Operands are gathered as float32, in 16-byte chunks, with index arrays that are kept:
they depend on the descriptor up to a multiple of 1024 bytes only.

Matrix descriptor (64 bits)
    0-13   start address / 16
    16-29  leading offset LO / 16
    32-45  stride offset SO / 16
    49-51  base offset; must be 0 here
    62-63  swizzle: none 0, 128 bytes 1, 64 bytes 2, 32 bytes 3

Where element (row i, k j) of e bytes lies after the start, before the swizzle of W bytes:
    K major, swizzled     (i mod 8) W + (i div 8) SO + j e
    K major, plain        (i mod 8) 16 + (i div 8) SO + (j e div 16) LO + (j e mod 16)
    MN major, swizzled    (i mod W/e) e + (i div W/e) LO + (j mod 8) W + (j div 8) SO
    MN major, plain       (i mod 8) e + (i div 8) SO + (j mod 8) 16 + (j div 8) LO

Registers of lane t of warp w (4 warps of 32 lanes)
    D  register r is row 16 w + t div 4 + 8 (r div 2 mod 2),
       column 8 (r div 4) + 2 (t mod 4) + r mod 2
    A  register r holds 4 bytes of row 16 w + t div 4 + 8 (r mod 2): word t mod 4 + 4 (r div 2)

How products are summed is in tensor_core_sums.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fa4.emulator import float_formats
from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction
from fa4.emulator.memory import Bytes, SharedMemory, unwritten
from fa4.emulator.swizzle import CHUNK, PERIOD, swizzled_chunks

Float32s = NDArray[np.float32]

WARPS = 4
LANES = 32
ROWS = 64  # M of every wgmma
WARP_ROWS = ROWS // WARPS
ROW_BYTES = 32  # of K of every wgmma
MAX_COLUMNS = 256
_SWIZZLE_WIDTH = (0, 128, 64, 32)


class Operand(Enum):
    """Element types of A and B, named as in the instruction.

    Elements of fewer than 8 bits take a byte each in shared memory, in padded blocks of 16; but
    those of E2M1_PAIRS are two a byte. See float_formats.py.
    """

    F16 = "f16"
    BF16 = "bf16"
    TF32 = "tf32"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M3 = "e2m3"
    E3M2 = "e3m2"
    E2M1 = "e2m1"
    E2M1_PAIRS = "e2m1 in pairs"
    S8 = "s8"
    U8 = "u8"

    @property
    def nbytes(self) -> int:
        """Of an element; of a pair of E2M1_PAIRS."""
        return _FORMATS[self][0].itemsize

    @property
    def k(self) -> int:
        """K of one instruction."""
        elements = 2 if self is Operand.E2M1_PAIRS else 1
        return elements * ROW_BYTES // self.nbytes

    def to_f32(self, raw: Bytes) -> Float32s:
        """Values of bytes (..., rows, bytes) of shared memory, as (..., rows, elements)."""
        dtype, convert = _FORMATS[self]
        return convert(raw.view(dtype))

    def from_tensor_memory(self, raw: Bytes) -> Float32s:
        """The same of tensor memory, where no type is padded."""
        table = _BYTE_TABLES.get(self)
        return self.to_f32(raw) if table is None else table[raw]


_FORMATS: dict[Operand, tuple[np.dtype, Callable[[NDArray], Float32s]]] = {
    Operand.F16: (np.dtype(np.float16), lambda values: values.astype(np.float32)),
    Operand.BF16: (np.dtype(np.uint16), float_formats.bf16_to_f32),
    Operand.TF32: (np.dtype(np.float32), float_formats.truncate_to_tf32),
    Operand.E4M3: (np.dtype(np.uint8), float_formats.e4m3_to_f32),
    Operand.E5M2: (np.dtype(np.uint8), float_formats.e5m2_to_f32),
    Operand.E2M3: (
        np.dtype(np.uint8),
        lambda raw: float_formats.E2M3[float_formats.padded_sextets(raw)],
    ),
    Operand.E3M2: (
        np.dtype(np.uint8),
        lambda raw: float_formats.E3M2[float_formats.padded_sextets(raw)],
    ),
    Operand.E2M1: (
        np.dtype(np.uint8),
        lambda raw: float_formats.E2M1[float_formats.padded_nibbles(raw)],
    ),
    Operand.E2M1_PAIRS: (
        np.dtype(np.uint8),
        lambda raw: float_formats.E2M1[float_formats.nibbles(raw)],
    ),
    Operand.S8: (np.dtype(np.int8), lambda values: values.astype(np.float32)),
    Operand.U8: (np.dtype(np.uint8), lambda values: values.astype(np.float32)),
}
# Of elements of fewer than 8 bits, a byte each; the unused bits are not looked at.
_BYTE_TABLES: dict[Operand, Float32s] = {
    Operand.E2M3: np.tile(float_formats.E2M3, 4),
    Operand.E3M2: np.tile(float_formats.E3M2, 4),
    Operand.E2M1: np.tile(np.repeat(float_formats.E2M1, 4), 4),
}


@dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded matrix descriptor; everything in bytes.

    start           of the operand in the CTA's shared memory
    leading_offset  LO above
    stride_offset   SO above
    swizzle         W above; 0 is none
    atom            that the swizzle keeps together; 32 on sm_100 only
    """

    start: int
    leading_offset: int
    stride_offset: int
    swizzle: int
    atom: int = CHUNK


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int) -> MatrixDescriptor:
    base_offset = bits >> 49 & 0x7
    if base_offset:
        raise UnknownInstruction(
            f"Matrix descriptor {bits:#018x} has base offset {base_offset}; only 0 is modelled."
        )
    return MatrixDescriptor(
        start=(bits & 0x3FFF) * 16,
        leading_offset=(bits >> 16 & 0x3FFF) * 16,
        stride_offset=(bits >> 32 & 0x3FFF) * 16,
        swizzle=_SWIZZLE_WIDTH[bits >> 62],
    )


def gather_a(
    shared: SharedMemory, descriptors: int | tuple[int, ...], *, major_mn: bool, operand: Operand
) -> Float32s:
    """A from shared memory: (64, k), or (64, steps * k) for the descriptors of steps in a row."""
    return _gather(shared, descriptors, ROWS, major_mn, operand, "A of wgmma")


def gather_b(
    shared: SharedMemory,
    descriptors: int | tuple[int, ...],
    n: int,
    *,
    major_mn: bool,
    operand: Operand,
) -> Float32s:
    """B from shared memory: (n, k), or (n, steps * k) for the descriptors of steps in a row."""
    require_columns(n)
    return _gather(shared, descriptors, n, major_mn, operand, "B of wgmma")


def require_columns(n: int) -> None:
    if not 8 <= n <= MAX_COLUMNS or n % 8:
        raise InvalidDescriptor(
            f"wgmma has N = {n}; allowed are multiples of 8 up to {MAX_COLUMNS}."
        )


def a_from_registers(registers: NDArray[np.uint32], operand: Operand) -> Float32s:
    """A from registers (warps, 32 lanes, 4 * steps): (16 * warps, steps * k)."""
    warps, _, num_registers = registers.shape
    steps = num_registers // 4
    # Axes: warp, row, word, step, half of words, half of rows.
    words = registers.reshape(warps, 8, 4, steps, 2, 2).transpose(0, 5, 1, 3, 4, 2)
    words = np.ascontiguousarray(words).reshape(WARP_ROWS * warps, steps * ROW_BYTES // 4)
    return operand.to_f32(words.view(np.uint8))


def to_registers(matrix: Float32s) -> Float32s:
    """Rows of an accumulator, (16 * warps, n), in register order: (warps, 32 lanes, n / 2).

    A register's lanes are contiguous in memory: it is a transposed view of (warps, n / 2, 32).
    """
    rows, n = matrix.shape
    order = matrix.reshape(-1).take(_register_order(rows // WARP_ROWS, n))
    return order.reshape(rows // WARP_ROWS, n // 2, LANES).transpose(0, 2, 1)


def from_registers(registers: Float32s) -> Float32s:
    """The (16 * warps, n) rows of `to_registers`."""
    warps, n = registers.shape[0], 2 * registers.shape[2]
    matrix = np.empty(WARP_ROWS * warps * n, registers.dtype)
    matrix[_register_order(warps, n)] = registers.transpose(0, 2, 1).reshape(-1)
    return matrix.reshape(WARP_ROWS * warps, n)


@lru_cache(maxsize=64)
def _register_order(warps: int, n: int) -> NDArray[np.int64]:
    """Positions in flat (16 * warps, n) rows of (warp, register, lane)."""
    warp, register, lane = np.ogrid[:warps, : n // 2, :LANES]
    row = WARP_ROWS * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    order = (row * n + column).reshape(-1)
    order.setflags(write=False)
    return order


def _gather(
    shared: SharedMemory,
    descriptors: int | tuple[int, ...],
    rows: int,
    major_mn: bool,
    operand: Operand,
    what: str,
) -> Float32s:
    if major_mn and operand.nbytes != 2:
        raise UnknownInstruction(f"wgmma has no MN-major operands of {operand.value}.")
    steps = (descriptors,) if isinstance(descriptors, int) else descriptors
    parts = [
        gather_chunks(shared, first, base, starts, rows, major_mn, operand, what)
        for first, base, starts in _decode_chain(steps)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def gather_chunks(
    shared: SharedMemory,
    first: MatrixDescriptor,
    base: int,
    starts: tuple[int, ...],
    rows: int,
    major_mn: bool,
    operand: Operand,
    what: str,
) -> Float32s:
    """Float32 (rows, steps * k) of an operand, one start a step, in `CHUNK`s from ``base`` on.

    The steps share the offsets and the swizzle of ``first``.
    """
    layout = dataclasses.replace(first, start=0)
    chunks = operand_chunks(starts, layout, rows, major_mn, operand)
    raw = gather_raw(shared, base, chunks, what)
    if not major_mn:
        return operand.to_f32(raw.reshape(rows, -1))
    return operand.to_f32(raw.reshape(-1, rows * operand.nbytes)).T


def gather_raw(
    shared: SharedMemory, base: int, chunks: tuple[NDArray[np.int64], int, int], what: str
) -> Bytes:
    """Bytes of the chunks that `operand_chunks` or `row_chunks` found, from ``base`` on."""
    positions, begin, end = chunks
    shared.require_range(base + begin, end - begin, what)
    positions = positions + base // CHUNK
    if shared.written is not None and not shared.written[base + begin : base + end].all():
        require_chunks_written(shared, positions, what)
    return shared.chunks.take(positions).view(np.uint8)


@lru_cache(maxsize=4096)
def _decode_chain(
    steps: tuple[int, ...],
) -> tuple[tuple[MatrixDescriptor, int, tuple[int, ...]], ...]:
    return tuple(runs_of_one_layout([decode_descriptor(bits) for bits in steps]))


def runs_of_one_layout(
    steps: Sequence[MatrixDescriptor],
) -> Iterator[tuple[MatrixDescriptor, int, tuple[int, ...]]]:
    """The steps of a chain in runs of one layout: (layout, base, starts) of each.

    layout  a descriptor with start 0
    base    the multiple of `PERIOD` before the run's first start
    starts  from there on, in chunks
    """
    for layout, group in groupby(steps, lambda step: dataclasses.replace(step, start=0)):
        run = list(group)
        base = run[0].start - run[0].start % PERIOD
        yield layout, base, tuple((step.start - base) // CHUNK for step in run)


def require_chunks_written(shared: SharedMemory, positions: NDArray[np.int64], what: str) -> None:
    assert shared.written is not None
    read = shared.written.reshape(-1, CHUNK)[positions]
    if not read.all():
        where = int(np.argmin(read))
        byte = int(positions.reshape(-1)[where // CHUNK]) * CHUNK + where % CHUNK
        raise unwritten(shared.allocation, byte, what)


@lru_cache(maxsize=1024)
def operand_chunks(
    starts: tuple[int, ...],
    layout: MatrixDescriptor,
    rows: int,
    major_mn: bool,
    operand: Operand,
) -> tuple[NDArray[np.int64], int, int]:
    """Chunks of an operand from a multiple of `PERIOD` on, and the first byte and end of them.

    K major: (rows, steps, 2), 16 bytes of K each. MN major: (steps, k, chunks), 16 bytes of
    rows each. ``starts`` of the steps are in chunks; that of the layout is 0.
    """
    if not major_mn:
        return row_chunks(starts, layout, rows, ROW_BYTES // CHUNK)
    leading, stride = layout.leading_offset // CHUNK, layout.stride_offset // CHUNK
    width = layout.swizzle // CHUNK
    start, k, group = np.ix_(starts, range(operand.k), range(rows * operand.nbytes // CHUNK))
    if width:
        depth = 8 if layout.atom == CHUNK else 4  # of K in an atom of the layout
        offset = group % width + group // width * leading
        offset = offset + k % depth * width + k // depth * stride
    else:
        offset = group * stride + k % 8 + k // 8 * leading
    return _placed(start + offset, layout)


@lru_cache(maxsize=1024)
def row_chunks(
    starts: tuple[int, ...], layout: MatrixDescriptor, rows: int, chunks: int
) -> tuple[NDArray[np.int64], int, int]:
    """The same of K-major rows of a number of chunks: (rows, steps, chunks)."""
    leading, stride = layout.leading_offset // CHUNK, layout.stride_offset // CHUNK
    width = layout.swizzle // CHUNK
    row, start, part = np.ix_(range(rows), starts, range(chunks))
    if width:
        offset = row % 8 * width + row // 8 * stride + part
    else:
        offset = row % 8 + row // 8 * stride + part * leading
    return _placed(start + offset, layout)


def _placed(
    chunks: NDArray[np.int64], layout: MatrixDescriptor
) -> tuple[NDArray[np.int64], int, int]:
    positions = swizzled_chunks(chunks, layout.swizzle, layout.atom)
    positions.setflags(write=False)
    return positions, int(positions.min()) * CHUNK, (int(positions.max()) + 1) * CHUNK

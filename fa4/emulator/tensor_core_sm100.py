"""Tensor cores of sm_100: descriptors of `tcgen05.mma`, its operands and its product.

D[m, n] (+)= A[m, k] B[n, k]^T with D in tensor memory, A there or in shared memory, B in shared
memory, and 32 bytes of k an instruction. With cta_group::2 the even CTA's instruction works on both
CTAs of a pair: each gives its rows of A and half the rows of B, and gets its rows of D.

Matrix descriptor (64 bits): start address / 16 in bits 0-13, leading offset / 16 in 16-29, stride
offset / 16 in 32-45, 1 in 46-48, base offset in 49-51 (must be 0 here), swizzle in 61-63 (none 0,
128 bytes 2, 64 bytes 4, 32 bytes 6). Where elements lie is as for wgmma: see tensor_core.py.

Instruction descriptor (32 bits): type of D in 4-5 (f32 is 1), of A in 7-9 and of B in 10-12, A and
B negated 13 and 14, A and B MN major 15 and 16, N / 8 in 17-22, M / 16 in 24-28. All other bits
must be 0 here.

Where row r, column c of D lies, for the CTAs that take part
    M 128, one CTA    lane r, column c
    M 64, one CTA     lane 32 (r div 16) + r mod 16, column c; the other lanes are not touched
    M 256, a pair     of 128 rows each: lane r, column c
    M 128, a pair     of 64 rows each: lane r + 64 (c div (N/2)), column c mod (N/2)
A in tensor memory: row r is lane r, 32 bytes of k are 8 columns.

What is not modelled: the order and the internal precision of the sums, as in tensor_core.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction
from fa4.emulator.memory import SharedMemory
from fa4.emulator.swizzle import CHUNK, PERIOD
from fa4.emulator.tensor_core import (
    MatrixDescriptor,
    Operand,
    gather_chunks,
)
from fa4.emulator.tensor_core_sums import add_steps, step_products
from fa4.emulator.tensor_memory import COLUMN_MASK, LANE_SHIFT, TMEM_LANES, TensorMemory

Array = np.ndarray[Any, Any]

STEP_COLUMNS = 8  # of A in tensor memory: 32 bytes of k
_SWIZZLE_WIDTH = {0: 0, 2: 128, 4: 64, 6: 32}
_VERSION = 1
_F32 = 1
# Type codes of A and B in the instruction descriptor.
KINDS: dict[str, dict[int, Operand]] = {
    "f16": {0: Operand.F16, 1: Operand.BF16},
    "tf32": {2: Operand.TF32},
    "f8f6f4": {0: Operand.E4M3, 1: Operand.E5M2},
}
_ROWS = {1: (64, 128), 2: (128, 256)}  # M by CTAs in a group
_KNOWN_BITS = 0x1F7F_FFB0


@dataclass(frozen=True)
class MmaShape:
    """A decoded instruction descriptor, with what the opcode says.

    group   CTAs that work together: 1 or 2
    m, n    of the whole group
    a_sign, b_sign  1, or -1 where the operand is negated
    """

    group: int
    a: Operand
    b: Operand
    m: int
    n: int
    a_major_mn: bool
    b_major_mn: bool
    a_sign: int
    b_sign: int

    @property
    def rows(self) -> int:
        """Rows of A and D that each CTA has."""
        return self.m // self.group

    @property
    def splits_columns(self) -> bool:
        """Whether 64 rows of a pair's CTA use 128 lanes, half the columns each."""
        return self.group == 2 and self.m == 128

    @property
    def columns(self) -> int:
        """Columns of D in tensor memory."""
        return self.n // 2 if self.splits_columns else self.n


@lru_cache(maxsize=1024)
def decode_shape(bits: int, kind: str, group: int) -> MmaShape:
    """Decode an instruction descriptor. Raises for what is not modelled or not allowed."""
    if bits & ~_KNOWN_BITS:
        raise UnknownInstruction(
            f"Bits {bits & ~_KNOWN_BITS:#x} of instruction descriptor {bits:#010x} are not known."
        )
    if bits >> 4 & 0x3 != _F32:
        raise UnknownInstruction(
            f"Instruction descriptor {bits:#010x} asks for accumulators of type {bits >> 4 & 0x3}; "
            f"only f32 ({_F32}) is modelled."
        )
    operands = [KINDS[kind].get(bits >> shift & 0x7) for shift in (7, 10)]
    a, b = operands
    if a is None or b is None:
        raise UnknownInstruction(
            f"Instruction descriptor {bits:#010x} has operand types {bits >> 7 & 0x7} and "
            f"{bits >> 10 & 0x7}, which are not modelled for kind::{kind}."
        )
    m, n = (bits >> 24 & 0x1F) * 16, (bits >> 17 & 0x3F) * 8
    b_is_mn = bool(bits >> 16 & 1)
    step = 8 * group * (2 if b.nbytes == 1 and b_is_mn else 1)
    if m not in _ROWS[group] or not step <= n <= 256 or n % step:
        raise InvalidDescriptor(
            f"tcgen05.mma of cta_group::{group} has M = {m} and N = {n}; allowed are M of "
            f"{_ROWS[group]} with N a multiple of {step} up to 256."
        )
    shape = MmaShape(
        group,
        a,
        b,
        m,
        n,
        bool(bits >> 15 & 1),
        b_is_mn,
        -1 if bits >> 13 & 1 else 1,
        -1 if bits >> 14 & 1 else 1,
    )
    if kind == "tf32" and (shape.a_major_mn or shape.b_major_mn):
        raise UnknownInstruction("tcgen05.mma with MN-major operands of tf32 is not modelled.")
    return shape


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int) -> MatrixDescriptor:
    """Decode a matrix descriptor of sm_100."""
    if bits >> 46 & 0x7 != _VERSION:
        raise InvalidDescriptor(
            f"Matrix descriptor {bits:#018x} has version {bits >> 46 & 0x7}; sm_100 has {_VERSION}."
        )
    swizzle = _SWIZZLE_WIDTH.get(bits >> 61)
    if bits >> 49 & 0xFFF or swizzle is None:
        raise UnknownInstruction(
            f"Matrix descriptor {bits:#018x} has base offset {bits >> 49 & 0x7}, bits "
            f"{bits >> 52 & 0x1FF:#x} in 52-60 and swizzle {bits >> 61}; only 0, 0 and "
            f"{tuple(_SWIZZLE_WIDTH)} are modelled."
        )
    return MatrixDescriptor(
        start=(bits & 0x3FFF) * 16,
        leading_offset=(bits >> 16 & 0x3FFF) * 16,
        stride_offset=(bits >> 32 & 0x3FFF) * 16,
        swizzle=swizzle,
    )


def layout_of(bits: int) -> MatrixDescriptor:
    """A descriptor without its start: steps of one chain must agree in it."""
    return dataclasses.replace(decode_descriptor(bits), start=0)


def gather(
    shared: SharedMemory,
    descriptors: Sequence[int],
    rows: int,
    major_mn: bool,
    operand: Operand,
    what: str,
) -> Array:
    """Float32 (rows, steps * k) of an operand in shared memory; one descriptor a step."""
    decoded = [decode_descriptor(bits) for bits in descriptors]
    first = decoded[0]
    base = first.start - first.start % PERIOD
    starts = tuple((descriptor.start - base) // CHUNK for descriptor in decoded)
    return gather_chunks(shared, first, base, starts, rows, major_mn, operand, what)


def gather_from_tensor_memory(
    memory: TensorMemory, addresses: Sequence[int], operand: Operand, what: str
) -> Array:
    """Float32 (128, steps * k) of A in tensor memory; one address a step."""
    steps = []
    for address in addresses:
        if address >> LANE_SHIFT:
            raise UnknownInstruction(f"{what} starts at lane {address >> LANE_SHIFT}, not at 0.")
        words = memory.read(address & COLUMN_MASK, STEP_COLUMNS, slice(0, TMEM_LANES), what)
        steps.append(operand.to_f32(np.ascontiguousarray(words.T).view(np.uint8)))
    return np.concatenate(steps, axis=1)


def add_product(
    memory: TensorMemory, address: int, shape: MmaShape, a: Array, b: Array, adds: bool
) -> None:
    """Store A B^T to one CTA's D, or add it to what is there.

    a     (rows of the CTA, k)
    b     (n, k)
    """
    products = step_products(b, a, shape.a.k)
    if shape.a_sign * shape.b_sign < 0:
        products = -products
    half = shape.columns
    if shape.splits_columns:
        products = np.concatenate((products[:, :half], products[:, half:]), axis=2)
    lanes = _d_lanes(shape, address >> LANE_SHIFT)
    column = address & COLUMN_MASK
    old = memory.read(column, half, lanes, "tcgen05.mma, of D,").view(np.float32) if adds else None
    memory.write(column, lanes, add_steps(old, products).view(np.uint32), "tcgen05.mma")


def _d_lanes(shape: MmaShape, first: int) -> slice | Array:
    is_interleaved = shape.group == 1 and shape.m == 64
    if first not in ((0, 16) if is_interleaved else (0,)):
        raise UnknownInstruction(
            f"tcgen05.mma with M = {shape.m} stores from lane {first} on; only lane 0 (and 16 for "
            "M = 64 of one CTA) is modelled."
        )
    return _INTERLEAVED_LANES + first if is_interleaved else slice(0, TMEM_LANES)


_INTERLEAVED_LANES = np.arange(64) // 16 * 32 + np.arange(64) % 16

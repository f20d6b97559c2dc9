"""Tensor cores of sm_100: operands of `tcgen05.mma`, and its accumulators.

D[m, n] (+)= A[m, k] B[n, k]^T with D in tensor memory, A there or in shared memory, B in shared
memory, and 32 bytes of k an instruction. With cta_group::2 the even CTA's instruction works on both
CTAs of a pair: each gives its rows of A and half the rows of B, and gets its rows of D.

Matrix descriptor (64 bits): start address / 16 in bits 0-13, leading offset / 16 in 16-29, stride
offset / 16 in 32-45, 1 in 46-48, base offset in 49-51 (must be 0 here), swizzle in 61-63 (none 0,
128 bytes with atoms of 32 bytes 1, 128 bytes 2, 64 bytes 4, 32 bytes 6). Where elements lie is as
for wgmma: see tensor_core.py; in the layout with atoms of 32 bytes k advances by 4 rows of 128
bytes before it takes the stride offset.

Where row r, column c of D lies, for the CTAs that take part
    M 128, one CTA    lane r, column c
    M 64, one CTA     lane 32 (r div 16) + r mod 16, column c; the other lanes are not touched
    M 256, a pair     of 128 rows each: lane r, column c
    M 128, a pair     of 64 rows each: lane r + 64 (c div (N/2)), column c mod (N/2)
    M 64, .ws         the same, with 64 rows in one CTA
    M 32, .ws         lane r + 32 (c div (N/4)), column c mod (N/4)
A float16 element takes the lower half of a word; nobody should count on the upper half.

A in tensor memory has row r at D's lane for it, and 32 bytes of k in 8 columns. Where D's lanes
come in parts with their own columns, each part has a copy of all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction
from fa4.emulator.memory import SharedMemory
from fa4.emulator.mma_descriptor_sm100 import MmaShape
from fa4.emulator.swizzle import CHUNK, PERIOD
from fa4.emulator.tensor_core import MatrixDescriptor, Operand, gather_chunks
from fa4.emulator.tensor_core_sums import (
    Accumulator,
    add_half_steps,
    add_integer_steps,
    add_steps,
    step_products,
)
from fa4.emulator.tensor_memory import COLUMN_MASK, LANE_SHIFT, TMEM_LANES, TensorMemory

Array = np.ndarray[Any, Any]

STEP_COLUMNS = 8  # of A in tensor memory: 32 bytes of k
_WIDE_ATOM = 32
_SWIZZLES = {0: (0, CHUNK), 1: (128, _WIDE_ATOM), 2: (128, CHUNK), 4: (64, CHUNK), 6: (32, CHUNK)}
_VERSION = 1
_UPPER_HALF = np.uint32(0xFFFF0000)  # a NaN


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int) -> MatrixDescriptor:
    """Decode a matrix descriptor of sm_100."""
    if bits >> 46 & 0x7 != _VERSION:
        raise InvalidDescriptor(
            f"Matrix descriptor {bits:#018x} has version {bits >> 46 & 0x7}; sm_100 has {_VERSION}."
        )
    swizzle = _SWIZZLES.get(bits >> 61)
    if bits >> 49 & 0xFFF or swizzle is None:
        raise UnknownInstruction(
            f"Matrix descriptor {bits:#018x} has base offset {bits >> 49 & 0x7}, bits "
            f"{bits >> 52 & 0x1FF:#x} in 52-60 and swizzle {bits >> 61}; only 0, 0 and "
            f"{tuple(_SWIZZLES)} are modelled."
        )
    return MatrixDescriptor(
        start=(bits & 0x3FFF) * 16,
        leading_offset=(bits >> 16 & 0x3FFF) * 16,
        stride_offset=(bits >> 32 & 0x3FFF) * 16,
        swizzle=swizzle[0],
        atom=swizzle[1],
    )


@lru_cache(maxsize=4096)
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
    if major_mn and (operand.nbytes == 4) != (first.atom == _WIDE_ATOM):
        raise InvalidDescriptor(
            f"{what} is MN major, of {operand.value}, with a swizzle whose atoms have {first.atom} "
            f"bytes; 32-bit elements need {_WIDE_ATOM}, others {CHUNK}."
        )
    base = first.start - first.start % PERIOD
    starts = tuple((descriptor.start - base) // CHUNK for descriptor in decoded)
    return gather_chunks(shared, first, base, starts, rows, major_mn, operand, what)


def gather_from_tensor_memory(
    memory: TensorMemory,
    addresses: Sequence[int],
    lanes: slice | Array,
    operand: Operand,
    what: str,
) -> Array:
    """Float32 (lanes, steps * k) of A in tensor memory; one address a step."""
    steps = []
    for address in addresses:
        words = memory.read(address & COLUMN_MASK, STEP_COLUMNS, lanes, what)
        steps.append(operand.from_tensor_memory(np.ascontiguousarray(words.T).view(np.uint8)))
    return np.concatenate(steps, axis=1)


def lanes_of(shape: MmaShape, address: int, what: str) -> slice | Array:
    """Lanes of D, or of A in tensor memory, at an address."""
    first = address >> LANE_SHIFT
    if first not in ((0, 16) if shape.is_interleaved else (0,)):
        raise UnknownInstruction(
            f"{what} of a tcgen05.mma with M = {shape.m} starts at lane {first}; only lane 0 (and "
            "16 for M = 64 of one CTA) is modelled."
        )
    return _INTERLEAVED_LANES + first if shape.is_interleaved else slice(0, TMEM_LANES)


_INTERLEAVED_LANES = np.arange(64) // 16 * 32 + np.arange(64) % 16


def add_product(
    memory: TensorMemory,
    address: int,
    shape: MmaShape,
    a: Array,
    b: Array,
    adds: bool,
    *,
    scale_exponent: int = 0,
    kept: Array | None = None,
) -> None:
    """Store A B^T to one CTA's D, or add it to what is there times 2^-scale_exponent.

    a     (rows of the CTA, k), or the same for each part of the lanes: (parts * rows, k)
    b     (n, k)
    kept  (128,) bool, lanes of D that are not touched
    """
    parts, rows, columns = shape.parts, shape.rows, shape.columns
    products = []
    for part in range(parts):
        left = a if len(a) == rows else a[part * rows : (part + 1) * rows]
        right = b[part * columns : (part + 1) * columns]
        products.append(step_products(right, left, shape.a.k))
    product = products[0] if parts == 1 else np.concatenate(products, axis=2)
    if shape.a_sign * shape.b_sign < 0:
        product = -product
    lanes = lanes_of(shape, address, "D")
    if kept is not None:
        lanes = np.arange(TMEM_LANES)[lanes]
        changes = ~kept[lanes]
        lanes, product = lanes[changes], product[:, :, changes]
    column = address & COLUMN_MASK
    old = None
    if adds:
        old = memory.read(column, columns, lanes, "tcgen05.mma, of D,")
    memory.write(column, lanes, _sum_words(shape, old, product, scale_exponent), "tcgen05.mma")


def _sum_words(shape: MmaShape, old: Array | None, products: Array, scale_exponent: int) -> Array:
    """Words of D, from its old words or None."""
    if shape.accumulator is Accumulator.S32:
        start = None if old is None else old.view(np.int32)
        return add_integer_steps(start, products, shape.saturates).view(np.uint32)
    if shape.accumulator is Accumulator.F16:
        start = None if old is None else old.astype(np.uint16).view(np.float16)
        if start is not None and scale_exponent:
            start = start * np.float64(2.0**-scale_exponent)
        sums = add_half_steps(start, products).view(np.uint16)
        return sums.astype(np.uint32) | _UPPER_HALF
    start = None if old is None else old.view(np.float32)
    if start is not None and scale_exponent:
        start = start * np.float64(2.0**-scale_exponent)
    return add_steps(start, products).view(np.uint32)

"""How a tensor core adds up: each instruction adds all its products to the accumulator at once.

The products of one instruction and one accumulator are exact, their sum with the accumulator is
truncated, not rounded, to float32. That is the model that published tests of the units come to
(Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"; Li et al. 2024, "FTTN"), but for one
thing: hardware aligns the addends to the largest exponent and drops what lies 25 bits and more
below it, before it adds. To follow that takes each product by itself, at some fifty times the cost.
Against results of an H200 (tests/emulator/test_against_h200.py), float32 sums in any order gave the
bits of 98.0 to 99.98 % of the outputs of an attention kernel, this 99.1 to 99.99 %, and the whole
model 99.6 to 99.98 %.

Sums to float16 are rounded to nearest even; those of integers are exact, and wrap around or
saturate.

Hopper's 8-bit products are known to be added with fewer bits; that is not modelled.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ONE_THREAD_WORK = 1 << 18  # multiplications that OpenBLAS does not share between threads
_FLOAT32_MANTISSA = np.int64(~((1 << 29) - 1))  # sign, exponent and 23 bits of a float64


def step_products(a: Array, b: Array, depth: int) -> Array:
    """A B^T of every instruction of a chain, exact: (steps, rows, n) float64.

    a      (rows, steps * depth)
    b      (n, steps * depth)
    depth  K of an instruction
    """
    rows, k = a.shape
    n = len(b)
    left, right = a.astype(np.float64), b.astype(np.float64).T
    products = np.empty((k // depth, rows, n))
    # OpenBLAS hands larger products to threads, and waiting for those on a busy machine cost 2 ms
    # a product instead of 0.05.
    width = max(8, ONE_THREAD_WORK // (rows * depth))
    with np.errstate(all="ignore"):
        for step, product in enumerate(products):
            part = slice(step * depth, (step + 1) * depth)
            for first in range(0, n, width):
                columns = slice(first, first + width)
                np.matmul(left[:, part], right[part, columns], out=product[:, columns])
    return products


class Accumulator(Enum):
    """Types of accumulators, named as in the instruction."""

    F16 = "f16"
    F32 = "f32"
    S32 = "s32"

    @property
    def dtype(self) -> np.dtype[Any]:
        return _ACCUMULATORS[self]


_ACCUMULATORS: dict[Accumulator, np.dtype[Any]] = {
    Accumulator.F16: np.dtype(np.float16),
    Accumulator.F32: np.dtype(np.float32),
    Accumulator.S32: np.dtype(np.int32),
}


def add_steps(start: Array | None, products: Array) -> Array:
    """Float32 sums of an accumulator (None for zero) and the products of one instruction after the
    other, truncated after each."""
    with np.errstate(all="ignore"):
        total = products[0].copy() if start is None else products[0] + start
        bits = total.view(np.int64)
        np.bitwise_and(bits, _FLOAT32_MANTISSA, out=bits)
        for product in products[1:]:
            np.add(total, product, out=total)
            np.bitwise_and(bits, _FLOAT32_MANTISSA, out=bits)
        return total.astype(np.float32)


def add_half_steps(start: Array | None, products: Array) -> Array:
    """The same for float16 accumulators, rounded after each instruction."""
    total = np.zeros(products.shape[1:], np.float16) if start is None else start
    with np.errstate(all="ignore"):
        for product in products:
            total = (product + total).astype(np.float16)
    return total


def add_integer_steps(start: Array | None, products: Array, saturates: bool) -> Array:
    """The same for int32 accumulators; sums wrap around, or saturate after each instruction."""
    total = np.zeros(products.shape[1:], np.int64) if start is None else start.astype(np.int64)
    limits = np.iinfo(np.int32)
    for product in products:
        total = total + product.astype(np.int64)
        if saturates:
            total = np.clip(total, limits.min, limits.max)
    return total.astype(np.int32)

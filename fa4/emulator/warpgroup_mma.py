"""wgmma for a warpgroup whose four warps arrive at different times.

The instruction belongs to the warpgroup: the first warp that reaches it reads shared memory for all
four, because another may release the operands' stage before the last one gets there. Instructions
in a row on one accumulator come as one chain.

Operand layouts and descriptors are tensor_core.py's, sums are tensor_core_sums.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa4.emulator.errors import BarrierMisuse
from fa4.emulator.memory import SharedMemory
from fa4.emulator.tensor_core import (
    WARP_ROWS,
    WARPS,
    Operand,
    a_from_registers,
    from_registers,
    gather_a,
    gather_b,
    to_registers,
)
from fa4.emulator.tensor_core_sums import add_steps, step_products

Array = np.ndarray[Any, Any]


class MmaShape(NamedTuple):
    """What all instructions of a chain share; as the translator writes it down."""

    n: int
    a_kind: str
    b_kind: str
    a_in_registers: bool
    a_transposed: bool  # MN major
    b_transposed: bool


@dataclass
class _Issued:
    """A chain that the first warp has issued and others still have to reach."""

    shape: MmaShape
    descriptors: tuple[tuple[int | None, int], ...]
    b: Array  # (n, k), kept while A comes from registers
    products: Array | None  # (steps, 64, n) when A is in shared memory
    warps_left: int = WARPS


class WarpgroupMma:
    """The wgmma instructions of one warpgroup, numbered as each warp reaches them."""

    def __init__(self, shared: SharedMemory):
        self.shared = shared
        self.issued: dict[int, _Issued] = {}

    def chain(
        self,
        number: int,
        warp: int,
        shape: MmaShape,
        start: Array,
        steps: Sequence[tuple[Any, int, bool]],
    ) -> Array:
        """One warp's part of a chain; (n / 2 registers, 32 lanes) float32.

        number  of chains that this warp executed before
        warp    in the warpgroup
        start   accumulator before the chain
        steps   (A descriptor or 4 registers, B descriptor, whether to add to what is there)
        """
        # Whatever comes before a step that overwrites the accumulator is lost.
        first = max((index for index, step in enumerate(steps) if not step[2]), default=0)
        adds = steps[first][2]
        steps = steps[first:]
        descriptors = tuple((None if shape.a_in_registers else int(a), int(b)) for a, b, _ in steps)
        issued = self.issued.get(number)
        if issued is None:
            issued = self.issued[number] = self._issue(shape, descriptors)
        elif (issued.shape, issued.descriptors) != (shape, descriptors):
            raise BarrierMisuse(
                f"warp {warp} of a warpgroup executes another wgmma ({shape}, {descriptors}) than "
                f"the warps before it ({issued.shape}, {issued.descriptors})."
            )
        issued.warps_left -= 1
        if issued.warps_left == 0:
            del self.issued[number]
        if issued.products is not None:
            rows = slice(WARP_ROWS * warp, WARP_ROWS * (warp + 1))
            products = issued.products[:, rows]
        else:
            registers = np.stack([register for four, _, _ in steps for register in four], axis=1)
            a = a_from_registers(registers[None], Operand(shape.a_kind))
            products = step_products(a, issued.b, Operand(shape.b_kind).k)
        accumulator = from_registers(np.asarray(start).T[None]) if adds else None
        return to_registers(add_steps(accumulator, products))[0].T

    def _issue(self, shape: MmaShape, descriptors: tuple[tuple[int | None, int], ...]) -> _Issued:
        b = gather_b(
            self.shared,
            tuple(bits for _, bits in descriptors),
            shape.n,
            major_mn=shape.b_transposed,
            operand=Operand(shape.b_kind),
        )
        if shape.a_in_registers:
            return _Issued(shape, descriptors, b, None)
        a = gather_a(
            self.shared,
            tuple(bits for bits, _ in descriptors if bits is not None),
            major_mn=shape.a_transposed,
            operand=Operand(shape.a_kind),
        )
        return _Issued(shape, descriptors, b, step_products(a, b, Operand(shape.b_kind).k))

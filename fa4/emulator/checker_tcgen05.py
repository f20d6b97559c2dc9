"""What the race detector learns of tcgen05 instructions; see checker.py.

The products of one warp happen in order, so that they are one actor. Its commit passes on what was
ordered before its latest product, and the product. Stores to tensor memory are another actor, which
`tcgen05.wait::st` waits for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator import tensor_core_sm100
from fa4.emulator.operand_cells import operand_cells
from fa4.emulator.race_detector import Access, Cells, Clock, Row, TensorShadow
from fa4.emulator.tcgen05 import Tcgen05
from fa4.emulator.tensor_core_sm100 import STEP_COLUMNS, MmaShape
from fa4.emulator.tensor_memory import (
    COLUMN_MASK,
    LANE_SHIFT,
    TMEM_LANES,
    columns_of,
    registers_of,
    warp_lanes,
)

if TYPE_CHECKING:
    from fa4.emulator.checker import CheckedWarp

Array = np.ndarray[Any, Any]


class WatchedTcgen05(Tcgen05):
    """The tcgen05 instructions of a warp that is checked."""

    warp: CheckedWarp

    def __init__(self, warp: CheckedWarp):
        super().__init__(warp)
        races, place = warp.races, f"warp {warp.index} of CTA rank {warp.cta.rank}"
        self.products = races.actor(f"the tcgen05.mmas of {place}", is_async=True)
        self.stores = races.actor(f"the tcgen05.sts of {place}", is_async=True)
        self._multiplied = 0  # epoch of the latest product
        self._stored = 0  # epoch of the latest tcgen05.st
        self._issued: Clock = races.clock()  # what is ordered before the latest product ends
        # For each commit that has not happened: the warp's clock, and what the commit passes on.
        self._commits: deque[tuple[Clock, Clock]] = deque()

    # -- products --------------------------------------------------------------------------------

    def mma(
        self,
        group: int,
        kind: str,
        a_in_tensor_memory: bool,
        operands: tuple[Array, Array, Array, Array, Array],
        disabled: tuple[Array, ...],
        mask: Array,
    ) -> None:
        super().mma(group, kind, a_in_tensor_memory, operands, disabled, mask)
        for lane in np.flatnonzero(mask):
            d, a, b, shape_bits, _ = (int(operand[lane]) for operand in operands)
            shape = tensor_core_sm100.decode_shape(shape_bits, kind, group)
            self._multiply(shape, a_in_tensor_memory, d, a, b)

    def _multiply(self, shape: MmaShape, a_in_tensor_memory: bool, d: int, a: int, b: int) -> None:
        races = self.warp.races
        clock = self.warp.clock.copy()
        clock[Row.ORDERED, self.products.index] = self._multiplied
        self._multiplied += 1
        access = Access(self.products, self._multiplied, "a tcgen05.mma", self.warp._calling_line())
        decode = tensor_core_sm100.decode_descriptor
        for cta in self._ctas(shape.group):
            shadow = races.shadows[id(cta.shared.allocation)]
            rows_of_b = shape.n // shape.group
            cells = operand_cells(shadow, [decode(b)], rows_of_b, shape.b_major_mn, shape.b)
            races.read(shadow, cells, access, clock)
            tensor = races.tensor_shadows[cta.rank]
            if a_in_tensor_memory:
                cells = tensor.block(a & COLUMN_MASK, STEP_COLUMNS)
                races.read(tensor, cells, access, clock)
            else:
                cells = operand_cells(shadow, [decode(a)], shape.rows, shape.a_major_mn, shape.a)
                races.read(shadow, cells, access, clock)
            races.write(tensor, _cells_of_d(tensor, shape, d), access, clock)
        clock[Row.ORDERED, self.products.index] = self._multiplied
        self._issued = clock
        # Later accesses of the warp are not part of what the product comes after.
        self.warp.next_epoch()

    def commit(self, where: Array, ranks: Array | None, group: int, mask: Array) -> None:
        clocks = self.warp.clock.copy(), self._issued
        self._commits.extend([clocks] * int(np.count_nonzero(mask)))
        super().commit(where, ranks, group, mask)

    def _arrive(self, addresses: list[int]) -> None:
        clock, passed_on = self._commits.popleft()
        for where in addresses:
            barrier = self.warp._mbarrier(where)
            state = self.warp.races.barrier(barrier, clock, Row.INITIALISED, "a tcgen05.commit")
            np.maximum(state.pending, passed_on, out=state.pending)
        super()._arrive(addresses)

    # -- tensor memory ---------------------------------------------------------------------------

    def deallocate(self, where: int, columns: int, group: int, full: bool) -> None:
        tensor = self._tensor_shadow()
        cells = tensor.block(where & COLUMN_MASK, columns)
        access, clock = self.warp.access("tcgen05.dealloc")
        self.warp.races.write(tensor, cells, access, clock)
        tensor.forget(cells)
        super().deallocate(where, columns, group, full)

    def load(self, shape: str, repeat: int, where: int, full: bool) -> Array:
        cells = self._cells(where, shape, repeat)
        access, clock = self.warp.access("a tcgen05.ld")
        self.warp.races.read(self._tensor_shadow(), cells, access, clock)
        return super().load(shape, repeat, where, full)

    def store(self, shape: str, where: int, registers: Array, full: bool) -> None:
        cells = self._cells(where, shape, len(registers) // registers_of(shape, 1))
        clock = self.warp.clock.copy()
        clock[Row.ORDERED, self.stores.index] = self._stored
        self._stored += 1
        access = Access(self.stores, self._stored, "a tcgen05.st", self.warp._calling_line())
        self.warp.races.write(self._tensor_shadow(), cells, access, clock)
        super().store(shape, where, registers, full)

    def wait(self, operation: str, full: bool) -> None:
        super().wait(operation, full)
        if operation == "st":
            self.warp.clock[Row.ORDERED, self.stores.index] = self._stored

    def _tensor_shadow(self) -> TensorShadow:
        return self.warp.races.tensor_shadows[self.warp.cta.rank]

    def _cells(self, where: int, shape: str, repeat: int) -> Cells:
        lanes = warp_lanes(where, self.warp.index, shape, "A tcgen05 access")
        columns = columns_of(shape, repeat)
        return self._tensor_shadow().block(where & COLUMN_MASK, columns, lanes)


def _cells_of_d(tensor: TensorShadow, shape: MmaShape, address: int) -> Cells:
    lanes = None
    if shape.group == 1 and shape.m == 64:  # 16 lanes of every quarter
        lanes = slice(address >> LANE_SHIFT, TMEM_LANES, 2)
    return tensor.block(address & COLUMN_MASK, shape.columns, lanes)

"""What the race detector learns of tcgen05 instructions; see checker.py.

The products and copies of one warp happen in order, so that they are one actor. Its commit passes
on what was ordered before its latest one, and that. Stores to tensor memory are another actor,
which `tcgen05.wait::st` waits for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator import block_scales, tensor_copy, tensor_core_sm100
from fa4.emulator.operand_cells import operand_cells, row_cells
from fa4.emulator.race_detector import Access, Cells, Clock, Row, TensorShadow
from fa4.emulator.tcgen05 import Step, Tcgen05
from fa4.emulator.tensor_core_sm100 import STEP_COLUMNS
from fa4.emulator.tensor_memory import (
    COLUMN_MASK,
    LANE_SHIFT,
    TMEM_LANES,
    RegisterAccess,
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

    def _step(self, *issue: Any) -> Step:
        step = super()._step(*issue)
        self._multiply(step)
        return step

    def _multiply(self, step: Step) -> None:
        races, shape = self.warp.races, step.shape
        access, clock = self._next_product("a tcgen05.mma")
        decode = tensor_core_sm100.decode_descriptor
        shift = step.zeros.shift if step.zeros else 0
        for cta in self._ctas(shape.group):
            shadow = races.shadows[id(cta.shared.allocation)]
            rows_of_b = shape.n // shape.group + shift
            cells = operand_cells(shadow, [decode(step.b)], rows_of_b, shape.b_major_mn, shape.b)
            races.read(shadow, cells, access, clock)
            tensor = races.tensor_shadows[cta.rank]
            if step.form.a_in_tensor_memory:
                cells = tensor.block(step.a & COLUMN_MASK, STEP_COLUMNS, _lanes(step, step.a))
                races.read(tensor, cells, access, clock)
            else:
                cells = operand_cells(
                    shadow, [decode(step.a)], shape.rows, shape.a_major_mn, shape.a
                )
                races.read(shadow, cells, access, clock)
            for side, (address, _) in enumerate(step.scales):
                rows, parts = (shape.n, shape.parts) if side else (shape.rows, 1)
                column = block_scales.column_of(address, "Scale factors")
                cells = tensor.block(column, block_scales.scale_columns(rows, parts))
                races.read(tensor, cells, access, clock)
            cells = tensor.block(step.d & COLUMN_MASK, shape.columns, _lanes(step, step.d))
            races.write(tensor, cells, access, clock)
        self._end_product(clock)

    def _next_product(self, what: str) -> tuple[Access, Clock]:
        """The next product or copy of the warp, and what is ordered before it."""
        clock = self.warp.clock.copy()
        clock[Row.ORDERED, self.products.index] = self._multiplied
        self._multiplied += 1
        access = Access(self.products, self._multiplied, what, self.warp.calling_line())
        return access, clock

    def _end_product(self, clock: Clock) -> None:
        clock[Row.ORDERED, self.products.index] = self._multiplied
        self._issued = clock
        # Later accesses of the warp are not part of what the product comes after.
        self.warp.next_epoch()

    def copy(
        self,
        shape_name: str,
        decompression: str | None,
        group: int,
        where: Array,
        descriptor: Array,
        mask: Array,
    ) -> None:
        races, shape = self.warp.races, tensor_copy.SHAPES[shape_name]
        for lane in np.flatnonzero(mask):
            access, clock = self._next_product("a tcgen05.cp")
            target = int(where[lane])
            rows = tensor_core_sm100.decode_descriptor(int(descriptor[lane]))
            for cta in self._ctas(group):
                shadow = races.shadows[id(cta.shared.allocation)]
                races.read(shadow, row_cells(shadow, rows, shape.rows, shape.chunks), access, clock)
                tensor = races.tensor_shadows[cta.rank]
                lanes = tensor_copy.lanes_of(shape, target)
                cells = tensor.lanes_block(target & COLUMN_MASK, shape.columns, lanes)
                races.write(tensor, cells, access, clock)
            self._end_product(clock)
        super().copy(shape_name, decompression, group, where, descriptor, mask)

    def commit(self, where: Array, ranks: Array | None, group: int, mask: Array) -> None:
        clocks = self.warp.clock.copy(), self._issued
        self._commits.extend([clocks] * int(np.count_nonzero(mask)))
        super().commit(where, ranks, group, mask)

    def _arrive(self, addresses: list[int]) -> None:
        clock, passed_on = self._commits.popleft()
        for where in addresses:
            barrier = self.warp.mbarrier_at(where)
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

    def load(
        self, shape: str, repeat: int, packs: bool, half_split: int, where: int, full: bool
    ) -> Array:
        access, clock = self.warp.access("a tcgen05.ld")
        for cells in self._cells(where, RegisterAccess(shape, repeat, packs, half_split)):
            self.warp.races.read(self._tensor_shadow(), cells, access, clock)
        return super().load(shape, repeat, packs, half_split, where, full)

    def store(
        self,
        shape: str,
        repeat: int,
        unpacks: bool,
        half_split: int,
        where: int,
        registers: Array,
        full: bool,
    ) -> None:
        clock = self.warp.clock.copy()
        clock[Row.ORDERED, self.stores.index] = self._stored
        self._stored += 1
        access = Access(self.stores, self._stored, "a tcgen05.st", self.warp.calling_line())
        for cells in self._cells(where, RegisterAccess(shape, repeat, unpacks, half_split)):
            self.warp.races.write(self._tensor_shadow(), cells, access, clock)
        super().store(shape, repeat, unpacks, half_split, where, registers, full)

    def wait(self, operation: str, full: bool) -> None:
        super().wait(operation, full)
        if operation == "st":
            self.warp.clock[Row.ORDERED, self.stores.index] = self._stored

    def _tensor_shadow(self) -> TensorShadow:
        return self.warp.races.tensor_shadows[self.warp.cta.rank]

    def _cells(self, where: int, access: RegisterAccess) -> list[Cells]:
        lanes = warp_lanes(where, self.warp.index, access.shape, "A tcgen05 access")
        tensor, column = self._tensor_shadow(), where & COLUMN_MASK
        return [tensor.block(column + start, access.columns, lanes) for start in access.starts]


def _lanes(step: Step, address: int) -> slice | None:
    """Lanes of D, or of A in tensor memory; a step is one of groups of 16."""
    if not step.shape.is_interleaved:
        return None
    return slice(address >> LANE_SHIFT, TMEM_LANES, 2)

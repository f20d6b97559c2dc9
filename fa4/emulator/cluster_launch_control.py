"""Cluster launch control: a running cluster takes the work of one that has not started.

`clusterlaunchcontrol.try_cancel` asks for it; an answer of 16 bytes arrives in shared memory and
completes as many bytes at an mbarrier. Only `query_cancel` reads an answer, so its encoding is this
module's: four words, 1 and the position of the cluster's first CTA, or zeros where no cluster is
left. Clusters run one after the other here, so the first that asks gets all there are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.data_movement import address
from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.memory import OFFSET_MASK, RANK_SHIFT, Space
from fa4.emulator.ptx import Instruction
from fa4.emulator.register_kinds import LANES

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Warp

Array = np.ndarray[Any, Any]

ANSWER_BYTES = 16
_ONE_LANE = np.arange(LANES) == 0


class ClusterLaunchControl:
    """Requests of one warp."""

    def __init__(self, warp: Warp):
        self.warp = warp

    def try_cancel(self, where: Array, barrier: Array, to_all: bool, mask: Array) -> None:
        """Each active lane asks. The answer goes to its address, or to that offset in every CTA of
        the cluster, whose own mbarrier then counts."""
        line = self.warp.calling_line()
        for lane in np.flatnonzero(mask):
            place, signalled = int(where[lane]), int(barrier[lane])
            targets = [(place, signalled)]
            if to_all:
                ranks = range(len(self.warp.cta.cluster))
                targets = [(_in_cta(place, rank), _in_cta(signalled, rank)) for rank in ranks]
            self.warp.defer(functools.partial(self._answer, targets), line)

    def _answer(self, targets: list[tuple[int, int]]) -> None:
        first = self.warp.cta.launch_state.take_cluster()
        words = np.array([0, 0, 0, 0] if first is None else [1, *first], np.uint32)
        data = np.broadcast_to(words.view(np.uint8), (LANES, ANSWER_BYTES))
        for place, signalled in targets:
            where = np.full(LANES, place, np.uint64)
            self.warp.memory.store(Space.SHARED, where, data, _ONE_LANE)
            self.warp.mbarrier_at(signalled).complete_tx(ANSWER_BYTES)


def _in_cta(where: int, rank: int) -> int:
    return where & OFFSET_MASK | rank << RANK_SHIFT


# -- instructions ----------------------------------------------------------------------------------


@instruction("clusterlaunchcontrol.try_cancel")
def _try_cancel(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("async")
    m.one_of("shared::cta")
    m.required("mbarrier::complete_tx::bytes")
    to_all = m.take("multicast::cluster::all")
    m.kind("b128")
    where, barrier = address(e, i.operands[0]), address(e, i.operands[1])
    e.line(f"w.launch_control.try_cancel({where}, {barrier}, {to_all}, {e.active()})")


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def _is_canceled(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.kind("pred")
    m.kind("b128")
    e.write(i.operands[0], "pred", f"{_words(e, i)}[:, 0] != 0")


@instruction("clusterlaunchcontrol.query_cancel.get_first_ctaid")
def _first_cta(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """x, y, z and a fourth element that says nothing."""
    m.required("v4")
    m.kind("b32")
    m.kind("b128")
    words = _words(e, i)
    destinations = vector(e, i.operands[0])
    if len(destinations) != 4:
        raise e.unknown(f"{len(destinations)} destinations")
    for destination, column in zip(destinations, (1, 2, 3, 0), strict=True):
        e.write(destination, "u32", f"{words}[:, {column}].copy()")


@instruction(*(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"))
def _first_cta_along(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.kind("b32")
    m.kind("b128")
    column = 1 + "xyz".index(i.parts[2][-1])
    e.write(i.operands[0], "u32", f"{_words(e, i)}[:, {column}].copy()")


def _words(e: Emitter, i: Instruction) -> str:
    return e.local(f"{e.read(i.operands[1], 'u128')}.view(t_u32).reshape(-1, 4)")

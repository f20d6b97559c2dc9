"""Copies between the CTAs of a cluster, and addresses in another CTA's shared memory.

multicast  one TMA load fills the same offset in each CTA of a mask of ranks, and completes at the
           mbarrier with the operand's offset there; with cta_group::2 at that of the one CTA of
           each destination's pair that has the parity of the operand's rank
st.async   a store to another CTA's shared memory that completes bytes at an mbarrier there

Other copies to another CTA are in bulk_copy.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.data_movement import address
from fa4.emulator.errors import OutOfBounds
from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.memory import OFFSET_MASK, RANK_SHIFT, Space
from fa4.emulator.ptx import Instruction
from fa4.emulator.register_kinds import KINDS, LANES

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Warp

Array = np.ndarray[Any, Any]


class ClusterCopies:
    """The copies of one warp that reach other CTAs."""

    def __init__(self, warp: Warp):
        self.warp = warp

    def targets(
        self, where: Array, barrier: Array, ranks: Array, by_pairs: bool, mask: Array
    ) -> Iterator[tuple[Array, Array, Array]]:
        """(destination, mbarrier, mask) for each lane and each CTA of its mask of ranks."""
        size = len(self.warp.cta.cluster)
        for lane in np.flatnonzero(mask):
            wanted = int(ranks[lane])
            if not wanted or wanted >> size:
                raise OutOfBounds(
                    f"A multicast names CTAs {wanted:#b} of a cluster of {size}.", int(lane)
                )
            parity = int(barrier[lane]) >> RANK_SHIFT & 1
            for rank in range(size):
                if wanted >> rank & 1:
                    signalled = (rank & ~1 | parity) if by_pairs else rank
                    yield (
                        _in_cta(where, rank),
                        _in_cta(barrier, signalled),
                        np.arange(LANES) == lane,
                    )

    def store(self, where: Array, data: Array, barrier: Array, mask: Array) -> None:
        """Store (lanes, bytes) some time later, and complete as many bytes at each lane's
        mbarrier."""
        if mask.any():
            action = functools.partial(self._store, where, data, barrier, mask)
            self.warp.defer(action, self.warp.calling_line())

    def _store(self, where: Array, data: Array, barrier: Array, mask: Array) -> None:
        self.warp.memory.store(Space.SHARED, where, data, mask)
        for lane in np.flatnonzero(mask):
            self.warp.mbarrier_at(int(barrier[lane])).complete_tx(data.shape[1])


def _in_cta(where: Array, rank: int) -> Array:
    kind = where.dtype.type
    return (where & kind(OFFSET_MASK)) | kind(rank << RANK_SHIFT)


# -- instructions ----------------------------------------------------------------------------------


@instruction("st.async")
def _store_async(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.one_of("weak", "relaxed")
    m.one_of("cluster")
    m.required("shared::cluster")
    m.required("mbarrier::complete_tx::bytes")
    count = {"v2": 2, "v4": 4}.get(str(m.one_of("v2", "v4")), 1)
    kind = m.kind("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
    values = [e.read(operand, kind) for operand in vector(e, i.operands[1])]
    if len(values) != count or count * KINDS[kind].bits > 128:
        raise e.unknown("its operands do not fit")
    where, barrier = address(e, i.operands[0]), address(e, i.operands[2])
    data = f"A.interleave({', '.join(values)}).view(np.uint8)"
    e.flush_chain()
    e.line(f"w.cluster_copies.store({where}, {data}, {barrier}, {e.active()})")


@instruction("getctarank.shared::cluster")
def _rank_of(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.kind("u32")
    where = e.read(i.operands[1], "u32")
    e.write(i.operands[0], "u32", f"{where} >> {e.translation.constant('u32', RANK_SHIFT)}")

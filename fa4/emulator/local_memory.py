"""Local memory: arrays of a thread of its own, at offsets that all threads share.

Only accesses that say .local are modelled; generic addresses of local memory are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.data_movement import address
from fa4.emulator.errors import Misaligned, OutOfBounds, UnwrittenRead
from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.ptx import Instruction, Kernel
from fa4.emulator.register_kinds import KINDS, LANES

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter

Array = np.ndarray[Any, Any]


def offsets_of(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Where the local variables of a kernel lie, and how many bytes a thread has."""
    offsets, end = {}, 0
    for variable in kernel.local.values():
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end


class LocalMemory:
    """The local memory of the threads of one warp.

    bytes    (lanes, size) uint8
    written  (lanes, size) bool, true where a load may read; None if not checked
    """

    def __init__(self, size: int, check_unwritten: bool = True):
        self.bytes: Array = np.full((LANES, size), 0xFF, np.uint8)
        self.written: Array | None = np.zeros((LANES, size), np.bool_) if check_unwritten else None

    def load(self, where: Array, nbytes: int, mask: Array) -> Array:
        """(lanes, nbytes), 0 in lanes outside the mask."""
        lanes, index = self._places(where, nbytes, mask, "load")
        if self.written is not None and not self.written[lanes[:, None], index].all():
            place = np.argwhere(~self.written[lanes[:, None], index])[0]
            raise UnwrittenRead(
                f"A load of {nbytes} bytes reads byte {index[tuple(place)]} of local memory, which "
                "the thread did not write.",
                int(lanes[place[0]]),
            )
        result = np.zeros((LANES, nbytes), np.uint8)
        result[lanes] = self.bytes[lanes[:, None], index]
        return result

    def store(self, where: Array, data: Array, mask: Array) -> None:
        lanes, index = self._places(where, data.shape[1], mask, "store")
        self.bytes[lanes[:, None], index] = data[lanes]
        if self.written is not None:
            self.written[lanes[:, None], index] = True

    def _places(self, where: Array, nbytes: int, mask: Array, what: str) -> tuple[Array, Array]:
        lanes = np.flatnonzero(mask)
        start = where[lanes].astype(np.int64)
        size = self.bytes.shape[1]
        for lane, first in zip(lanes, start, strict=True):
            if not 0 <= first <= size - nbytes:
                raise OutOfBounds(
                    f"A {what} of {nbytes} bytes touches byte {first} of local memory, of which a "
                    f"thread has {size}.",
                    int(lane),
                )
            if first % nbytes:
                raise Misaligned(
                    f"A {what} at byte {first} of local memory must be aligned to {nbytes} bytes.",
                    int(lane),
                )
        return lanes, start[:, None] + np.arange(nbytes)


# -- instructions ----------------------------------------------------------------------------------

_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32")
_WIDE_TYPES = ("b64", "u64", "s64", "f64", "b128")


def _count(m: Modifiers) -> int:
    return int(str(m.one_of("v2", "v4") or "v1")[1:])


@instruction("ld.local")
def _load(e: Emitter, i: Instruction, m: Modifiers) -> None:
    count, kind = _count(m), m.kind(*_TYPES, *_WIDE_TYPES)
    destinations = vector(e, i.operands[0])
    if len(destinations) != count:
        raise e.unknown("its operands do not fit")
    nbytes = count * KINDS[kind].bits // 8
    loaded = f"w.local_memory.load({address(e, i.operands[1])}, {nbytes}, {e.active()})"
    columns = e.local(f"{loaded}.view(t_{kind})")
    for index, destination in enumerate(destinations):
        e.write(destination, kind, f"{columns}[:, {index}].copy()")


@instruction("st.local")
def _store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    count, kind = _count(m), m.kind(*_TYPES, *_WIDE_TYPES)
    values = [e.read(operand, kind) for operand in vector(e, i.operands[1])]
    if len(values) != count:
        raise e.unknown("its operands do not fit")
    data = f"A.interleave({', '.join(values)}).view(np.uint8)"
    e.line(f"w.local_memory.store({address(e, i.operands[0])}, {data}, {e.active()})")

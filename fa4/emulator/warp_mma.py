"""`mma.sync`: one warp multiplies a 16-row A by an 8-column B, all operands in registers.

Registers of lane t, with e elements of 4 bytes in all in each of A and B
    A  register r holds row t div 4 + 8 (r mod 2), elements e (t mod 4 + 4 (r div 2)) on
    B  register r holds column t div 4, elements e (t mod 4 + 4 r) on
    D  register r is row t div 4 + 8 (r div 2), column 2 (t mod 4) + r mod 2

Products are exact and summed in float32; a tensor core's order and precision are not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.ptx import Instruction
from fa4.emulator.register_kinds import LANES
from fa4.emulator.tensor_core import Operand

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter

Array = np.ndarray[Any, Any]

ROWS, COLUMNS = 16, 8
# A lane holds 4 bytes of 8 rows of A a register.
LANE_ROWS, LANE_WORDS = 8, 4


def multiply(
    a_kind: str, b_kind: str, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]
) -> Array:
    """A B + C.

    a, b  registers of uint32 (32 lanes): 2 n of A and n of B for rows of 16 n bytes
    c     4 registers of float32
    Returns D as (4, 32 lanes) float32.
    """
    steps = len(b)
    # Axes: step, half of rows, row, word.
    a_words = np.stack(a).reshape(steps, 2, LANE_ROWS, LANE_WORDS).transpose(1, 2, 0, 3)
    b_words = np.stack(b).reshape(steps, COLUMNS, LANE_WORDS).transpose(1, 0, 2)
    left = _values(a_kind, a_words.reshape(ROWS, steps * LANE_WORDS))
    right = _values(b_kind, b_words.reshape(COLUMNS, steps * LANE_WORDS))
    product = (left @ right.T).reshape(2, LANE_ROWS, COLUMNS // 2, 2)
    return product.transpose(0, 3, 1, 2).reshape(4, LANES) + np.stack(c)


def _values(kind: str, words: Array) -> Array:
    return Operand(kind).to_f32(np.ascontiguousarray(words).view(np.uint8))


_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


@instruction("mma.sync.aligned")
def _matrix_multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Types in the order D, A, B, C; operands D, A, B, C."""
    shape = re.fullmatch(r"m16n8k(\d+)", m.rest.pop(0))
    if shape is None or m.rest[:2] != ["row", "col"]:
        raise e.unknown("its shape or layout")
    if len(m.rest) != 6 or m.rest[2] != "f32" or m.rest[5] != "f32":
        raise e.unknown("the accumulator is not f32")
    a_kind, b_kind = m.rest[3:5]
    if a_kind not in _KINDS or b_kind not in _KINDS:
        raise e.unknown(f"operands of type .{a_kind} and .{b_kind}")
    nbytes = Operand(a_kind).nbytes
    steps, rest = divmod(int(shape[1]) * nbytes, 4 * LANE_WORDS)
    if rest or steps not in (1, 2) or Operand(b_kind).nbytes != nbytes:
        raise e.unknown("no such K for these types")
    if e.predicate is not None:
        raise e.unknown("a predicate")
    d, a, b, c = (vector(e, operand) for operand in i.operands)
    if [len(d), len(a), len(b), len(c)] != [4, 2 * steps, steps, 4]:
        raise e.unknown("numbers of its registers")
    m.rest.clear()
    left, right = ([e.read(register, "u32") for register in side] for side in (a, b))
    addends = [e.read(register, "f32") for register in c]
    result = e.local(
        f"w.mma_sync({a_kind!r}, {b_kind!r}, ({', '.join(left)},), ({', '.join(right)},), "
        f"({', '.join(addends)},), full)"
    )
    for index, register in enumerate(d):
        e.write(register, "f32", f"{result}[{index}]")

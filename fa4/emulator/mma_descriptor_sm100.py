"""What a `tcgen05.mma` multiplies: its kind, and its instruction descriptor of 32 bits.

    bits   kinds f16, tf32, f8f6f4, i8           kinds mxf8f6f4, mxf4, mxf4nvf4
    0-2    sparsity (0 here)                     the same
    3      whether integers saturate             0
    4-5    type of D: f16 0, f32 1, s32 2        first byte of B's scale factors
    7-9    type of A                             the same
    10-12  type of B                             the same
    13-14  whether A, B are negated              the same
    15-16  whether A, B are MN major             the same
    17-22  N / 8                                 the same
    23     0                                     type of scale factors: ue4m3 0, ue8m0 1
    24-28  M / 16                                the same
    29-30                                        first byte of A's scale factors
    30-31  largest column shift of .ws: 0, 8,    31: whether K is 96 (0 here)
           16, 32

(PTX ISA 9, "Instruction descriptor"; sizes from its "Matrix shape".)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction
from fa4.emulator.tensor_core import Operand
from fa4.emulator.tensor_core_sums import Accumulator

_NARROW = {
    0: Operand.E4M3,
    1: Operand.E5M2,
    3: Operand.E2M3,
    4: Operand.E3M2,
    5: Operand.E2M1,
}
_PAIRS = {1: Operand.E2M1_PAIRS}
# Type codes of A and B by kind.
KINDS: dict[str, dict[int, Operand]] = {
    "f16": {0: Operand.F16, 1: Operand.BF16},
    "tf32": {2: Operand.TF32},
    "f8f6f4": _NARROW,
    "i8": {0: Operand.U8, 1: Operand.S8},
    "mxf8f6f4": _NARROW,
    "mxf4": _PAIRS,
    "mxf4nvf4": _PAIRS,
}
_ACCUMULATORS: dict[str, dict[int, Accumulator]] = {
    "f16": {0: Accumulator.F16, 1: Accumulator.F32},
    "tf32": {1: Accumulator.F32},
    "f8f6f4": {0: Accumulator.F16, 1: Accumulator.F32},
    "i8": {2: Accumulator.S32},
}
# Scale factors a row that an instruction may take, by kind.
SCALE_VECTORS = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}
_SCALE_BYTES = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}
_TRANSPOSABLE = (
    Operand.F16,
    Operand.BF16,
    Operand.TF32,
    Operand.E4M3,
    Operand.E5M2,
    Operand.S8,
    Operand.U8,
)
_ROWS = {1: (64, 128), 2: (128, 256)}  # M by CTAs in a group
_SCALED_ROWS = {1: (128,), 2: (128, 256)}
_STATIONARY_ROWS = (32, 64, 128)
_STATIONARY_COLUMNS = (64, 128, 256)
_SHIFTS = (0, 8, 16, 32)
_PLAIN_BITS = 0x1F7F_FFB0
_SCALED_BITS = 0x7FFF_FFB0


class MmaForm(NamedTuple):
    """What the opcode of a tcgen05.mma says, as the translator writes it down.

    group           CTAs that work together: 1 or 2
    kind            a key of `KINDS`
    is_ws           whether it is weight stationary (.ws)
    vectors         scale factors a row; 0 without block scaling
    scale_exponent  D is multiplied by 2 to the minus this before it is added to
    """

    group: int
    kind: str
    a_in_tensor_memory: bool
    is_ws: bool = False
    vectors: int = 0
    scale_exponent: int = 0


@dataclass(frozen=True)
class Scaling:
    """Block scaling of A and B along K.

    vectors   scale factors a row of A and of B
    is_ue8m0  their type: ue8m0, or ue4m3
    """

    vectors: int
    is_ue8m0: bool


@dataclass(frozen=True)
class MmaShape:
    """A decoded instruction descriptor, with what the opcode says.

    m, n            of the whole group
    a_sign, b_sign  1, or -1 where the operand is negated
    saturates       whether int32 sums saturate
    max_shift       largest column shift of a .ws
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
    accumulator: Accumulator = Accumulator.F32
    is_ws: bool = False
    saturates: bool = False
    max_shift: int = 0
    scaling: Scaling | None = None

    @property
    def rows(self) -> int:
        """Rows of A and D that each CTA has."""
        return self.m // self.group

    @property
    def parts(self) -> int:
        """Groups of lanes of D with a part of the columns each; see tensor_core_sm100.py."""
        if self.is_ws:
            return 128 // self.m
        return 2 if self.group == 2 and self.m == 128 else 1

    @property
    def is_interleaved(self) -> bool:
        """Whether D has 16 lanes of every 32."""
        return self.group == 1 and self.m == 64 and not self.is_ws

    @property
    def columns(self) -> int:
        """Columns of D in tensor memory."""
        return self.n // self.parts


def scale_bytes(bits: int) -> tuple[int, int]:
    """In a word of tensor memory, the first byte of A's and of B's scale factors."""
    return bits >> 29 & 0x3, bits >> 4 & 0x3


@lru_cache(maxsize=1024)
def decode_shape(
    bits: int, kind: str, group: int, is_ws: bool = False, vectors: int = 0
) -> MmaShape:
    """Decode an instruction descriptor. Raises for what is not modelled or not allowed.

    vectors  scale factors a row; 0 for kinds without block scaling
    """
    allowed = _SCALED_BITS if vectors else _PLAIN_BITS
    allowed |= (0xC000_0000 if is_ws else 0) | (0x8 if kind == "i8" else 0)
    if bits & ~allowed:
        raise UnknownInstruction(
            f"Bits {bits & ~allowed:#x} of instruction descriptor {bits:#010x} are not known."
        )
    accumulator = Accumulator.F32 if vectors else _accumulator(bits, kind)
    a, b = (KINDS[kind].get(bits >> shift & 0x7) for shift in (7, 10))
    if a is None or b is None:
        raise UnknownInstruction(
            f"Instruction descriptor {bits:#010x} has operand types {bits >> 7 & 0x7} and "
            f"{bits >> 10 & 0x7}, which are not modelled for kind::{kind}."
        )
    shape = MmaShape(
        group,
        a,
        b,
        (bits >> 24 & 0x1F) * 16,
        (bits >> 17 & 0x3F) * 8,
        bool(bits >> 15 & 1),
        bool(bits >> 16 & 1),
        -1 if bits >> 13 & 1 else 1,
        -1 if bits >> 14 & 1 else 1,
        accumulator,
        is_ws,
        bool(bits >> 3 & 1),
        _SHIFTS[bits >> 30] if is_ws else 0,
        _scaling(bits, kind, vectors) if vectors else None,
    )
    _require_size(shape)
    for name, operand, is_mn in (("A", a, shape.a_major_mn), ("B", b, shape.b_major_mn)):
        if is_mn and operand not in _TRANSPOSABLE:
            raise InvalidDescriptor(
                f"tcgen05.mma has MN-major {name} of {operand.value}; it must be K major."
            )
    if kind == "i8" and (shape.a_sign, shape.b_sign) != (1, 1):
        raise InvalidDescriptor("tcgen05.mma of kind::i8 cannot negate A or B.")
    return shape


def _accumulator(bits: int, kind: str) -> Accumulator:
    accumulator = _ACCUMULATORS[kind].get(bits >> 4 & 0x3)
    if accumulator is None:
        names = ", ".join(f"{a.value} ({code})" for code, a in _ACCUMULATORS[kind].items())
        raise InvalidDescriptor(
            f"Instruction descriptor {bits:#010x} asks for accumulators of type {bits >> 4 & 0x3}; "
            f"kind::{kind} has {names}."
        )
    return accumulator


def _scaling(bits: int, kind: str, vectors: int) -> Scaling:
    is_ue8m0 = bool(bits >> 23 & 1)
    if not is_ue8m0 and vectors != 4:
        raise InvalidDescriptor(
            f"tcgen05.mma of kind::{kind} with {vectors} scale factors a row takes them as ue8m0, "
            "not as ue4m3."
        )
    if any(byte not in _SCALE_BYTES[vectors] for byte in scale_bytes(bits)):
        raise InvalidDescriptor(
            f"tcgen05.mma with {vectors} scale factors a row takes them from bytes "
            f"{scale_bytes(bits)} of A's and B's words; allowed are {_SCALE_BYTES[vectors]}."
        )
    return Scaling(vectors, is_ue8m0)


def _require_size(shape: MmaShape) -> None:
    m, n, group = shape.m, shape.n, shape.group
    if shape.is_ws:
        if m not in _STATIONARY_ROWS or n not in _STATIONARY_COLUMNS:
            raise InvalidDescriptor(
                f"tcgen05.mma.ws has M = {m} and N = {n}; allowed are M of {_STATIONARY_ROWS} with "
                f"N of {_STATIONARY_COLUMNS}."
            )
        return
    rows = _ROWS[group] if shape.scaling is None else _SCALED_ROWS[group]
    step = 8 * group * (2 if shape.b.nbytes == 1 and shape.b_major_mn else 1)
    is_odd_integer = shape.accumulator is Accumulator.S32 and n > 24 and n % 16 != 0
    if m not in rows or not step <= n <= 256 or n % step or is_odd_integer:
        raise InvalidDescriptor(
            f"tcgen05.mma of cta_group::{group} has M = {m} and N = {n}; allowed are M of "
            f"{rows} with N a multiple of {step} up to 256"
            + (", of integers from 32 on a multiple of 16." if is_odd_integer else ".")
        )

"""tcgen05.mma: descriptors of its operands, and one matrix product as a few instructions.

Written as PTX on purpose: `cute.gemm` elects a lane anew for every instruction, and the MMA warp
would spend more issue slots on elections than on products.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32

K_STEP = 16  # of the reduced dimension in one instruction, for 16-bit types
TMEM_STEP = 8  # columns of tensor memory for it, two elements each
ELEMENT_BYTES = 2
ATOM_ROWS = 8  # rows over which a swizzle repeats

# Layout field of a shared-memory descriptor (PTX ISA, "Shared memory descriptor"), by the bytes
# of a swizzled row.
SWIZZLES = {128: 2, 64: 4, 32: 6}
TYPES = {Float16: 0, BFloat16: 1}


def row_bytes(dim: int) -> int:
    """Bytes of a swizzled row in a tile of ``dim`` 16-bit elements a row: as wide as divides it.

    `cutlass.utils.blackwell_helpers.make_smem_layout` chooses the same.
    """
    return next(width for width in SWIZZLES if dim * ELEMENT_BYTES % width == 0)


def shared_descriptor(leading_bytes: int, stride_bytes: int, swizzle_bytes: int) -> int:
    """A matrix descriptor but for its address, which the lowest 14 bits take in units of 16 B."""
    version = 1
    return (
        (leading_bytes >> 4) << 16
        | (stride_bytes >> 4) << 32
        | version << 46
        | SWIZZLES[swizzle_bytes] << 61
    )


class Operand:
    """A tile (rows, dim) in shared memory as TMA writes it: rows of ``row_bytes``, swizzled.

    Element (r, c) is at byte (c div w) rows W + r W + (c mod w) 2 with W = row_bytes(dim) and
    w = W / 2, before the swizzle.

    descriptor  without the address
    steps       distance of each k-step from the first, in units of 16 bytes
    """

    def __init__(self, rows: int, dim: int, is_transposed: bool):
        """As a K-major operand, k along dim; or transposed: MN-major, k along the rows."""
        width = row_bytes(dim)
        group = ATOM_ROWS * width
        if is_transposed:
            self.descriptor = shared_descriptor(rows * width, group, width)
            step = K_STEP * width
            offsets = [k * step for k in range(rows // K_STEP)]
        else:
            self.descriptor = shared_descriptor(16, group, width)
            in_row = width // (K_STEP * ELEMENT_BYTES)
            offsets = [
                k // in_row * rows * width + k % in_row * K_STEP * ELEMENT_BYTES
                for k in range(dim // K_STEP)
            ]
        self.is_mn_major = is_transposed
        self.steps = tuple(offset >> 4 for offset in offsets)


def instruction_descriptor(dtype, m: int, n: int, b_is_mn_major: bool) -> int:
    """D fp32, A K-major, A and B of ``dtype`` (PTX ISA, "Instruction descriptor")."""
    fp32 = 1
    kind = TYPES[dtype]
    return fp32 << 4 | kind << 7 | kind << 10 | b_is_mn_major << 16 | n // 8 << 17 | m // 16 << 24


def multiply(
    accumulator: Int32,
    a: Int32,
    a_operand: Operand | None,
    b: Int32,
    b_operand: Operand,
    instruction: int,
    accumulates: Int32,
    ctas: int,
):
    """Issue accumulator (+)= A B over all k-steps, by one lane of the calling warp.

    accumulator  address in tensor memory
    a            shared-memory address of the first element, or with a_operand None the address
                 in tensor memory, where a k-step takes 8 columns
    b            shared-memory address of the first element
    accumulates  0: the accumulator starts from 0
    ctas         2: by the even CTA of a pair, for both

    Every lane of the warp must have the same arguments, whichever of them issues. They are not
    broadcast to make sure of it: that is a shuffle an argument in PTX, and the assembler moves them
    to uniform registers with or without.
    """
    lines = [
        "{",
        ".reg .pred issues, adds;",
        ".reg .b32 low, a_high, b_high;",
        ".reg .b64 a, b;",
        "elect.sync _|issues, -1;",
        "setp.ne.b32 adds, {$r3}, 0;",
        f"mov.b32 b_high, {b_operand.descriptor >> 32};",
    ]
    if a_operand is not None:
        lines.append(f"mov.b32 a_high, {a_operand.descriptor >> 32};")
    for k, step in enumerate(b_operand.steps):
        left = f"[{{$r1}} + {TMEM_STEP * k}]"
        if a_operand is not None:
            lines.append(f"add.u32 low, {{$r1}}, {a_operand.steps[k]};")
            lines.append("mov.b64 a, {low, a_high};")
            left = "a"
        lines.append(f"add.u32 low, {{$r2}}, {step};")
        lines.append("mov.b64 b, {low, b_high};")
        lines.append(
            f"@issues tcgen05.mma.cta_group::{ctas}.kind::f16 [{{$r0}}], {left}, b, "
            f"{instruction}, {'adds' if k == 0 else '1'};"
        )
    lines.append("}")
    first_a = a if a_operand is None else low_word(a, a_operand)
    operands = [accumulator, first_a, low_word(b, b_operand), accumulates]
    cute.arch.inline_ptx("\n".join(lines), read_only_args=operands)


def low_word(address: Int32, operand: Operand) -> Int32:
    """Lower half of a matrix descriptor with its address."""
    return ((address & 0x3FFFF) >> 4) | Int32(operand.descriptor & 0xFFFFFFFF)

"""mma.sync against products of whole matrices; the registers are laid out as the PTX ISA says."""

import numpy as np
import pytest

from fa4.emulator import float_formats
from fa4.emulator.errors import EmulationError, UnknownInstruction
from tests.emulator.ptx_kernels import run_body

LANE = np.arange(32)
ENCODE = {
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "bf16": lambda x: float_formats.f32_to_bf16(x),
    "tf32": lambda x: x.view(np.uint32) & np.uint32(0xFFFFE000),
    "e4m3": lambda x: (
        np.abs(float_formats.E4M3[:127, None] - x.reshape(1, -1))
        .argmin(0)
        .astype(np.uint8)
        .reshape(x.shape)
    ),
    "e5m2": lambda x: (
        np.abs(float_formats.E5M2[:124, None] - x.reshape(1, -1))
        .argmin(0)
        .astype(np.uint8)
        .reshape(x.shape)
    ),
}
DECODE = {
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bf16": float_formats.bf16_to_f32,
    "tf32": lambda bits: bits.view(np.float32),
    "e4m3": float_formats.e4m3_to_f32,
    "e5m2": float_formats.e5m2_to_f32,
}
CASES = [
    ("bf16", "bf16", 8),
    ("bf16", "bf16", 16),
    ("f16", "f16", 8),
    ("f16", "f16", 16),
    ("tf32", "tf32", 4),
    ("tf32", "tf32", 8),
    ("e4m3", "e4m3", 16),
    ("e4m3", "e5m2", 32),
]


def pick(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Registers (32,) uint32 of the elements at (32,) rows and (32, elements) columns."""
    elements = matrix[rows[:, None], columns]
    return np.ascontiguousarray(elements).view(np.uint32).reshape(32)


def run(a_kind: str, b_kind: str, k: int, a: np.ndarray, b: np.ndarray, c: np.ndarray):
    """D of one mma.sync of bits a (16, k), b (8, k) and float32 c (16, 8)."""
    elements = 4 // a.itemsize
    own = elements * (LANE % 4)[:, None] + np.arange(elements)
    steps = k // (4 * elements)
    a_registers = [
        pick(a, LANE // 4 + 8 * (r % 2), own + 4 * elements * (r // 2)) for r in range(2 * steps)
    ]
    b_registers = [pick(b, LANE // 4, own + 4 * elements * r) for r in range(steps)]
    places = [(LANE // 4 + 8 * (r // 2), 2 * (LANE % 4) + r % 2) for r in range(4)]
    c_registers = [c[place].view(np.uint32) for place in places]
    inputs = np.stack([*a_registers, *b_registers, *c_registers])
    output = np.zeros((4, 32), np.float32)
    body = "shl.b64 %rd10, %rd60, 2; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;\n"
    for index in range(len(inputs)):
        body += f"ld.global.b32 %r{index}, [%rd11+{128 * index}];\n"
    names = iter(f"%r{index}" for index in range(len(inputs)))
    groups = [
        "{" + ", ".join(next(names) for _ in range(count)) + "}" for count in (2 * steps, steps, 4)
    ]
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{a_kind}.{b_kind}.f32 "
    body += "{%r20, %r21, %r22, %r23}, " + ", ".join(groups) + ";\n"
    for index in range(4):
        body += f"st.global.b32 [%rd12+{128 * index}], %r{20 + index};\n"
    run_body(body, [inputs, output])
    d = np.zeros((16, 8), np.float32)
    for place, register in zip(places, output, strict=True):
        d[place] = register
    return d


@pytest.mark.parametrize(("a_kind", "b_kind", "k"), CASES)
def test_product_is_that_of_the_matrices(a_kind: str, b_kind: str, k: int) -> None:
    rng = np.random.default_rng(k)
    a = ENCODE[a_kind](rng.normal(size=(16, k)).astype(np.float32))
    b = ENCODE[b_kind](rng.normal(size=(8, k)).astype(np.float32))
    c = rng.normal(size=(16, 8)).astype(np.float32)
    exact = DECODE[a_kind](a).astype(np.float64) @ DECODE[b_kind](b).astype(np.float64).T + c
    assert np.abs(run(a_kind, b_kind, k, a, b, c) - exact).max() < 1e-5


def test_tensor_cores_ignore_the_low_bits_of_tf32() -> None:
    a, b = np.ones((16, 8), np.float32), np.ones((8, 8), np.float32)
    rounded = run("tf32", "tf32", 8, a + np.float32(2**-11), b, np.zeros((16, 8), np.float32))
    assert (rounded == 8).all()


OPERANDS = "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 ",
        "mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 ",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 ",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 ",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 ",
    ],
)
def test_other_forms_are_refused_by_name(opcode: str) -> None:
    with pytest.raises(UnknownInstruction, match=r"mma\.sync\.aligned\.m"):
        run_body(opcode + OPERANDS)


def test_part_of_a_warp_cannot_multiply() -> None:
    body = "setp.lt.u32 %p1, %r60, 16; @!%p1 bra END;" + MMA + OPERANDS + "END: mov.b32 %r1, 0;"
    with pytest.raises(EmulationError, match=r"mma.sync is executed by a part of the warp"):
        run_body(body)

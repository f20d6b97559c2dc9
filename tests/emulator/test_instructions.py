"""Single instructions, run as kernels of one instruction: values, predication, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4.emulator.errors import UnknownInstruction
from tests.emulator.ptx_kernels import run_body, run_instruction

I32 = [5, -7, 2**31 - 1, -(2**31)]
J32 = [3, 2, 1, -1]
F32 = [1.5, -2.25, np.inf, np.nan]
G32 = [0.5, 3.0, 1.0, 1.0]


def wrapped(values: list[int], bits: int = 32) -> list[int]:
    return [(v + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for v in values]


INTEGER_CASES: list[tuple[str, str, list[tuple[str, Any]], list[int]]] = [
    ("add.s32", "s32", [("s32", I32), ("s32", J32)], wrapped([8, -5, 2**31, -(2**31) - 1])),
    ("sub.s32", "s32", [("s32", I32), ("", "-3")], wrapped([8, -4, 2**31 + 2, -(2**31) + 3])),
    ("mul.lo.s32", "s32", [("s32", I32[:3]), ("", "3")], wrapped([15, -21, 3 * (2**31 - 1)])),
    ("mul.hi.s32", "s32", [("s32", I32), ("s32", I32)], [0, 0, 2**30 - 1, 2**30]),
    ("mul.hi.u32", "u32", [("u32", [2**31, 2**32 - 1]), ("", "4")], [2, 3]),
    ("mul.wide.s32", "s64", [("s32", I32), ("s32", J32)], [15, -14, 2**31 - 1, 2**31]),
    ("mul.wide.u16", "u32", [("u16", [65535, 2]), ("", "65535")], [65535**2, 131070]),
    ("mul.wide.s16", "s32", [("s16", [-300, 7]), ("", "128")], [-38400, 896]),
    ("mad.lo.s32", "s32", [("s32", [4, -4]), ("", "5"), ("s32", [1, 2])], [21, -18]),
    ("mad.wide.u32", "u64", [("u32", [2**31]), ("", "4"), ("u64", [5])], [2**33 + 5]),
    ("min.s32", "s32", [("s32", I32), ("s32", J32)], [3, -7, 1, -(2**31)]),
    ("min.relu.s32", "s32", [("s32", I32), ("s32", J32)], [3, 0, 1, 0]),
    ("max.u32", "u32", [("u32", [1, 2**31]), ("", "7")], [7, 2**31]),
    ("div.s32", "s32", [("s32", [7, -7]), ("s32", [-2, 2])], [-3, -3]),
    ("rem.u32", "u32", [("u32", [7, 100]), ("", "10")], [7, 0]),
    ("and.b32", "u32", [("u32", [0xF0F0]), ("", "-16")], [0xF0F0]),
    ("or.b64", "u64", [("u64", [1]), ("", "4611686293305360384")], [4611686293305360385]),
    ("xor.b16", "u16", [("u16", [0xFF]), ("", "0x0F0F")], [0x0FF0]),
    ("not.b32", "s32", [("s32", [0, -1])], [-1, 0]),
    ("shl.b32", "u32", [("u32", [3, 3]), ("u32", [31, 32])], [2**31, 0]),
    ("shr.s32", "s32", [("s32", [-8, -8]), ("u32", [1, 40])], [-4, -1]),
    ("shr.u16", "u16", [("u16", [0x8000]), ("", "9")], [64]),
    ("shr.s16", "s16", [("s16", [-1000]), ("", "3")], [-125]),
    ("neg.s32", "s32", [("s32", [5, -(2**31)])], [-5, -(2**31)]),
    ("abs.s32", "s32", [("s32", [-5, 5])], [5, 5]),
    ("popc.b32", "u32", [("u32", [7, 0])], [3, 0]),
    ("clz.b32", "u32", [("u32", [1, 0])], [31, 32]),
    ("bfind.u32", "u32", [("u32", [9, 0])], [3, 2**32 - 1]),
    ("bfe.u32", "u32", [("u32", [0xABCD]), ("", "4"), ("", "8")], [0xBC]),
    ("bfi.b32", "u32", [("u32", [0xF]), ("u32", [0]), ("", "8"), ("", "4")], [0xF00]),
    ("prmt.b32", "u32", [("u32", [0x33221100]), ("u32", [0x77665544]), ("", "0x5410")],
     [0x55441100]),
    ("shf.l.wrap.b32", "u32", [("u32", [0x80000000]), ("u32", [1]), ("", "33")], [3]),
    ("lop3.b32", "u32", [("u32", [12]), ("u32", [10]), ("u32", [6]), ("", "0x96")], [0]),
    ("selp.b32", "u32", [("u32", [1, 2]), ("", "9"), ("pred", [True, False])], [1, 9]),
    ("mov.b32", "u32", [("", "0f3F800000")], []),
    ("cvt.s32.s8", "s32", [("u32", [0x1FF, 0x7F])], [-1, 127]),
    ("cvt.s16.s8", "s16", [("s16", [0x80, 5])], [-128, 5]),
    ("cvt.u16.u32", "u16", [("u32", [0x12345])], [0x2345]),
    ("cvt.u64.u32", "u64", [("u32", [2**32 - 1])], [2**32 - 1]),
    ("cvt.s64.s32", "s64", [("s32", [-3])], [-3]),
    ("cvt.sat.u8.s32", "u32", [("s32", [300, -4, 7])], [255, 0, 7]),
    ("cvt.rzi.s32.f32", "s32", [("f32", [-2.7, 1e20])], [-2, 2**31 - 1]),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "result", "sources", "expected"), INTEGER_CASES)
def test_integers(opcode: str, result: str, sources: Any, expected: list[int]) -> None:
    if not any(kind for kind, _ in sources):
        sources = [*sources]
        output = np.zeros(32, np.uint32)
        run_body(f"{opcode} %r1, {sources[0][1]};" + STORE_R1, [output])
        assert (output == 0x3F800000).all()
        return
    assert run_instruction(opcode, result, *sources).tolist()[: len(expected)] == expected


STORE_R1 = "\nmad.lo.u64 %rd50, %rd60, 4, %rd0;\nst.global.b32 [%rd50], %r1;\n"

FLOAT_CASES: list[tuple[str, str, list[tuple[str, Any]], list[float]]] = [
    ("add.f32", "f32", [("f32", F32), ("f32", G32)], [2.0, 0.75, np.inf, np.nan]),
    ("sub.f32", "f32", [("f32", F32), ("", "0f3F800000")], [0.5, -3.25, np.inf, np.nan]),
    ("mul.f32", "f32", [("f32", F32), ("f32", G32)], [0.75, -6.75, np.inf, np.nan]),
    ("add.rm.f32", "f32", [("f32", [1.0]), ("f32", [-(2.0**-40)])], [1 - 2.0**-24]),
    ("mul.rz.f32", "f32", [("f32", [1 + 2**-23]), ("f32", [1 + 2**-23])], [1 + 2**-22]),
    ("add.ftz.f32", "f32", [("f32", [2.0**-127]), ("f32", [2.0**-127])], [0.0]),
    ("mul.sat.f32", "f32", [("f32", [3.0, -1.0]), ("f32", [1.0, 1.0])], [1.0, 0.0]),
    ("fma.rn.f32", "f32", [("f32", [1 + 2**-12]), ("f32", [1 + 2**-12]), ("", "0fBF800000")],
     [2**-11 + 2**-24]),
    ("fma.rn.f32.bf16", "f32", [("u16", [0x3FC0]), ("u16", [0x4000]), ("f32", [0.25])], [3.25]),
    ("max.f32", "f32", [("f32", F32), ("f32", G32)], [1.5, 3.0, np.inf, 1.0]),
    ("max.NaN.f32", "f32", [("f32", F32), ("f32", G32)], [1.5, 3.0, np.inf, np.nan]),
    ("max.f32", "f32", [("f32", [1.0]), ("f32", [4.0]), ("f32", [2.0])], [4.0]),
    ("min.f32", "f32", [("f32", [np.nan]), ("f32", [4.0])], [4.0]),
    ("add.rn.f32.bf16", "f32", [("u16", [0x3FC0]), ("f32", [0.25])], [1.75]),
    ("sub.f32.f16", "f32", [("f16", [1.5]), ("f32", [0.25])], [1.25]),
    ("neg.f32", "f32", [("f32", [1.0])], [-1.0]),
    ("abs.f32", "f32", [("f32", [-1.0])], [1.0]),
    ("div.rn.f32", "f32", [("f32", [1.0]), ("f32", [3.0])], [float(np.float32(1) / np.float32(3))]),
    ("rcp.rn.f32", "f32", [("f32", [4.0, 0.0])], [0.25, np.inf]),
    ("rcp.approx.ftz.f32", "f32", [("f32", [4.0, 2.0**-127])], [0.25, np.inf]),
    ("ex2.approx.ftz.f32", "f32", [("f32", [3.0, -127.0])], [8.0, 0.0]),
    ("lg2.approx.ftz.f32", "f32", [("f32", [8.0, 0.0])], [3.0, -np.inf]),
    ("tanh.approx.f32", "f32", [("f32", [0.0, 50.0])], [0.0, 1.0]),
    ("selp.f32", "f32", [("f32", [1.0, 1.0]), ("", "0fFF800000"), ("pred", [True, False])],
     [1.0, -np.inf]),
    ("cvt.rn.f32.s32", "f32", [("s32", [2**24 + 1, -3])], [2.0**24, -3.0]),
    ("cvt.rp.f32.s32", "f32", [("s32", [2**24 + 1])], [2.0**24 + 2]),
    ("cvt.f32.f16", "f32", [("f16", [1.5])], [1.5]),
    ("cvt.f32.bf16", "f32", [("u16", [0x3FC0])], [1.5]),
    ("cvt.rn.f16.f32", "f16", [("f32", [1 + 2**-11])], [1.0]),
    ("add.f16", "f16", [("f16", [1.5]), ("f16", [2.0])], [3.5]),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "result", "sources", "expected"), FLOAT_CASES)
def test_floats(opcode: str, result: str, sources: Any, expected: list[float]) -> None:
    found = run_instruction(opcode, result, *sources)
    np.testing.assert_array_equal(found[: len(expected)].astype(np.float64), expected)


COMPARISONS: list[tuple[str, str, list[Any], list[Any], list[bool]]] = [
    ("setp.lt.s32", "s32", [-1, 1], [0, 0], [True, False]),
    ("setp.lt.u32", "u32", [2**32 - 1, 1], [0, 2], [False, True]),
    ("setp.lo.u32", "u32", [1], [2], [True]),
    ("setp.ge.s32", "s32", [0, -1], [0, 0], [True, False]),
    ("setp.ne.b32", "u32", [1, 2], [1, 1], [False, True]),
    ("setp.eq.b16", "u16", [1, 2], [1, 1], [True, False]),
    ("setp.eq.f32", "f32", [1, np.nan], [1, np.nan], [True, False]),
    ("setp.ne.f32", "f32", [1, np.nan, 2], [1, 1, 1], [False, False, True]),
    ("setp.neu.f32", "f32", [1, np.nan, 2], [1, 1, 1], [False, True, True]),
    ("setp.ltu.f32", "f32", [1, np.nan], [0, 1], [False, True]),
    ("setp.num.f32", "f32", [1, np.nan], [0, 1], [True, False]),
    ("setp.nan.f32", "f32", [1, np.nan], [0, 1], [False, True]),
]


@pytest.mark.parametrize(("opcode", "kind", "a", "b", "expected"), COMPARISONS)
def test_comparisons(opcode: str, kind: str, a: Any, b: Any, expected: list[bool]) -> None:
    assert run_instruction(opcode, "pred", (kind, a), (kind, b)).tolist() == expected


def test_comparisons_combine_with_a_predicate() -> None:
    both = [("s32", [1, 1]), ("s32", [2, 2]), ("pred", [True, False])]
    assert run_instruction("setp.lt.and.s32", "pred", *both).tolist() == [True, False]
    assert run_instruction("setp.gt.or.s32", "pred", *both).tolist() == [True, False]
    assert run_instruction("setp.lt.xor.s32", "pred", *both).tolist() == [False, True]


def test_comparison_with_two_destinations() -> None:
    output = np.zeros(32, np.uint32)
    body = "setp.lt.u32 %p1|%p2, %r60, 5;\nselp.b32 %r1, 1, 0, %p1;\nselp.b32 %r2, 2, 0, %p2;\n"
    run_body(body + "or.b32 %r1, %r1, %r2;" + STORE_R1, [output])
    assert output.tolist() == [1] * 5 + [2] * 27


def test_packed_arithmetic() -> None:
    pairs = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32).view(np.uint64).reshape(-1)
    found = run_instruction("fma.rn.f32x2", "u64", *[("u64", pairs)] * 3)
    assert found.view(np.float32).tolist() == [2.0, 6.0, 12.0, 12.0]
    low = run_instruction("add.rm.f32x2", "u64", ("u64", pairs), ("u64", pairs))
    assert low.view(np.float32).tolist() == [2.0, 4.0, 6.0, -8.0]
    halves = np.array([[1.0, 2.0]], np.float16).view(np.uint32).reshape(-1)
    found = run_instruction("mul.f16x2", "u32", ("u32", halves), ("u32", halves))
    assert found.view(np.float16).tolist() == [1.0, 4.0]
    bf16 = np.array([0x3F80_4000], np.uint32)  # 1 and 2
    found = run_instruction("fma.rn.bf16x2", "u32", *[("u32", bf16)] * 3)
    assert found.tolist() == [0x4000_40C0]


def test_extremes_of_bf16() -> None:
    pairs = np.array([0x3F80_C000, 0x7FC0_4000], np.uint32)  # 1, -2 and NaN, 2
    others = np.array([0x4000_BF80, 0x3F80_7FC0], np.uint32)  # 2, -1 and 1, NaN
    sources = [("u32", pairs), ("u32", others)]
    assert run_instruction("max.bf16x2", "u32", *sources).tolist() == [0x4000_BF80, 0x3F80_4000]
    assert run_instruction("min.bf16x2", "u32", *sources).tolist() == [0x3F80_C000, 0x3F80_4000]
    assert run_instruction("max.NaN.bf16x2", "u32", *sources).tolist()[1] == 0x7FFF_7FFF


def test_pairs_of_bytes_and_of_halves() -> None:
    halves = np.array([[1.0, -2.0], [1000.0, 2.0**-9]], np.float16).view(np.uint32).reshape(-1)
    to_bytes = "cvt.rn.satfinite.e4m3x2.f16x2"
    assert run_instruction(to_bytes, "u16", ("u32", halves)).tolist() == [0xC038, 0x017E]
    bf16 = np.array([0xC000_3F80], np.uint32)  # 1 in the lower half
    found = run_instruction("cvt.rn.satfinite.e5m2x2.bf16x2", "u16", ("u32", bf16))
    assert found.tolist() == [0xC03C]
    back = run_instruction("cvt.rn.f16x2.e4m3x2", "u32", ("u16", [0xC038, 0x017E]))
    assert back.view(np.float16).tolist() == [1.0, -2.0, 448.0, 2.0**-9]


def test_packed_conversions() -> None:
    sources = [("f32", [1.0]), ("f32", [-2.0])]
    assert run_instruction("cvt.rn.bf16x2.f32", "u32", *sources).tolist() == [0x3F80C000]
    assert run_instruction("cvt.rn.f16x2.f32", "u32", *sources).tolist() == [0x3C00C000]
    assert run_instruction("cvt.rn.satfinite.e4m3x2.f32", "u16", *sources).tolist() == [0x38C0]


def test_words_are_packed_and_unpacked_in_order() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        "mov.b32 %r2, 7;\nmov.b64 %rd10, {%r60, %r2};\nshl.b64 %rd10, %rd10, 1;\n"
        "mov.b64 {%r3, %r4}, %rd10;\nmad.lo.u32 %r1, %r4, 1000, %r3;" + STORE_R1,
        [output],
    )
    assert output.tolist() == [14000 + 2 * lane for lane in range(32)]


def test_predicated_instructions_keep_the_old_value() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        "mov.b32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 3;\n@%p1 mov.b32 %r1, %r60;\n"
        "@!%p1 add.u32 %r1, %r1, 4;" + STORE_R1,
        [output],
    )
    assert output.tolist() == [0, 1, 2] + [5] * 29


def test_predicated_stores_leave_other_lanes_alone() -> None:
    output = np.full(32, 9, np.uint32)
    body = "setp.gt.u32 %p1, %r60, 29;\nmad.lo.u64 %rd50, %rd60, 4, %rd0;\n"
    run_body(body + "@%p1 st.global.b32 [%rd50], %r60;\n", [output])
    assert output.tolist() == [9] * 30 + [30, 31]


def test_special_registers() -> None:
    output = np.zeros((2, 64, 4), np.uint32)
    run_body(
        "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\nmad.lo.u32 %r4, %r2, %r3, %r60;\n"
        "mul.wide.u32 %rd40, %r4, 16;\nadd.s64 %rd40, %rd40, %rd0;\nmov.u32 %r5, %laneid;\n"
        "mov.u32 %r6, %nctaid.x;\nst.global.v4.b32 [%rd40], {%r60, %r5, %r6, %r2};\n",
        [output],
        threads=64,
        grid=2,
    )
    for cta in range(2):
        assert output[cta, :, 0].tolist() == list(range(64))
        assert output[cta, :, 1].tolist() == list(range(32)) * 2
        assert (output[cta, :, 2] == 2).all()
        assert (output[cta, :, 3] == cta).all()


@pytest.mark.parametrize(
    "statement",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.funny.s32 %r1, %r2, %r3;",
        "add.sat.s32 %r1, %r2, %r3;",
        "fma.rn.relu.f16 %h1, %h2, %h3, %h4;",
        "max.relu.f32 %r1, %r2, %r3;",
        "cvt.rn.relu.bf16x2.f32 %r1, %r2, %r3;",
        "setp.lo.s32 %p1, %r2, %r3;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "mov.u32 %r1, %clock;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%r1], [%rd1, {%r2, %r3}], [%r4];",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, %rd1, %rd2, %p1, 1, 1, 0,0;",
        "add.s32 %rd1, %rd2, %rd3;",
    ],
)
def test_what_is_not_modelled_is_an_error_that_names_it(statement: str) -> None:
    with pytest.raises(UnknownInstruction) as raised:
        run_body(statement + "\n")
    named = "%clock" if "clock" in statement else statement.split()[0]
    assert named in str(raised.value)

"""Modelled costs: single instructions by hand, and our forward kernel by the roofline formulas."""

from __future__ import annotations

import pytest
import torch

import fa4
from fa4.dispatch import decide
from fa4.emulator.costs import CostReport, Costs, cost_report, instruction_clocks
from fa4.emulator.device import prepare_forward
from fa4.emulator.ptx import parse
from tests.emulator.ptx_kernels import kernel_text

ACCUMULATORS = ", ".join(["%r1"] * 64)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("mov.b32 %r1, %r2;", {}),
        ("ld.param.b32 %r1, [p0];", {}),
        ("add.f32 %r1, %r2, %r3;", {"issue": 0.25, "fma": 0.25}),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", {"issue": 0.25, "fma": 0.5}),
        ("add.s32 %r1, %r2, %r3;", {"issue": 0.25, "alu": 0.5}),
        ("cvt.rn.bf16x2.f32 %r1, %r2, %r3;", {"issue": 0.25, "alu": 0.5}),
        ("ex2.approx.ftz.f32 %r1, %r2;", {"issue": 0.25, "exp": 2}),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", {"issue": 0.25, "shared": 1}),
        ("st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};", {"issue": 0.25, "shared": 4}),
        ("ld.global.b32 %r1, [%rd0];", {"issue": 0.25}),
        ("bar.sync 0;", {"issue": 0.25}),
        (
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};",
            {"issue": 0.25, "shared": 4},
        ),
        # 64 x 128 x 16: 262144 FLOP; B 4096 bytes, A 2048 where it comes from shared memory.
        (
            f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{ACCUMULATORS}}}, %rd1, %rd2,"
            " %p1, 1, 1, 0, 0;",
            {"issue": 0.25, "tensor": 16, "shared": 12},
        ),
        (
            f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{ACCUMULATORS}}},"
            " {%r1, %r2, %r3, %r4}, %rd2, %p1, 1, 1, 0;",
            {"issue": 0.25, "tensor": 16, "shared": 8},
        ),
        (
            f"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {{{ACCUMULATORS}}}, %rd1, %rd2,"
            " %p1, 1, 1;",
            {"issue": 0.25, "tensor": 16, "shared": 12},
        ),
    ],
)
def test_clocks_of_one_instruction(statement: str, expected: dict[str, float]) -> None:
    kernel = parse(kernel_text(statement, 1)).kernels["kernel"]
    index = -2  # the last one is ret
    assert instruction_clocks(kernel.instructions[index]) == expected


def forward_report(seqlen_k: int, head_dim: int, multiprocessors: int = 1) -> CostReport:
    q = torch.randn(1, 384, 1, head_dim, dtype=torch.bfloat16)
    k = torch.randn(1, seqlen_k, 1, head_dim, dtype=torch.bfloat16)
    decision = decide(fa4.explain(q, k, k).problem, "sm_90a")
    prepared, _, _ = prepare_forward(
        decision, q, k, k, None, None, None, False, multiprocessors=multiprocessors
    )
    (report,) = prepared.execute()
    return cost_report(report.launch, report.statistics)


@pytest.mark.parametrize(("head_dim", "tile_m"), [(64, 192), (128, 128)])
def test_a_key_block_of_the_forward_kernel_costs_what_the_roofline_says(
    head_dim: int, tile_m: int
) -> None:
    """Blocks of 128 keys; all the query tiles of 384 rows."""
    difference = forward_report(640, head_dim).total - forward_report(512, head_dim).total
    tiles, tile_n = 384 // tile_m, 128
    warpgroups = tile_m // 64
    clocks = {unit: number / tiles for unit, number in difference.clocks.items()}
    assert clocks["tensor"] == 2 * tile_m * tile_n * 2 * head_dim / 4096
    # An exponential an element, and none to rescale what there is.
    assert clocks["exp"] == tile_m * tile_n / 16
    operands = warpgroups * (head_dim // 16) * (2048 + tile_n * 32)  # Q and K of the first product
    operands += warpgroups * (tile_n // 16) * head_dim * 32  # V of the second: P is in registers
    copies = tile_n * 2 * head_dim * 2
    # Nothing else: whole blocks keep the rows' maxima, for which lanes would have to meet.
    assert clocks["shared"] == pytest.approx((operands + copies) / 128)
    assert difference.busiest == "tensor"
    if head_dim == 64:
        assert clocks["exp"] == clocks["tensor"]
    assert difference.loaded_bytes == tiles * copies
    assert difference.stored_bytes == 0


def test_costs_of_all_ctas_are_added_and_shown() -> None:
    one, three = forward_report(256, 128), forward_report(256, 128, multiprocessors=3)
    for unit in ("tensor", "exp", "fma"):
        assert one.total.clocks[unit] == three.total.clocks[unit]
    assert one.total.stored_bytes == three.total.stored_bytes == 384 * 128 * 2
    text = str(one)
    assert "modelled" in text
    assert f"busiest: {one.total.busiest}" in text
    assert [line.split()[0] for line in text.splitlines()[1:6]] == [
        "warps", "0-3", "4-7", "8-11", "all",
    ]  # fmt: skip


def test_costs_add_and_subtract() -> None:
    report = forward_report(128, 128)
    total = report.total
    nothing = total - total
    assert nothing == Costs(0, dict.fromkeys(total.clocks, 0.0))
    assert nothing + total == total

"""Bounds by hand, for the tiles of the published tables, and the share reached of a CSV."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pd = pytest.importorskip("pandas")
from perf import roofline  # noqa: E402  needs pandas
from perf.cases import dense  # noqa: E402

PEAK_1755 = 132 * 4096 * 1.755e9 / 1e12  # of the tensor cores


def tile(
    head_dim: int, tile_m: int, tile_n: int, head_dim_v: int | None = None, **more: object
) -> SimpleNamespace:
    """A schedule, as far as costs look at it."""
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    return SimpleNamespace(**dims, tile_m=tile_m, tile_n=tile_n, **more)


# head_dim, head_dim_v, tile_m, tile_n -> tensor, exp, shared: clocks of one key block, worked out
# by hand from the units' rates.
FORWARD = [
    ((64, 64, 192, 128), (1536, 1536, 1216)),
    ((96, 96, 128, 160), (1920, 1280, 1632)),
    ((128, 128, 128, 128), (2048, 1024, 1792)),
    ((128, 128, 128, 160), (2560, 1280, 2176)),
    ((192, 128, 128, 128), (2560, 1024, 2304)),
    ((256, 256, 128, 80), (2560, 640, 2432)),
]


@pytest.mark.parametrize(("sizes", "clocks"), FORWARD, ids=str)
def test_clocks_of_a_forward_block(sizes: tuple[int, ...], clocks: tuple[int, ...]) -> None:
    head_dim, head_dim_v, tile_m, tile_n = sizes
    cost = roofline.forward_cost(tile(head_dim, tile_m, tile_n, head_dim_v))
    assert (cost.tensor, cost.exp, cost.shared) == clocks
    assert cost.issue is None
    assert cost.clocks == max(clocks)


def test_clocks_of_the_backward_kernels_without_atomics() -> None:
    dkv = roofline.dkv_cost(tile(256, tile_m=80, tile_n=64))
    assert (dkv.tensor, dkv.exp, dkv.shared) == (2560, 320, 2592)
    dq = roofline.dq_cost(tile(256, tile_m=128, tile_n=64))
    assert (dq.tensor, dq.exp, dq.shared) == (3072, 512, 3072)
    # Seven products are executed and five count: at most 5/7 of the peak.
    bound = roofline.bound_tflops([dkv, dq], roofline.backward_flop(256, 256), 1755)
    assert 0.98 * 5 / 7 < bound / PEAK_1755 < 5 / 7


def test_clocks_of_the_backward_kernel_that_makes_all_gradients() -> None:
    narrow = roofline.one_kernel_cost(tile(128, tile_m=64, tile_n=128))
    # K and V are read again for each block: as A operands, and K as B operand of dQ. The steps of
    # statistics take 128 clocks of both, their loads 16, the additions of dQ 256.
    assert (narrow.tensor, narrow.exp, narrow.shared) == (2560 + 128, 512, 2432 + 128 + 16 + 256)
    wide = roofline.one_kernel_cost(tile(64, tile_m=128, tile_n=128))
    assert (wide.tensor, wide.exp, wide.shared) == (2560 + 256, 1024, 2304 + 192 + 32 + 256)


def test_the_limit_is_every_unit_that_is_busiest() -> None:
    assert roofline.BlockCost(1, 10, 10, 5).limit == "tensor = exp"
    assert roofline.BlockCost(1, 10, 9, 5, issue=11).limit == "issue"
    # 8 consumer warps, 4 instructions a clock.
    assert roofline.forward_cost(tile(128, 128, 128), instructions=600).issue == 1200


def test_a_tensor_bound_kernel_has_the_tensor_cores_peak() -> None:
    cost = roofline.forward_cost(tile(128, 128, 128))
    bound = roofline.bound_tflops([cost], roofline.forward_flop(128, 128), 1755)
    assert bound == pytest.approx(PEAK_1755)


def test_efficiency_counts_padding_and_the_diagonal() -> None:
    schedule = tile(128, tile_m=128, tile_n=128)
    assert roofline.efficiency(1024, schedule, causal=False) == 1.0
    assert roofline.efficiency(1024, schedule, causal=True) == pytest.approx(32 / 36)
    assert roofline.efficiency(1025, schedule, causal=False) == pytest.approx(1025**2 / 1152**2)


def test_every_kernel_of_dispatch_has_a_cost() -> None:
    for head_dim in (64, 128, 256):
        case = dense(1, 1024, 8, 8, head_dim)
        assert [name for name, *_ in roofline.kernels_of("forward", case)] == ["forward"]
        backward = roofline.kernels_of("backward", case)
        assert backward
        tensor = sum(cost.tensor / cost.pairs for *_, cost in backward)
        assert tensor >= roofline.backward_flop(head_dim, head_dim) / 4096  # five or more products


def test_reached_share_uses_the_clock_that_was_read() -> None:
    row = dense(4, 4096, 16, 16, 128).row()
    row |= {"operation": "forward", "contender": "fa4", "ms": 1.0, "tflops": 700.0}
    table = pd.DataFrame(
        [
            row | {"sm_mhz": 1500.0},
            row | {"sm_mhz": math.nan, "case": "no clock"},
            row | {"sm_mhz": 1500.0, "contender": "other"},
            row | {"sm_mhz": 1500.0, "operation": "backward", "tflops": 400.0},
            row | {"sm_mhz": 1500.0, "operation": "decode", "tbytes": 4.32},
            row | {"ms": math.nan},
        ]
    )
    first, second, backward, decode = roofline.reached_rows(table)
    assert first["share of bound"] == pytest.approx(700 / (132 * 4096 * 1.5e9 / 1e12))
    assert first["useful"] == 1.0
    assert second["share of bound"] < first["share of bound"]  # of the highest clock
    assert math.isnan(second["MHz"])
    assert 0.4 < backward["share of bound"] < 1
    assert decode["share of bound"] == pytest.approx(0.9)

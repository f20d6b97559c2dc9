"""Bounds by hand, for the tiles of the published tables, and the share reached of a CSV."""

from __future__ import annotations

import dataclasses
import math

import pytest

pd = pytest.importorskip("pandas")
from fa4.pipelines.sm90 import forward_rule  # noqa: E402
from perf import roofline  # noqa: E402  needs pandas
from perf.roofline import features_for  # noqa: E402

# head_dim, head_dim_v, tile_m, tile_n -> tensor, exp, shared: clocks of one key block, worked out
# by hand from the units' rates.
BLOCKS = [
    ((64, 64, 192, 128), (1536, 1536, 1216)),
    ((96, 96, 128, 160), (1920, 1280, 1632)),
    ((128, 128, 128, 128), (2048, 1024, 1792)),
    ((128, 128, 128, 160), (2560, 1280, 2176)),
    ((192, 128, 128, 128), (2560, 1024, 2304)),
    ((256, 256, 128, 80), (2560, 640, 2432)),
]


@pytest.mark.parametrize(("tile", "clocks"), BLOCKS, ids=str)
def test_clocks_of_a_block(tile: tuple[int, ...], clocks: tuple[int, ...]) -> None:
    head_dim, head_dim_v, tile_m, tile_n = tile
    rule = forward_rule(features_for(head_dim, head_dim_v, causal=True))
    schedule = dataclasses.replace(rule, tile_m=tile_m, tile_n=tile_n, stages=2, o_shares_q=True)
    cost = roofline.block_cost(schedule)
    assert (cost.tensor, cost.exp, cost.shared) == clocks
    assert cost.issue is None
    assert cost.clocks == max(clocks)


def test_the_limit_is_every_unit_that_is_busiest() -> None:
    assert roofline.BlockCost(10, 10, 5).limit == "tensor = exp"
    assert roofline.BlockCost(10, 9, 5, issue=11).limit == "issue"
    schedule = forward_rule(features_for(128, 128, causal=True))
    # 8 consumer warps, 4 instructions a clock.
    assert roofline.block_cost(schedule, instructions=600).issue == 1200


def test_a_tensor_bound_kernel_has_the_tensor_cores_peak() -> None:
    schedule = forward_rule(features_for(128, 128, causal=True))
    peak = 132 * 4096 * 1.755e9 / 1e12
    assert roofline.bound_tflops(schedule, roofline.block_cost(schedule), 1755) == pytest.approx(
        peak
    )


def test_efficiency_counts_padding_and_the_diagonal() -> None:
    schedule = forward_rule(features_for(128, 128, causal=True))
    assert (schedule.tile_m, schedule.tile_n) == (128, 128)
    assert roofline.efficiency(1024, schedule, causal=False) == 1.0
    assert roofline.efficiency(1024, schedule, causal=True) == pytest.approx(32 / 36)
    assert roofline.efficiency(1025, schedule, causal=False) == pytest.approx(1025**2 / 1152**2)


def test_reached_share_uses_the_clock_that_was_read() -> None:
    row = {"case": "a", "contender": "fa4", "head_dim": 128, "head_dim_v": 128, "seqlen_k": 4096}
    row |= {"causal": False, "tflops": 700.0, "sm_mhz": 1500.0}
    table = pd.DataFrame(
        [row, row | {"sm_mhz": math.nan, "case": "b"}, row | {"contender": "other"}]
    )
    first, second = roofline.reached_rows(table)
    assert first["share of bound"] == pytest.approx(700 / (132 * 4096 * 1.5e9 / 1e12))
    assert first["useful"] == 1.0
    assert second["share of bound"] < first["share of bound"]  # of the highest clock
    assert math.isnan(second["MHz"])

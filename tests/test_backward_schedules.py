"""Schedules of the Hopper backward without atomics fit the machine, and say so where they do not.

Budgets are worked out here from the parts that a CTA has, not by the schedules' own sums. What the
compiler made of them is judged by tests/test_backward_two_kernels_code.py.
"""

import dataclasses
import itertools
import re
from typing import Any

import pytest

from fa4.kernels.features import BACKWARD_SCORES, HEAD_DIM_CLASSES, BackwardFeatures
from fa4.pipelines.sm90_backward import (
    DkvSchedule,
    DqSchedule,
    PrepareSchedule,
    TwoKernelSchedules,
    two_kernel_schedules,
)

SMEM_OF_A_CTA = 227 * 1024  # bytes; Hopper tuning guide
REGISTERS_OF_AN_SM = 64 * 1024
SWIZZLE_ATOM = 1024  # bytes: tiles that TMA writes and wgmma reads begin at multiples of it
HEAD_DIM_PAIRS = list(itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES))

GOOD_DKV = DkvSchedule(128, 128, tile_m=128, q_stages=2, grad_stages=2)
GOOD_DQ = DqSchedule(128, 128, tile_n=112, k_stages=2, v_stages=2, statistics_tile=128)


def chosen(head_dim: int, head_dim_v: int) -> list[TwoKernelSchedules]:
    return [
        two_kernel_schedules(BackwardFeatures("bf16", head_dim, head_dim_v, score=score))
        for score in BACKWARD_SCORES
    ]


def rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_blocks_of_rows_are_the_same_for_all_kernels(head_dim: int, head_dim_v: int) -> None:
    """Statistics are laid out in blocks of them."""
    for schedules in chosen(head_dim, head_dim_v):
        tile_m = schedules.prepare.tile_m
        assert schedules.dkv.tile_m == tile_m
        assert schedules.dq.statistics_tile == tile_m
        assert tile_m % 16 == 0  # K of the products that sum over rows, and the order inside
        assert schedules.prepare.head_dim_v == head_dim_v
        for schedule in (schedules.dkv, schedules.dq):
            assert (schedule.head_dim, schedule.head_dim_v) == (head_dim, head_dim_v)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_shared_memory_is_the_sum_of_its_parts_and_fits(head_dim: int, head_dim_v: int) -> None:
    for schedules in chosen(head_dim, head_dim_v):
        dkv = schedules.dkv
        rows, stages = dkv.tile_m, dkv.q_stages + dkv.grad_stages
        barriers = 2 * 8 * (2 + stages)  # full and empty: K, V, stages of Q and dO
        statistics = 4 * rows * stages
        weights = 2 * 64 * rows * 2
        tiles = [
            *[64 * max(head_dim, head_dim_v) * 2] * 2,  # K and dV, V and dK
            *[rows * head_dim * 2] * dkv.q_stages,
            *[rows * head_dim_v * 2] * dkv.grad_stages,
        ]
        total = rounded_up(barriers + statistics + weights, SWIZZLE_ATOM) + sum(tiles)
        assert dkv.smem_bytes == total <= SMEM_OF_A_CTA
        assert all(tile % SWIZZLE_ATOM == 0 for tile in tiles)

        dq = schedules.dq
        barriers = 2 * 8 * (2 + 2 + dq.k_stages + dq.v_stages)
        tiles = [
            *[64 * head_dim * 2, 64 * head_dim_v * 2] * 2,  # Q and dO of each warpgroup
            *[dq.tile_n * head_dim * 2] * dq.k_stages,
            *[dq.tile_n * head_dim_v * 2] * dq.v_stages,
        ]
        assert dq.smem_bytes == rounded_up(barriers, SWIZZLE_ATOM) + sum(tiles) <= SMEM_OF_A_CTA
        assert all(tile % SWIZZLE_ATOM == 0 for tile in tiles)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_registers_fit_the_roles_and_the_accumulators(head_dim: int, head_dim_v: int) -> None:
    """A warpgroup's 64 x n accumulator is n / 2 fp32 values in each of its 128 threads."""
    for schedules in chosen(head_dim, head_dim_v):
        for schedule in (schedules.dkv, schedules.dq):
            asked = 128 * (schedule.producer_registers + 2 * schedule.consumer_registers)
            assert asked <= REGISTERS_OF_AN_SM // schedule.threads // 8 * 8 * schedule.threads
        dkv, dq = schedules.dkv, schedules.dq
        values = head_dim_v // 2 + dkv.tile_m // 2 + dkv.tile_m // 4  # dV, S and p
        keys = head_dim // 2 + dkv.tile_m // 2 + 2 * (dkv.tile_m // 4)  # dK, dP, dx and w
        assert dkv.accumulator_registers == max(values, keys) <= dkv.consumer_registers - 28
        sums = head_dim // 2 + 2 * (dq.tile_n // 2) + dq.tile_n // 4  # dQ, S, dP and dx
        assert dq.accumulator_registers == sums <= dq.consumer_registers - 28


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_a_single_stage_is_taken_only_where_two_leave_small_blocks(
    head_dim: int, head_dim_v: int
) -> None:
    for schedules in chosen(head_dim, head_dim_v):
        if schedules.dkv.grad_stages == 1:
            with pytest.raises(ValueError, match="exceeds"):
                dataclasses.replace(schedules.dkv, tile_m=48, grad_stages=2)
        # At 256/256 blocks of 64 keys measured faster than two stages of V.
        if schedules.dq.v_stages == 1 and (head_dim, head_dim_v) != (256, 256):
            with pytest.raises(ValueError, match="exceeds"):
                dataclasses.replace(schedules.dq, tile_n=48, v_stages=2)


@pytest.mark.parametrize("head_dim_v", range(8, 257, 8))
def test_lanes_of_a_row_divide_a_warp_and_hold_the_row(head_dim_v: int) -> None:
    lanes = PrepareSchedule(head_dim_v, 64).lanes_a_row
    assert 32 % lanes == 0
    assert 8 * lanes >= head_dim_v > 4 * (lanes - 1)


@pytest.mark.parametrize(
    ("good", "changes", "message"),
    [
        (GOOD_DKV, {"tile_m": 24}, "tile_m=24 is not a multiple of 16 from 16 to 256"),
        (GOOD_DKV, {"q_stages": 1}, "q_stages=1 is below 2"),
        (GOOD_DKV, {"grad_stages": 0}, "grad_stages=0 is below 1"),
        (GOOD_DKV, {"cluster": 3}, "cluster=3 is not 1 or 2"),
        (GOOD_DKV, {"q_stages": 4}, "exceeds 232448 bytes"),
        (GOOD_DKV, {"tile_m": 208}, "need about 300 registers, more than 240"),
        (GOOD_DKV, {"producer_registers": 32}, "the roles' registers, 65536, exceed"),
        (GOOD_DKV, {"consumer_registers": 250}, "consumer_registers=250 is not a multiple of 8"),
        (GOOD_DQ, {"tile_n": 40}, "tile_n=40 is not a multiple of 16 from 16 to 256"),
        (GOOD_DQ, {"k_stages": 1}, "k_stages=1 is below 2"),
        (GOOD_DQ, {"v_stages": 0}, "v_stages=0 is below 1"),
        (GOOD_DQ, {"cluster": 0}, "cluster=0 is not 1 or 2"),
        (GOOD_DQ, {"k_stages": 4}, "exceeds 232448 bytes"),
        (GOOD_DQ, {"tile_n": 128}, "need about 252 registers, more than 240"),
        (PrepareSchedule(64, 64), {"tile_m": 40}, "tile_m=40 is not a multiple of 16"),
        (PrepareSchedule(64, 64), {"threads": 48}, "threads=48 is not a multiple of 32"),
        (PrepareSchedule(64, 64), {"threads": 32}, "tile_m=64 exceeds threads=32"),
        (PrepareSchedule(64, 64), {"head_dim_v": 264}, "head_dim_v=264 is not between 8 and 256"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_schedule_that_breaks_a_rule_is_refused_by_name(
    good: Any, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(good, **changes)


def test_names_tell_schedules_apart() -> None:
    assert GOOD_DKV.name == "m128n64q2g2"
    assert dataclasses.replace(GOOD_DKV, cluster=2).name == "m128n64q2g2_cluster2"
    assert GOOD_DQ.name == "m128n112k2v2"
    assert dataclasses.replace(GOOD_DQ, cluster=2).name == "m128n112k2v2_cluster2"
    assert "clusters of 2" in dataclasses.replace(GOOD_DQ, cluster=2).description
    assert "clusters" not in GOOD_DKV.description

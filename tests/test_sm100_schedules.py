"""Blackwell schedules: budgets worked out from their parts, rules broken one by one, choices."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from fa4 import schedule_table
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines.sm100 import ForwardSchedule, forward_schedule

PAIRS = list(itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES))
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"has_right_bound": True},
    {"has_left_bound": True, "has_right_bound": True},
    {"packed_q": True, "packed_k": True},
    {"score": "softcap", "sink_dtype": "fp32"},
)


def features(head_dim: int, head_dim_v: int, options: dict[str, Any]) -> ForwardFeatures:
    return ForwardFeatures("bf16", head_dim, head_dim_v, **options)


def schedules(head_dim: int, head_dim_v: int) -> list[ForwardSchedule]:
    return [
        forward_schedule(features(head_dim, head_dim_v, options), rows, group, arch)
        for options in KINDS
        for rows in (1, 200, 300, None)
        for group in (1, 3, 8)
        for arch in ("sm_100a", "sm_103a")
    ]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_every_schedule_fits_the_multiprocessor(head_dim: int, head_dim_v: int) -> None:
    for schedule in schedules(head_dim, head_dim_v):
        assert (schedule.head_dim, schedule.head_dim_v) == (head_dim, head_dim_v)
        # Shared memory: each part by itself, in bytes.
        q = schedule.query_tiles * 128 * head_dim * 2
        o = schedule.query_tiles * 128 * head_dim_v * 2
        stage = 128 * max(head_dim, head_dim_v) * 2 // schedule.ctas
        tiles = max(q, o) if schedule.o_shares_q else q + o
        assert tiles + schedule.stages * stage <= 227 * 1024 - 1024
        # Tensor memory: two buffers of scores, and O of each query tile, without overlap.
        parts = [(schedule.score_column(b), 128) for b in range(2)]
        parts += [(schedule.output_column(i), head_dim_v) for i in range(schedule.query_tiles)]
        for (start, width), (following, _) in itertools.pairwise([*parts, (512, 0)]):
            assert start + width <= following
        # Registers: of all roles, within what the launch gives.
        roles = (
            schedule.query_tiles * schedule.softmax_registers
            + schedule.correction_registers
            + schedule.other_registers
        ) * 128
        assert roles <= 65_536 // schedule.threads // 8 * 8 * schedule.threads


GOOD = forward_schedule(features(128, 128, {}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"query_tiles": 3}, "query_tiles=3 is not 1 or 2"),
        ({"ctas": 4}, "ctas=4 is not 1 or 2"),
        ({"tile_n": 96}, "tile_n=96 is not 64 or 128"),
        ({"tile_order": "any"}, "tile_order='any' is not one of"),
        ({"heads_in_rows": 3}, "heads_in_rows=3 is not one of"),
        ({"stages": 1}, "stages=1 is below 2"),
        ({"stages": 9}, "shared memory .* exceeds 232448 bytes"),
        ({"head_dim_v": 192}, "640 TMEM columns exceed 512"),
        ({"head_dim": 96, "head_dim_v": 96}, "half of head_dim_v=96 is not a multiple of 32"),
        ({"softmax_registers": 180}, "softmax_registers=180 is not a multiple of 8"),
        ({"correction_registers": 16}, "correction_registers=16 is not a multiple of 8 from 24"),
        ({"other_registers": 72}, "the roles' registers, 66560, exceed the CTA's 65536"),
        ({"exp2_polynomials": 7}, "exp2_polynomials=7 is not an even number from 0 to 32"),
    ],
)
def test_a_schedule_that_would_fail_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(GOOD, **changes)


def test_a_pair_is_chosen_where_it_saves() -> None:
    def ctas(head_dim: int, head_dim_v: int, rows: int | None = None, **options: Any) -> int:
        return forward_schedule(features(head_dim, head_dim_v, options), rows).ctas

    assert ctas(64, 64) == 1  # exponentials limit
    assert ctas(128, 128) == 2
    assert ctas(128, 128, has_right_bound=True) == 1
    assert ctas(192, 128) == ctas(192, 128, has_right_bound=True) == 2
    assert ctas(256, 256) == ctas(256, 256, has_right_bound=True) == 2
    # A CTA holds 256 rows of a sequence, or 128 where O is wide.
    assert [ctas(128, 128, rows) for rows in (256, 257)] == [1, 2]
    assert [ctas(256, 256, rows) for rows in (128, 129)] == [1, 2]


def test_heads_share_a_tile_where_that_fills_it() -> None:
    def heads(rows: int, group: int, **options: Any) -> int:
        return forward_schedule(features(128, 128, options), rows, group).heads_in_rows

    assert [heads(rows, 8) for rows in (1, 16, 64, 100, 112)] == [8, 8, 8, 8, 8]
    assert [heads(1, group) for group in (1, 3, 4, 64, 128)] == [1, 1, 4, 64, 1]
    assert heads(130, 4) == 4  # two tiles a head, or five for all
    assert heads(1024, 8) == 1
    assert heads(1, 8, packed_q=True) == heads(1, 8, has_seqused_q=True) == 8
    assert heads(1, 8, has_seqused_k=True, packed_k=True) == 8
    assert heads(0, 8, packed_q=True) == 8  # a mean of many sequences, some of them empty


def test_work_of_unequal_cost_is_handed_out_dynamically() -> None:
    orders = [forward_schedule(features(128, 128, options)).tile_order for options in KINDS]
    assert orders == ["static", "dynamic", "dynamic", "dynamic", "static"]


def test_a_faster_mufu_needs_no_polynomials() -> None:
    for head_dim, head_dim_v in PAIRS:
        for options in KINDS:
            wanted = features(head_dim, head_dim_v, options)
            assert forward_schedule(wanted, None, 1, "sm_103a").exp2_polynomials == 0
    assert forward_schedule(features(64, 64, {})).exp2_polynomials == 12


def test_names_tell_schedules_of_a_problem_apart() -> None:
    for head_dim, head_dim_v in PAIRS:
        for options in KINDS:
            found = {
                forward_schedule(features(head_dim, head_dim_v, options), rows)
                for rows in (1, 200, 300, None)
            }
            assert len({schedule.name for schedule in found}) == len(found)


def test_table_in_the_documentation_is_the_generated_one() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "blackwell.md"
    written = schedule_table.table_in(page.read_text(encoding="utf-8"))
    assert written == schedule_table.blackwell_table(), (
        "docs/blackwell.md is out of date: python -m fa4.schedule_table docs/blackwell.md"
    )

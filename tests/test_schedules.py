"""Hopper schedules fit the machine, whatever a kernel must be able to do, and say so.

Budgets are worked out here from the parts that a CTA has, not by the schedule's own sums. What the
compiler made of them is judged by tests/test_kernel_code.py.
"""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from fa4 import schedule_table
from fa4.kernels.features import HEAD_DIM_CLASSES, SCORE_TRANSFORMS, ForwardFeatures
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule

SMEM_OF_A_CTA = 227 * 1024  # bytes; Hopper tuning guide
REGISTERS_OF_AN_SM = 64 * 1024
SWIZZLE_ATOM = 1024  # bytes: tiles that TMA writes and wgmma reads begin at multiples of it
WGMMA_ROWS = 64  # M of every wgmma
HEAD_DIM_PAIRS = list(itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES))

# With 128 x 128 keys of head dim 128: what the tests of refused schedules change a field of.
GOOD = ForwardSchedule(
    head_dim=128,
    head_dim_v=128,
    tile_m=128,
    tile_n=128,
    stages=2,
    consumer_registers=240,
    producer_registers=24,
    o_shares_v=False,
    takes_turns=True,
)

RAGGED = {"packed_q": True, "packed_k": True, "has_seqused_q": True, "has_seqused_k": True}


def kinds(head_dim: int, head_dim_v: int) -> list[ForwardFeatures]:
    """Every combination of masks, scores and lengths for one pair of head dims."""
    return [
        ForwardFeatures(
            dtype="bf16",
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            has_left_bound=left,
            has_right_bound=right,
            score=score,
            **lengths,
        )
        for left, right, score, lengths in itertools.product(
            (False, True), (False, True), SCORE_TRANSFORMS, ({}, RAGGED)
        )
    ]


def schedules(head_dim: int, head_dim_v: int) -> set[ForwardSchedule]:
    """What `forward_schedule` answers for a pair of head dims: usually one or two schedules."""
    return {forward_schedule(features) for features in kinds(head_dim, head_dim_v)}


def smem_parts(schedule: ForwardSchedule) -> dict[str, int]:
    """Bytes of every part of a CTA's shared memory, each rounded up to where the next may begin."""
    warpgroups = schedule.tile_m // WGMMA_ROWS
    # Full and empty, of Q, K and V stages; of two messages; one for O in the stages of V.
    barriers = 2 * (warpgroups + 2 * schedule.stages) + 2 + 1
    messages = 2 * 10 + 32 + 1  # words of two messages, tiles of a round, and its marks
    parts = {
        "barriers": barriers * 8 + messages * 4,
        "q": schedule.tile_m * schedule.head_dim * 2,
        "o": 0 if schedule.o_shares_v else schedule.tile_m * schedule.head_dim_v * 2,
        "k": schedule.stages * schedule.tile_n * schedule.head_dim * 2,
        "v": schedule.stages * schedule.tile_n * schedule.head_dim_v * 2,
    }
    return {name: -(-size // SWIZZLE_ATOM) * SWIZZLE_ATOM for name, size in parts.items()}


# -- budgets of what is chosen -------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_every_kind_of_kernel_has_a_schedule_for_its_head_dims(
    head_dim: int, head_dim_v: int
) -> None:
    for features in kinds(head_dim, head_dim_v):
        schedule = forward_schedule(features)
        assert (schedule.head_dim, schedule.head_dim_v) == (head_dim, head_dim_v)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_shared_memory_is_the_sum_of_its_parts_and_fits(head_dim: int, head_dim_v: int) -> None:
    for schedule in schedules(head_dim, head_dim_v):
        total = sum(smem_parts(schedule).values())
        assert schedule.smem_bytes == total
        assert total <= SMEM_OF_A_CTA


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_registers_of_the_roles_are_what_setmaxnreg_can_move(
    head_dim: int, head_dim_v: int
) -> None:
    """PTX ISA, setmaxnreg: multiples of 8 from 24 to 256, out of what the CTA got at launch.

    An increase beyond that waits for registers that never come.
    """
    for schedule in schedules(head_dim, head_dim_v):
        warpgroups = schedule.tile_m // WGMMA_ROWS
        assert schedule.threads == 128 * (1 + warpgroups)
        for registers in (schedule.consumer_registers, schedule.producer_registers):
            assert registers % 8 == 0
            assert 24 <= registers <= 256
        at_launch = REGISTERS_OF_AN_SM // schedule.threads // 8 * 8
        # A warpgroup may not decrease below what it never had, nor increase to less.
        assert schedule.producer_registers <= at_launch <= schedule.consumer_registers
        asked = schedule.producer_registers + warpgroups * schedule.consumer_registers
        assert asked <= at_launch * (1 + warpgroups)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_accumulators_leave_a_consumer_room_to_work(head_dim: int, head_dim_v: int) -> None:
    for schedule in schedules(head_dim, head_dim_v):
        # A warpgroup's 64 x n accumulator is n / 2 fp32 values in each of its 128 threads.
        out = WGMMA_ROWS * head_dim_v // 128
        scores = WGMMA_ROWS * schedule.tile_n // 128
        probabilities = scores // 2
        assert schedule.accumulator_registers == out + scores + probabilities
        # 255 is the most that an instruction can name; below 24 more, wgmma is serialised.
        assert out + scores + probabilities + 24 <= schedule.consumer_registers


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_tiles_are_shapes_that_wgmma_and_tma_have(head_dim: int, head_dim_v: int) -> None:
    for schedule in schedules(head_dim, head_dim_v):
        assert schedule.tile_m in (64, 128, 192)
        assert schedule.consumer_warpgroups == schedule.tile_m // WGMMA_ROWS
        # N of Q K^T, and K of P V in steps of 16. A box of TMA has at most 256 rows.
        assert schedule.tile_n % 16 == 0
        assert 16 <= schedule.tile_n <= 256
        assert head_dim_v % 8 == 0  # N of P V
        assert head_dim_v <= 256


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_k_and_v_have_stages_enough_to_run_ahead(head_dim: int, head_dim_v: int) -> None:
    """K(j-1) is requested while V(j) is in use: with one stage the producer would wait for ever."""
    for schedule in schedules(head_dim, head_dim_v):
        assert schedule.stages >= 2


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_output_has_a_place_for_each_warpgroup(head_dim: int, head_dim_v: int) -> None:
    """Each writes its own while the others may still be writing, or being stored."""
    for schedule in schedules(head_dim, head_dim_v):
        if not schedule.o_shares_v:
            assert smem_parts(schedule)["o"] == schedule.tile_m * head_dim_v * 2
            continue
        assert smem_parts(schedule)["o"] == 0
        assert schedule.stages >= schedule.tile_m // WGMMA_ROWS
        assert schedule.tile_n >= WGMMA_ROWS
        assert schedule.tile_n * head_dim_v * 2 % SWIZZLE_ATOM == 0


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_no_longer_key_block_and_no_further_stage_would_fit(head_dim: int, head_dim_v: int) -> None:
    schedule = forward_schedule(
        ForwardFeatures(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v)
    )
    if schedule.tile_n < 128:
        with pytest.raises(ValueError):
            dataclasses.replace(schedule, tile_n=schedule.tile_n + 16, stages=2, o_shares_v=True)
    if schedule.stages < 3:
        with pytest.raises(ValueError, match="shared memory"):
            dataclasses.replace(schedule, stages=3)


def test_dtype_and_sink_do_not_change_the_schedule() -> None:
    for head_dim, head_dim_v in HEAD_DIM_PAIRS:
        features = ForwardFeatures(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v)
        expected = forward_schedule(features)
        for dtype, sink in itertools.product(("bf16", "fp16"), (None, "fp32", "bf16", "fp16")):
            other = dataclasses.replace(features, dtype=dtype, sink_dtype=sink)
            assert forward_schedule(other) == expected


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 96}, "tile_m=96 is not 64, 128 or 192"),
        ({"tile_m": 0}, "tile_m=0 is not 64, 128 or 192"),
        ({"tile_m": 256}, "tile_m=256 is not 64, 128 or 192"),
        ({"tile_n": 24}, "tile_n=24 is not a multiple of 16 from 16 to 256"),
        ({"tile_n": 0}, "tile_n=0 is not a multiple of 16 from 16 to 256"),
        ({"tile_n": 272}, "tile_n=272 is not a multiple of 16 from 16 to 256"),
        ({"short_n": 24}, "short_n=24 is not a multiple of 16 below tile_n"),
        ({"short_n": 128}, "short_n=128 is not a multiple of 16 below tile_n"),
        ({"stages": 1}, "stages=1 is below 2"),
        ({"consumer_registers": 236}, "consumer_registers=236 is not a multiple of 8"),
        ({"consumer_registers": 248}, "consumer_registers=248 is not a multiple of 8"),
        ({"producer_registers": 16}, "producer_registers=16 is not a multiple of 8"),
        # 2 x 240 + 32 registers by 128 threads; 384 threads get 168 each
        ({"producer_registers": 32}, "the roles' registers, 65536, exceed the CTA's 64512"),
        # 64 for O, 64 for S, 32 for P
        ({"consumer_registers": 184}, "O, S and P need about 188 registers, more than 184"),
        ({"head_dim_v": 256}, "O, S and P need about 252 registers, more than 240"),
        ({"stages": 3}, "shared memory 263168 exceeds 232448 bytes"),
        ({"o_shares_v": True, "tile_n": 48}, "o_shares_v=True needs a stage of 64 rows or more"),
        ({"o_shares_v": True, "tile_m": 192}, "for each of 3 warpgroups; there are 2 of 128"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_schedule_that_breaks_a_rule_is_refused_by_name(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(GOOD, **changes)


def test_every_broken_rule_is_in_the_message() -> None:
    with pytest.raises(ValueError) as refusal:
        dataclasses.replace(GOOD, tile_n=100, stages=1, producer_registers=20)
    for part in ("tile_n=100 is", "stages=1 is", "producer_registers=20 is"):
        assert part in str(refusal.value)


def test_shared_memory_may_be_used_to_the_last_byte() -> None:
    full = dataclasses.replace(
        GOOD,
        tile_m=64,
        head_dim_v=64,
        tile_n=112,
        stages=5,
        consumer_registers=224,
        o_shares_v=True,
    )
    assert full.smem_bytes == sum(smem_parts(full).values()) == SMEM_OF_A_CTA
    with pytest.raises(ValueError, match="shared memory 240640 exceeds 232448 bytes"):
        dataclasses.replace(full, o_shares_v=False)


# -- what the cache and people rely on -----------------------------------------------------------


def test_a_schedule_is_a_frozen_value() -> None:
    again = dataclasses.replace(GOOD)
    assert again == GOOD
    assert hash(again) == hash(GOOD)
    assert dataclasses.replace(GOOD, stages=2, tile_n=112) != GOOD
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.stages = 3  # type: ignore[misc]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_repr_states_the_whole_value(head_dim: int, head_dim_v: int) -> None:
    """It is part of the key under which the disk cache keeps a kernel."""
    for schedule in schedules(head_dim, head_dim_v):
        assert eval(repr(schedule), {"ForwardSchedule": ForwardSchedule}) == schedule
        for field in dataclasses.fields(schedule):
            assert type(getattr(schedule, field.name)) in (int, bool)


def test_the_choice_is_the_same_every_time() -> None:
    for pair in HEAD_DIM_PAIRS:
        for features in kinds(*pair):
            assert forward_schedule(features) == forward_schedule(dataclasses.replace(features))


def test_description_says_what_the_schedule_does() -> None:
    assert GOOD.description == (
        "query tile 128, key block 128, 2 K/V stages, 2 consumer warpgroups of 240 registers, "
        "producer 24, turns between warpgroups, 193 KiB shared memory"
    )
    other = dataclasses.replace(GOOD, takes_turns=False, short_n=64)
    assert "turns" not in other.description
    assert "short last blocks of 64 keys" in other.description


def test_name_tells_schedules_of_one_kernel_apart() -> None:
    names = {
        dataclasses.replace(GOOD, **changes).name
        for changes in ({}, {"tile_m": 64}, {"tile_n": 112}, {"stages": 2, "tile_n": 96})
    }
    assert len(names) == 4
    for name in names:
        assert re.fullmatch(r"\w+", name)


# -- the page ------------------------------------------------------------------------------------


def test_table_in_the_documentation_is_the_generated_one() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"
    written = schedule_table.table_in(page.read_text(encoding="utf-8"))
    assert written == schedule_table.forward_table(), (
        "docs/schedules.md is out of date: python -m fa4.schedule_table docs/schedules.md"
    )


def test_table_has_a_row_for_every_schedule() -> None:
    rows = [line.split("|")[1:-1] for line in schedule_table.forward_table().splitlines()[2:]]
    cells = [[cell.strip() for cell in row] for row in rows]
    for head_dim, head_dim_v in HEAD_DIM_PAIRS:
        written = [row for row in cells if row[:2] == [str(head_dim), str(head_dim_v)]]
        expected = schedules(head_dim, head_dim_v)
        assert len(written) == len(expected)
        for schedule in expected:
            assert any(
                row[3:5] == [f"{schedule.tile_m} x {schedule.tile_n}", str(schedule.stages)]
                for row in written
            )


def test_writing_the_table_changes_nothing_else_on_the_page() -> None:
    begin, end = schedule_table.BEGIN, schedule_table.END
    for old in ("", "| an old table |\n"):
        written = schedule_table.with_table(f"above\n{begin}\n{old}{end}\nbelow\n")
        assert written == f"above\n{begin}\n{schedule_table.forward_table()}{end}\nbelow\n"
    for page in ("no marks", f"{begin}\nno end", f"{end}\n{begin}\n"):
        with pytest.raises(ValueError, match="does not have the lines"):
            schedule_table.with_table(page)

"""Schedules: the same seed gives the same run, and they show what round robin hides."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.scheduler import policy
from tests.emulator.ptx_kernels import run_body

# Warp 1 should wait for warp 0's store to global memory, and does not.
RACE = """
    setp.gt.u32 %p1, %r60, 31;
    @%p1 bra READER;
    bra NEXT;
    NEXT:
    mov.b32 %r2, 1;
    st.global.b32 [%rd0], %r2;
    ret;
    READER:
    ld.global.b32 %r3, [%rd0];
    st.global.b32 [%rd0+4], %r3;
"""


def seen(schedule: str, seed: int) -> int:
    """Whether the reader came after the writer."""
    output = np.zeros(2, np.uint32)
    run_body(RACE, [output], threads=64, schedule=schedule, seed=seed)
    return int(output[1])


def test_round_robin_hides_a_race_that_the_others_show() -> None:
    assert {seen("round_robin", seed) for seed in range(20)} == {1}
    assert {seen("random", seed) for seed in range(20)} == {0, 1}
    assert {seen("adversarial", seed) for seed in range(20)} == {0, 1}


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_a_seed_repeats_its_run(schedule: str) -> None:
    first = [seen(schedule, seed) for seed in range(10)]
    assert first == [seen(schedule, seed) for seed in range(10)]


# Warp 1 stores what its wait for warp 0's arrival answered.
WAIT_ONCE = """
    setp.eq.u32 %p0, %r60, 0;
    @%p0 mbarrier.init.shared.b64 [dynamic], 1;
    bar.sync 0;
    setp.gt.u32 %p1, %r60, 31;
    @%p1 bra WAITS;
    @%p0 mbarrier.arrive.shared.b64 %rd1, [dynamic];
    ret;
    WAITS:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [dynamic], 0;
    {again}
    selp.b64 %rd2, 1, 0, %p2;
    st.global.b64 [%rd0], %rd2;
"""


def answered(schedule: str, seed: int, again: str = "") -> int:
    output = np.zeros(1, np.uint64)
    run_body(WAIT_ONCE.format(again=again), [output], threads=64, schedule=schedule, seed=seed)
    return int(output[0])


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_waits_of_limited_time_may_end_too_early_and_kernels_repeat_them(schedule: str) -> None:
    assert {answered("round_robin", seed) for seed in range(20)} == {1}
    assert {answered(schedule, seed) for seed in range(20)} == {0, 1}
    again = "@!%p2 bra WAITS;"
    assert {answered(schedule, seed, again) for seed in range(20)} == {1}


# CTA 0 waits for what CTA 1 stores; each lane of that takes it from shared memory, asynchronously.
WAIT_FOR_OTHER_CTA = """
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %p0, %r1, 0;
    @%p0 bra WAITS;
    mov.b32 %r2, 7;
    st.shared.b32 [dynamic], %r2;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [dynamic], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    red.release.gpu.global.add.s32 [%rd1], 1;
    ret;
    WAITS:
    ld.acquire.gpu.global.s32 %r3, [%rd1];
    setp.lt.s32 %p1, %r3, 32;
    @%p1 bra WAITS;
    ld.global.b32 %r4, [%rd0];
    st.global.b32 [%rd1+4], %r4;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_ctas_that_are_in_flight_together_may_wait_for_each_other(schedule: str) -> None:
    for seed in range(5):
        copied, output = np.zeros(4, np.uint32), np.zeros(2, np.int32)
        run_body(
            WAIT_FOR_OTHER_CTA,
            [copied, output],
            grid=2,
            schedule=schedule,
            seed=seed,
            together=2,
            check_unwritten=False,
        )
        assert output.tolist() == [32, 7]


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule is 'fifo'; allowed are round_robin, random"):
        policy("fifo", 0)

"""`bar.warp.sync` waits for lanes that are elsewhere."""

import numpy as np
import pytest

from fa4.emulator.errors import Deadlock, EmulationError
from tests.emulator.ptx_kernels import run_body

# Lane 0 of warp 0 waits for warp 1, and the other lanes for lane 0.
ONE_LANE_WAITS = """
    setp.eq.u32 %p1, %r60, 0;
    @%p1 mbarrier.init.shared.b64 [dynamic], 1;
    bar.sync 0;
    setp.ge.u32 %p2, %r60, 32;
    @%p2 bra other_warp;
    @!%p1 bra together;
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [dynamic], 0;
    @!%p3 bra waiting;
together:
    bar.warp.sync -1;
    ld.shared.b32 %r1, [dynamic+8];
    mad.wide.u32 %rd1, %r60, 4, %rd0;
    st.global.b32 [%rd1], %r1;
    bra done;
other_warp:
    setp.eq.u32 %p1, %r60, 32;
    @%p1 st.shared.b32 [dynamic+8], 7;
    @%p1 mbarrier.arrive.shared.b64 %rd2, [dynamic];
done:
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_lanes_wait_for_the_one_that_waits(schedule: str) -> None:
    out = np.zeros(32, np.uint32)
    for seed in range(4):
        out[:] = 0
        run_body(ONE_LANE_WAITS, [out], threads=64, schedule=schedule, seed=seed)
        assert (out == 7).all(), seed


def test_the_report_of_a_deadlock_names_the_missing_lanes() -> None:
    body = ONE_LANE_WAITS.replace("@%p1 mbarrier.arrive", "@%p3 mbarrier.arrive")
    with pytest.raises(Deadlock, match=r"pending\).*; lanes \[0\] of its warp"):
        run_body(body, [np.zeros(32, np.uint32)], threads=64)


def test_lanes_that_have_exited_are_not_waited_for() -> None:
    out = np.zeros(32, np.uint32)
    body = """
    setp.lt.u32 %p1, %r60, 4;
    @%p1 exit;
    bar.warp.sync -1;
    mad.wide.u32 %rd1, %r60, 4, %rd0;
    st.global.b32 [%rd1], 1;
"""
    run_body(body, [out])
    assert out.tolist() == [0] * 4 + [1] * 28


def test_a_lane_that_is_not_a_member_is_an_error() -> None:
    with pytest.raises(EmulationError, match="diverged"):
        run_body("    bar.warp.sync 15;\n    bar.warp.sync -1;\n")


def test_lanes_that_initialise_an_mbarrier_alike_are_one() -> None:
    out = np.zeros(1, np.uint64)
    run_body(
        """
    mbarrier.init.shared.b64 [dynamic], 3;
    setp.eq.u32 %p1, %r60, 0;
    @%p1 mbarrier.arrive.shared.b64 %rd1, [dynamic], 3;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [dynamic], 0;
    selp.b64 %rd2, 1, 0, %p2;
    @%p1 st.global.b64 [%rd0], %rd2;
""",
        [out],
    )
    assert out[0] == 1
    with pytest.raises(EmulationError, match="initialised again"):
        run_body("    mbarrier.init.shared.b64 [dynamic], 3;\n" * 2)
    with pytest.raises(EmulationError, match="initialised again"):  # with different counts
        run_body("    add.u32 %r1, %r60, 1;\n    mbarrier.init.shared.b64 [dynamic], %r1;\n")

"""wgmma with an A that each warp of the warpgroup stores its own 16 rows of.

No barrier of threads is needed then: a warp reads its own rows only. Rows of another warp, and B,
need one.
"""

import numpy as np
import pytest

from fa4.emulator.errors import DataRace, Deadlock
from tests.emulator.ptx_kernels import run_body

# K-major without swizzle: A (64, 16) of f16 in the 2048 bytes from 1024 on, B (8, 16) in the 256
# from 4096 on. %r10 is a lane's row, %r11 its half of the row.
OFFSETS = """
    and.b32 %r10, %r60, 15;
    shr.u32 %r1, %r60, 5;
    add.s32 %r1, %r1, {shift};
    and.b32 %r1, %r1, 3;
    mad.lo.s32 %r10, %r1, 16, %r10;
    shr.u32 %r11, %r60, 4;
    and.b32 %r11, %r11, 1;
    mov.b32 %r2, dynamic;
    and.b32 %r3, %r10, 7;
    mad.lo.s32 %r4, %r3, 16, %r2;
    shr.u32 %r5, %r10, 3;
    mad.lo.s32 %r4, %r5, 128, %r4;
    mad.lo.s32 %r4, %r11, 1024, %r4;
    mad.lo.s32 %r6, %r10, 32, 0;
    mad.lo.s32 %r6, %r11, 16, %r6;
    cvt.u64.u32 %rd10, %r6;
"""
WRITE_B = """
    setp.lt.u32 %p1, %r60, 16;
    mad.lo.u64 %rd11, %rd60, 16, %rd1;
    mad.lo.s32 %r7, %r60, 16, %r2;
    @%p1 ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd11];
    @%p1 st.shared.v4.b32 [%r7+4096], {%r20, %r21, %r22, %r23};
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""
WRITE_A = """
    add.s64 %rd12, %rd0, %rd10;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd12];
    st.shared.v4.b32 [%r4+1024], {%r20, %r21, %r22, %r23};
    fence.proxy.async.shared::cta;
"""
SYNC = "bar.sync 0;\n"
FENCE = "wgmma.fence.sync.aligned;\n"
MULTIPLY = f"""
    mov.b64 %rd20, {hex(1024 // 16 | 1024 // 16 << 16 | 128 // 16 << 32)};
    mov.b64 %rd21, {hex(4096 // 16 | 128 // 16 << 16 | 128 // 16 << 32)};
    setp.ne.b32 %p2, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r30, %r31, %r32, %r33}}, %rd20, %rd21,
        %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mad.lo.u64 %rd13, %rd60, 16, %rd2;
    st.global.v4.b32 [%rd13], {{%r30, %r31, %r32, %r33}};
"""


def multiply(body: str, shift: int = 0, **options) -> tuple[np.ndarray, np.ndarray]:
    """(the kernel's D, the exact one); warp w stores the rows of A of warp w + shift."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 16)).astype(np.float16)
    b = rng.normal(size=(8, 16)).astype(np.float16)
    b_halves = np.ascontiguousarray(b.reshape(8, 2, 8).transpose(1, 0, 2))
    registers = np.zeros((128, 4), np.float32)
    arrays = [a, b_halves, registers]
    run_body(
        OFFSETS.format(shift=shift) + WRITE_B + body,
        arrays,
        threads=128,
        shared_bytes=8192,
        **options,
    )
    d = np.zeros((64, 8), np.float32)
    thread, register = np.divmod(np.arange(512), 4)
    warp, lane = np.divmod(thread, 32)
    rows = 16 * warp + lane // 4 + 8 * (register // 2)
    d[rows, 2 * (lane % 4) + register % 2] = registers.reshape(-1)
    return d, a.astype(np.float64) @ b.T.astype(np.float64)


SCHEDULES = [("round_robin", 0), ("random", 1), ("random", 2), ("adversarial", 3)]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_own_rows_need_no_barrier(schedule: str, seed: int) -> None:
    d, exact = multiply(WRITE_A + FENCE + MULTIPLY, schedule=schedule, seed=seed, check_races=True)
    assert np.abs(d - exact).max() < 1e-4


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_rows_of_another_warp_need_one(schedule: str, seed: int) -> None:
    options = {"shift": 1, "schedule": schedule, "seed": seed, "check_races": True}
    d, exact = multiply(WRITE_A + SYNC + FENCE + MULTIPLY, **options)
    assert np.abs(d - exact).max() < 1e-4
    with pytest.raises(DataRace, match="a wgmma"):
        multiply(WRITE_A + FENCE + MULTIPLY, **options)


def test_fence_that_a_warp_does_not_reach_is_a_deadlock() -> None:
    body = WRITE_A + "setp.lt.u32 %p3, %r60, 32; @%p3 bra AROUND;" + FENCE + "AROUND: bar.sync 0;"
    with pytest.raises(Deadlock, match="the other warps of its warpgroup"):
        multiply(body)

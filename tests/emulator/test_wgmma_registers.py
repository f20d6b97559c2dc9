"""Registers of wgmma touched too early are found on every path, and right kernels pass."""

import pytest

from fa4.emulator.ptx import parse
from fa4.emulator.wgmma_registers import EarlyRegisterAccess, check_wgmma_registers

FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
USE = "add.f32 %f9, %f0, %f0;"
SHAPE = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"


def wait(pending: int) -> str:
    return f"wgmma.wait_group.sync.aligned {pending};"


def mma(accumulators: str = "%f0, %f1, %f2, %f3", a: str = "%rd0") -> str:
    return f"{SHAPE} {{{accumulators}}}, {a}, %rd1, 1, 1, 1, 0, 0;"


def mma_from_registers(accumulators: str = "%f4, %f5, %f6, %f7") -> str:
    return mma(accumulators, "{%r0, %r1, %r2, %r3}").replace("0, 0;", "0;")


def check(*lines: str) -> None:
    text = "\n".join(
        [
            ".version 8.0",
            ".target sm_90a",
            ".address_size 64",
            ".visible .entry kernel()",
            "{",
            ".reg .f32 %f<16>;",
            ".reg .b32 %r<8>;",
            ".reg .b64 %rd<4>;",
            ".reg .pred %p<4>;",
            *lines,
            "ret;",
            "}",
        ]
    )
    module = parse(text)
    check_wgmma_registers(module.kernels["kernel"], module)


def test_result_used_after_the_wait_is_right() -> None:
    check(FENCE, mma(), mma(), COMMIT, wait(0), USE)


def test_result_used_without_a_wait_is_found_with_its_line() -> None:
    with pytest.raises(
        EarlyRegisterAccess, match=r"%f0 is accessed .*\n  at PTX line 13 .*add.f32"
    ):
        check(FENCE, mma(), COMMIT, USE)


def test_wait_does_not_cover_what_was_not_committed() -> None:
    with pytest.raises(EarlyRegisterAccess, match="%f0 is accessed"):
        check(FENCE, mma(), wait(0), COMMIT, USE)


def test_wait_leaves_the_latest_groups_pending() -> None:
    first, second = mma(), mma("%f4, %f5, %f6, %f7")
    check(FENCE, first, COMMIT, second, COMMIT, wait(1), USE)
    with pytest.raises(EarlyRegisterAccess, match="%f4 is accessed"):
        check(FENCE, first, COMMIT, second, COMMIT, wait(1), "add.f32 %f9, %f4, %f4;")


def test_wait_for_more_groups_than_there_are_changes_nothing() -> None:
    with pytest.raises(EarlyRegisterAccess, match="%f0 is accessed"):
        check(FENCE, mma(), COMMIT, wait(3), USE)


def test_missing_wait_on_one_of_two_paths_is_found() -> None:
    def paths(skipped: str, always: str) -> list[str]:
        return [FENCE, mma(), COMMIT, "@%p0 bra DONE;", skipped, "DONE:", always, USE]

    check(*paths("", wait(0)))
    with pytest.raises(EarlyRegisterAccess, match="%f0 is accessed"):
        check(*paths(wait(0), ""))


def test_access_in_the_next_iteration_of_a_loop_is_found() -> None:
    def loop(inside: str, after: str) -> list[str]:
        return ["LOOP:", USE, FENCE, mma(), COMMIT, inside, "@%p0 bra LOOP;", after]

    check(*loop(wait(0), ""))
    with pytest.raises(EarlyRegisterAccess, match="%f0 is accessed"):
        check(*loop("", wait(0)))


def test_a_loop_that_never_waits_is_analysed_to_its_end() -> None:
    check(FENCE, "LOOP:", mma(), COMMIT, "@%p0 bra LOOP;", wait(0), USE)


def test_accumulator_written_after_the_fence_is_found() -> None:
    write = "mov.f32 %f0, 0f00000000;"
    check(write, FENCE, mma(), COMMIT, wait(0), USE)
    with pytest.raises(EarlyRegisterAccess, match="%f0, which was written after"):
        check(FENCE, write, mma(), COMMIT, wait(0), USE)


def test_a_written_after_the_fence_is_found() -> None:
    write = "mov.b32 %r2, 0;"
    check(write, FENCE, mma_from_registers(), COMMIT, wait(0))
    with pytest.raises(EarlyRegisterAccess, match="%r2, which was written after"):
        check(FENCE, write, mma_from_registers(), COMMIT, wait(0))


def test_a_overwritten_while_it_may_be_read_is_found() -> None:
    with pytest.raises(EarlyRegisterAccess, match="%r2 is accessed"):
        check(FENCE, mma_from_registers(), COMMIT, "mov.b32 %r2, 0;", wait(0))


def test_a_may_be_read_while_a_wgmma_reads_it() -> None:
    check(FENCE, mma_from_registers(), COMMIT, "add.u32 %r7, %r2, 1;", wait(0))


def test_a_wgmma_without_any_fence_is_found() -> None:
    with pytest.raises(EarlyRegisterAccess, match=r"without a wgmma\.fence"):
        check(mma(), COMMIT, wait(0))
    with pytest.raises(EarlyRegisterAccess, match=r"without a wgmma\.fence"):
        check("@%p0 bra L;", FENCE, "L:", mma(), COMMIT, wait(0))


def test_moves_of_pending_registers_are_renamings() -> None:
    moved = ["mov.f32 %f8, %f0;"]
    check(FENCE, mma(), COMMIT, *moved, wait(0), "add.f32 %f9, %f8, %f8;")
    with pytest.raises(EarlyRegisterAccess, match="%f8 is accessed"):
        check(FENCE, mma(), COMMIT, *moved, "add.f32 %f9, %f8, %f8;", wait(0))


def test_a_move_from_a_written_register_needs_a_fence_too() -> None:
    write, move = "mov.f32 %f8, 0f00000000;", "mov.f32 %f0, %f8;"
    check(write, FENCE, move, mma(), COMMIT, wait(0))
    with pytest.raises(EarlyRegisterAccess, match="%f0, which was written after"):
        check(FENCE, write, move, mma(), COMMIT, wait(0))


def test_result_read_as_a_while_it_may_be_written_is_found() -> None:
    results_as_a = mma("%f4, %f5, %f6, %f7", "{%f0, %f1, %f2, %f3}")
    check(FENCE, mma(), COMMIT, wait(0), results_as_a, COMMIT, wait(0))
    with pytest.raises(EarlyRegisterAccess, match="%f0 as A while another"):
        check(FENCE, mma(), COMMIT, results_as_a, COMMIT, wait(0))


def test_a_written_as_a_result_while_it_may_be_read_is_found() -> None:
    over_a = mma("%r0, %r1, %r2, %r3")
    check(FENCE, mma_from_registers(), COMMIT, wait(0), over_a, COMMIT, wait(0))
    with pytest.raises(EarlyRegisterAccess, match="%r0 while another may still read it as A"):
        check(FENCE, mma_from_registers(), COMMIT, over_a, COMMIT, wait(0))


def test_kernel_without_wgmma_passes() -> None:
    check(USE)

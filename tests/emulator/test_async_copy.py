"""cp.async: what is copied, and when it is there for sure."""

import numpy as np
import pytest

from fa4.emulator.errors import Deadlock, Misaligned, OutOfBounds, UnknownInstruction, UnwrittenRead
from tests.emulator.ptx_kernels import run_body

# Lane t copies 16 bytes from byte 16 t of array 0 to byte 16 t of shared memory; %r2 is where.
COPY = """
    shl.b32 %r1, %r60, 4;
    mov.b32 %r2, dynamic;
    add.s32 %r2, %r2, %r1;
    cvt.u64.u32 %rd20, %r1;
    add.s64 %rd21, %rd0, %rd20;
    {setup}
    cp.async.{operands};
"""
COMMIT, WAIT = "    cp.async.commit_group;\n", "    cp.async.wait_group 0;\n"
# Lane t writes its 16 bytes of shared memory, from `offset` on, to array `array`.
READ = """
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2+{offset}];
    add.s64 %rd22, %rd{array}, %rd20;
    st.global.v4.b32 [%rd22], {{%r10, %r11, %r12, %r13}};
"""
SCHEDULES = [("round_robin", 0), ("random", 3), ("adversarial", 1)]


def copied(operands: str, setup: str = "", **options) -> tuple[np.ndarray, np.ndarray]:
    """Source and result of one copy instruction, as (32 lanes, 16 bytes)."""
    source = np.random.default_rng(0).integers(1, 256, 512, np.uint8)
    result = np.zeros(512, np.uint8)
    body = COPY.format(operands=operands, setup=setup) + COMMIT + WAIT
    run_body(body + READ.format(offset=0, array=1), [source, result], **options)
    return source.reshape(32, 16), result.reshape(32, 16)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("opcode", ["cg.shared.global", "ca.shared::cta.global.L2::128B"])
def test_sixteen_bytes_a_lane(opcode: str, schedule: str, seed: int) -> None:
    source, result = copied(f"{opcode} [%r2], [%rd21], 16", schedule=schedule, seed=seed)
    assert np.array_equal(result, source)


@pytest.mark.parametrize("size", [4, 8])
def test_smaller_sizes_copy_no_more(size: int) -> None:
    operands = f"ca.shared.global [%r2], [%rd21], {size}"
    source, result = copied(operands, check_unwritten=False)
    assert np.array_equal(result[:, :size], source[:, :size])
    assert not np.array_equal(result[:, size:], source[:, size:])


def test_bytes_beyond_the_source_size_are_zero() -> None:
    setup = "and.b32 %r3, %r60, 15;"  # 0 to 15 bytes
    source, result = copied("cg.shared.global [%r2], [%rd21], 16, %r3", setup)
    used = np.arange(16) < (np.arange(32) & 15)[:, None]
    assert np.array_equal(result, np.where(used, source, 0))


def test_source_of_a_copy_of_no_bytes_is_not_read() -> None:
    setup = "mov.b32 %r3, 0; mov.b64 %rd21, 16;"
    _, result = copied("cg.shared.global [%r2], [%rd21], 16, %r3", setup)
    assert not result.any()
    with pytest.raises(OutOfBounds):
        copied("cg.shared.global [%r2], [%rd21], 16", setup)


def test_ignored_source_gives_zeros() -> None:
    setup = "setp.lt.u32 %p1, %r60, 7;"
    source, result = copied("cg.shared.global [%r2], [%rd21], 16, %p1", setup)
    assert not result[:7].any()
    assert np.array_equal(result[7:], source[7:])


def test_misaligned_source_is_an_error() -> None:
    with pytest.raises(Misaligned):
        copied("ca.shared.global [%r2], [%rd21], 8", "add.s64 %rd21, %rd21, 4;")


@pytest.mark.parametrize("operands", ["cg.shared.global [%r2], [%rd21], 8", "ca.global [%r2], 4"])
def test_unknown_forms_are_named(operands: str) -> None:
    with pytest.raises(UnknownInstruction, match=r"cp\.async\.c[ag]"):
        copied(operands)


# -- when ------------------------------------------------------------------------------------------

FIRST = COPY.format(operands="cg.shared.global [%r2], [%rd21], 16", setup="")
SECOND = "    cp.async.cg.shared.global [%r2+512], [%rd21], 16;\n"


def read_after(waiting: str, offset: int, barriers: str = "") -> np.ndarray:
    """What a lane reads back after two groups and `waiting`, when copies come as late as can be."""
    source, result = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    body = (
        barriers + FIRST + COMMIT + SECOND + COMMIT + waiting + READ.format(offset=offset, array=1)
    )
    run_body(body, [source, result], shared_bytes=2048, schedule="adversarial")
    return result == source


@pytest.mark.parametrize(
    ("waiting", "offset"),
    [
        ("cp.async.wait_group 1;\n", 0),
        ("cp.async.wait_group 0;\n", 512),
        ("cp.async.wait_all;\n", 512),
    ],
)
def test_what_was_waited_for_is_there(waiting: str, offset: int) -> None:
    assert read_after(waiting, offset).all()


@pytest.mark.parametrize(
    ("waiting", "offset"),
    [("", 0), ("cp.async.wait_group 2;\n", 0), ("cp.async.wait_group 1;\n", 512)],
)
def test_what_was_not_waited_for_may_be_missing(waiting: str, offset: int) -> None:
    with pytest.raises(UnwrittenRead):
        read_after(waiting, offset)


def test_copies_outside_of_a_group_are_not_waited_for() -> None:
    source, result = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    body = FIRST + "    cp.async.wait_group 0;\n" + READ.format(offset=0, array=1)
    with pytest.raises(UnwrittenRead):
        run_body(body, [source, result], schedule="adversarial")


def test_lanes_wait_for_their_own_groups() -> None:
    """Odd lanes have one more group, so that the same wait is later for even ones."""
    body = "and.b32 %r5, %r60, 1; setp.eq.u32 %p2, %r5, 1;" + FIRST + COMMIT
    body += "@%p2 cp.async.cg.shared.global [%r2+512], [%rd21], 16;\n@%p2 cp.async.commit_group;\n"
    body += "@%p2 cp.async.wait_group 1;\n"
    source, result = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    parted = (
        READ.format(offset=0, array=1)
        .replace("    ld", "    @%p2 ld")
        .replace("    st", "    @%p2 st")
    )
    run_body(body + parted, [source, result], shared_bytes=2048, schedule="adversarial")
    odd = np.arange(128) // 4 % 2 == 1
    assert np.array_equal(result, np.where(odd, source, 0))


INIT = """
    mov.b32 %r4, dynamic;
    setp.eq.u32 %p3, %r60, 0;
    @%p3 mbarrier.init.shared.b64 [%r4+1024], {count};
    bar.sync 0;
"""
AWAIT = """
    LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r4+1024], 0;
    @!%p1 bra LOOP;
"""


@pytest.mark.parametrize(
    ("count", "arrive"),
    [
        (32, "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4+1024];\n"),
        (
            1,
            "cp.async.mbarrier.arrive.shared.b64 [%r4+1024];\n"
            "@%p3 mbarrier.arrive.shared.b64 _, [%r4+1024];\n",
        ),
    ],
)
def test_mbarrier_counts_the_ends_of_copies(count: int, arrive: str) -> None:
    assert read_after(arrive + AWAIT, 512, INIT.format(count=count)).all()


def test_mbarrier_that_expects_more_lanes_never_completes() -> None:
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4+1024];\n"
    with pytest.raises(Deadlock, match="1 of 33 arrivals"):
        read_after(arrive + AWAIT, 512, INIT.format(count=33))

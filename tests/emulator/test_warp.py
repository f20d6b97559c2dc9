"""What warps do together: collectives, memory, barriers, and the reports of faults in them."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.errors import BarrierMisuse, Deadlock, EmulationError, Misaligned, UnwrittenRead
from fa4.emulator.scheduler import NAMES
from tests.emulator.ptx_kernels import run_body

STORE_R1 = "mad.lo.u64 %rd50, %rd60, 4, %rd0;\nst.global.b32 [%rd50], %r1;\n"
LANES = np.arange(32)


def one_value_a_lane(body: str) -> list[int]:
    """What a body leaves in %r1."""
    output = np.zeros(32, np.uint32)
    run_body(body + STORE_R1, [output])
    return output.tolist()


@pytest.mark.parametrize(
    ("mode", "operand", "clamp", "expected"),
    [
        ("idx", 5, 31, np.full(32, 5)),
        ("idx", 1, 0x181F, LANES // 8 * 8 + 1),  # segments of 8 lanes
        ("bfly", 2, 31, LANES ^ 2),
        ("up", 3, 0, np.where(LANES >= 3, LANES - 3, LANES)),
        ("down", 3, 31, np.where(LANES + 3 < 32, LANES + 3, LANES)),
        ("down", 1, 0x1C1F, np.where(LANES % 4 < 3, LANES + 1, LANES)),  # segments of 4
    ],
)
def test_shuffles(mode: str, operand: int, clamp: int, expected: np.ndarray) -> None:
    body = f"shfl.sync.{mode}.b32 %r1, %r60, {operand}, {clamp}, -1;\n"
    assert one_value_a_lane(body) == expected.tolist()


def test_shuffles_say_which_lanes_were_in_range() -> None:
    body = "shfl.sync.up.b32 %r2|%p1, %r60, 3, 0, -1;\nselp.b32 %r1, 1, 0, %p1;\n"
    assert one_value_a_lane(body) == [0, 0, 0] + [1] * 29


def test_votes_elections_and_reductions() -> None:
    compare = "setp.lt.u32 %p1, %r60, 4;\n"
    assert one_value_a_lane(compare + "vote.sync.ballot.b32 %r1, %p1, -1;\n") == [15] * 32
    for mode, expected in (("any", 1), ("all", 0), ("uni", 0)):
        body = compare + f"vote.sync.{mode}.pred %p2, %p1, -1;\nselp.b32 %r1, 1, 0, %p2;\n"
        assert one_value_a_lane(body) == [expected] * 32
    assert one_value_a_lane("redux.sync.add.u32 %r1, %r60, -1;\n") == [496] * 32
    assert one_value_a_lane("redux.sync.max.s32 %r1, %r60, -1;\n") == [31] * 32
    floats = "cvt.rn.f32.u32 %r2, %r60;\nsub.f32 %r2, %r2, 0f42200000;\n"  # -40 to -9
    for operation, expected in (("max", -9.0), ("min", -40.0), ("max.abs", 40.0)):
        reduce = f"redux.sync.{operation}.f32 %r1, %r2, -1;\n"
        found = np.array(one_value_a_lane(floats + reduce), np.uint32).view(np.float32)
        assert (found == expected).all(), operation
    elect = "elect.sync %r2|%p1, -1;\nselp.b32 %r1, 7, %r2, %p1;\n"
    assert one_value_a_lane(elect) == [7] + [0] * 31


def test_election_takes_the_lowest_active_lane() -> None:
    body = (
        "mov.b32 %r1, 0;\nsetp.lt.u32 %p1, %r60, 6;\n@%p1 bra L;\n"
        "elect.sync %r2|%p2, 0xffffffc0;\nselp.b32 %r1, %r2, 1, %p2;\nL:\n"
    )
    assert one_value_a_lane(body) == [0] * 6 + [6] + [1] * 25


def test_shared_memory_between_warps() -> None:
    output = np.zeros(64, np.uint32)
    run_body(
        """
        mov.b32 %r2, dynamic;
        mad.lo.u32 %r3, %r60, 4, %r2;
        st.shared.b32 [%r3], %r60;
        bar.sync 0;
        mov.b32 %r4, 63;
        sub.u32 %r4, %r4, %r60;
        mad.lo.u32 %r3, %r4, 4, %r2;
        ld.shared.b32 %r1, [%r3];
        """
        + STORE_R1,
        [output],
        threads=64,
    )
    assert output.tolist() == list(range(63, -1, -1))


def test_unwritten_shared_memory_is_reported() -> None:
    body = "mov.b32 %r2, dynamic;\nld.shared.b32 %r1, [%r2+16];\n"
    with pytest.raises(UnwrittenRead, match="byte 16 of shared memory"):
        run_body(body)
    run_body(body, check_unwritten=False)


def test_matrices_go_through_shared_memory() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        "mov.b32 %r2, dynamic;\nmad.lo.u32 %r3, %r60, 16, %r2;\n"
        "add.u32 %r4, %r60, 100;\nadd.u32 %r5, %r60, 200;\nadd.u32 %r6, %r60, 300;\n"
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r60, %r4, %r5, %r6};\n"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r7, %r8}, [%r3];\nmov.b32 %r1, %r8;\n"
        + STORE_R1,
        [output],
    )
    assert output.tolist() == [100 + lane for lane in range(32)]


def test_atomics_count_every_lane() -> None:
    counter, old = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    run_body("atom.global.add.u32 %r1, [%rd1], 2;\n" + STORE_R1, [old, counter], threads=64)
    assert counter[0] == 128
    assert sorted(old.tolist()) == list(range(0, 128, 2))
    value = np.array([5.0], np.float32)
    run_body("mov.b32 %r1, 0f3F000000;\nred.relaxed.gpu.global.add.f32 [%rd0], %r1;\n", [value])
    assert value[0] == 21.0


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("copies", [1, 4])  # lanes that add to one address
def test_atomics_add_vectors(width: int, copies: int) -> None:
    rng = np.random.default_rng(0)
    total = rng.integers(-9, 9, (32 // copies, width)).astype(np.float32)
    added = rng.integers(-9, 9, (32, width)).astype(np.float32)
    expected = total + added.reshape(copies, -1, width).sum(0)
    registers = ", ".join(f"%r{n}" for n in range(10, 10 + width))
    body = f"""
    mad.lo.u64 %rd5, %rd60, {4 * width}, %rd1;
    ld.global.v{width}.b32 {{{registers}}}, [%rd5];
    rem.u32 %r1, %r60, {32 // copies};
    mad.wide.u32 %rd6, %r1, {4 * width}, %rd0;
    red.global.add.v{width}.f32 [%rd6], {{{registers}}};
"""
    run_body(body, [total, added])
    assert np.array_equal(total, expected)


def test_vector_atomics_must_be_aligned() -> None:
    body = "red.global.add.v4.f32 [%rd0+4], {%r1, %r2, %r3, %r4};\n"
    with pytest.raises(Misaligned):
        run_body(body, [np.zeros(16, np.float32)])


PRODUCER_AND_CONSUMER = """
    // Warp 0 fills a slot of shared memory four times, warp 1 drains it into the output.
    mov.b32 %r2, dynamic;
    setp.ne.b32 %p9, %r60, 0;
    @%p9 bra INIT;
    mbarrier.init.shared.b64 [%r2], 32;
    mbarrier.init.shared.b64 [%r2+8], 32;
    INIT:
    bar.sync 0;
    mov.b32 %r10, 0;
    setp.gt.u32 %p1, %r60, 31;
    @%p1 bra CONSUMER;
    PRODUCER:
    and.b32 %r11, %r10, 1;
    xor.b32 %r11, %r11, 1;
    W0: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+8], %r11;
    @%p2 bra D0;
    bra W0;
    D0:
    mad.lo.u32 %r3, %r60, 4, %r2;
    mad.lo.u32 %r4, %r10, 100, %r60;
    st.shared.b32 [%r3+64], %r4;
    {mbarrier_full}
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 4;
    @%p3 bra PRODUCER;
    ret;
    CONSUMER:
    and.b32 %r11, %r10, 1;
    W1: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r11;
    @%p2 bra D1;
    bra W1;
    D1:
    mad.lo.u32 %r3, %r60, 4, %r2;
    ld.shared.b32 %r4, [%r3+-64];
    mbarrier.arrive.shared.b64 _, [%r2+8];
    shl.b32 %r5, %r10, 7;
    mad.lo.u32 %r5, %r60, 4, %r5;
    cvt.u64.u32 %rd10, %r5;
    add.s64 %rd10, %rd10, %rd0;
    st.global.b32 [%rd10+-128], %r4;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 4;
    @%p3 bra CONSUMER;
"""
ARRIVE_FULL = "mbarrier.arrive.shared.b64 %rd20, [%r2];"


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_mbarriers_hand_over_between_warps(schedule: str) -> None:
    for seed in range(5):
        output = np.zeros((4, 32), np.uint32)
        body = PRODUCER_AND_CONSUMER.replace("{mbarrier_full}", ARRIVE_FULL)
        run_body(body, [output], threads=64, schedule=schedule, seed=seed)
        expected = 100 * np.arange(4)[:, None] + np.arange(32)
        np.testing.assert_array_equal(output, expected)


def test_a_missing_arrival_is_a_deadlock_that_names_the_waits() -> None:
    output = np.zeros((4, 32), np.uint32)
    with pytest.raises(Deadlock) as raised:
        run_body(PRODUCER_AND_CONSUMER.replace("{mbarrier_full}", ""), [output], threads=64)
    text = str(raised.value)
    assert "warp 0 waits for parity 0 of mbarrier at shared offset 8" in text
    assert "warp 1 waits for parity 0 of mbarrier at shared offset 0" in text
    assert "32 of 32 arrivals" in text
    assert "mbarrier.try_wait" in text


def test_too_many_arrivals_are_reported() -> None:
    output = np.zeros((4, 32), np.uint32)
    body = PRODUCER_AND_CONSUMER.replace(
        "{mbarrier_full}", "mbarrier.arrive.shared.b64 _, [%r2], 3;"
    )
    with pytest.raises(BarrierMisuse, match="arrivals at mbarrier at shared offset 0") as raised:
        run_body(body, [output], threads=64)
    assert raised.value.location is not None
    assert raised.value.location.text == "mbarrier.arrive.shared.b64 _, [%r2], 3;"


def test_named_barriers_let_some_arrive_without_waiting() -> None:
    output = np.zeros(96, np.uint32)
    run_body(
        """
        mov.b32 %r2, dynamic;
        mad.lo.u32 %r3, %r60, 4, %r2;
        setp.lt.u32 %p1, %r60, 64;
        @%p1 bra WRITER;
        mov.b32 %r9, 1;
        bar.sync %r9, 96;
        ld.shared.b32 %r1, [%r3+-128];
        """
        + STORE_R1
        + "ret;\nWRITER:\nst.shared.b32 [%r3], %r60;\nbar.arrive 1, 96;\n",
        [output],
        threads=96,
    )
    assert output.tolist() == [0] * 64 + list(range(32, 64))


def test_a_barrier_that_some_never_reach_is_a_deadlock() -> None:
    body = "setp.lt.u32 %p1, %r60, 32;\n@%p1 bra L;\nbar.sync 2, 96;\nL:\n"
    with pytest.raises(Deadlock, match=r"named barrier 2 \(32 of 96 threads"):
        run_body(body, threads=64)


def test_barriers_are_for_whole_warps() -> None:
    with pytest.raises(EmulationError, match=r"bar\.sync is executed by a part of the warp"):
        run_body("setp.lt.u32 %p1, %r60, 3;\n@%p1 bra L;\nbar.sync 0;\nL:\n")


def test_clusters_share_memory_and_barriers() -> None:
    output = np.zeros((2, 32), np.uint32)
    run_body(
        """
        mov.u32 %r2, %cluster_ctarank;
        mov.b32 %r3, dynamic;
        xor.b32 %r4, %r2, 1;
        mad.lo.u32 %r5, %r60, 4, %r3;
        mapa.shared::cluster.u32 %r6, %r5, %r4;
        mad.lo.u32 %r7, %r2, 1000, %r60;
        st.shared::cluster.b32 [%r6], %r7;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        ld.shared.b32 %r1, [%r5];
        mad.lo.u32 %r8, %r2, 32, %r60;
        mul.wide.u32 %rd10, %r8, 4;
        add.s64 %rd10, %rd10, %rd0;
        st.global.b32 [%rd10], %r1;
        """,
        [output],
        grid=2,
        cluster=2,
    )
    assert output[0].tolist() == list(range(1000, 1032))
    assert output[1].tolist() == list(range(32))


def test_generic_addresses_reach_shared_memory() -> None:
    body = (
        "mov.b64 %rd9, dynamic;\ncvta.shared.u64 %rd10, %rd9;\nmad.lo.u64 %rd11, %rd60, 4, %rd10;\n"
        "st.b32 [%rd11], %r60;\nmov.b32 %r2, dynamic;\nmad.lo.u32 %r3, %r60, 4, %r2;\n"
        "ld.shared.b32 %r1, [%r3];\n"
    )
    assert one_value_a_lane(body) == list(range(32))


def test_register_counts_are_checked() -> None:
    run_body("setmaxnreg.inc.sync.aligned.u32 240;\n")
    with pytest.raises(EmulationError, match="asks for 241 registers"):
        run_body("setmaxnreg.inc.sync.aligned.u32 241;\n")


CONSUMERS_ASK = """
setp.lt.u32 %p1, %r60, 128;
@%p1 bra give;
setmaxnreg.inc.sync.aligned.u32 {consumer};
bra end;
give:
setmaxnreg.dec.sync.aligned.u32 {producer};
end:
"""


@pytest.mark.parametrize("schedule", NAMES)
def test_registers_that_no_warp_gives_are_waited_for_for_ever(schedule: str) -> None:
    """A multiprocessor has 65,536, of which each of 384 threads gets 168 at launch."""
    options = {"threads": 384, "schedule": schedule}
    run_body(CONSUMERS_ASK.format(consumer=224, producer=56), **options)
    with pytest.raises(Deadlock, match=r"224 registers a thread \(\d+ of its CTA's are free\)"):
        run_body(CONSUMERS_ASK.format(consumer=224, producer=64), **options)


def test_registers_are_fewer_for_a_cta_that_shares_the_multiprocessor() -> None:
    text = CONSUMERS_ASK.format(consumer=176, producer=80)
    run_body(text, threads=256, min_ctas=2)
    with pytest.raises(Deadlock, match="184 registers a thread"):
        run_body(text.replace("176", "184"), threads=256, min_ctas=2)

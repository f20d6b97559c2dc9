"""Barriers: when they complete, and what they refuse."""

import pytest

from fa4.emulator.barriers import MAX_COUNT, ClusterBarrier, MBarrier, MBarriers, NamedBarriers
from fa4.emulator.errors import BarrierMisuse

# ------------------------------------------------------------------ mbarriers


def test_fresh_mbarrier_has_completed_the_phase_of_parity_one():
    barrier = MBarrier(1)
    assert barrier.test_parity(1)
    assert not barrier.test_parity(0)


def test_mbarrier_completes_with_its_last_arrival_and_starts_over():
    barrier = MBarrier(3)
    barrier.arrive(2)
    assert not barrier.test_parity(0)
    barrier.arrive()
    assert barrier.test_parity(0)
    assert not barrier.test_parity(1)
    assert barrier.pending == 3
    barrier.arrive(3)
    assert barrier.test_parity(1)
    assert not barrier.test_parity(0)


def test_mbarrier_waits_for_expected_bytes_after_its_arrivals():
    barrier = MBarrier(1)
    barrier.arrive(expected_bytes=96)
    barrier.complete_tx(64)
    assert not barrier.test_parity(0)
    barrier.complete_tx(32)
    assert barrier.test_parity(0)


def test_bytes_may_come_before_they_are_expected():
    barrier = MBarrier(2)
    barrier.complete_tx(64)
    barrier.arrive()
    assert barrier.tx == -64
    barrier.arrive(expected_bytes=64)
    assert barrier.test_parity(0)


def test_expect_tx_alone_is_no_arrival():
    barrier = MBarrier(1)
    barrier.expect_tx(16)
    barrier.complete_tx(16)
    assert not barrier.test_parity(0)
    barrier.arrive()
    assert barrier.test_parity(0)


def test_more_arrivals_than_pending_are_an_error():
    barrier = MBarrier(2, "mbarrier at shared offset 8")
    with pytest.raises(BarrierMisuse, match="3 arrivals at mbarrier at shared offset 8"):
        barrier.arrive(3)
    barrier.arrive(expected_bytes=16)
    barrier.arrive()
    with pytest.raises(BarrierMisuse, match=r"0 of 2 arrivals and 16 bytes pending"):
        barrier.arrive()


def test_more_bytes_than_expected_are_an_error():
    barrier = MBarrier(1)
    barrier.arrive(expected_bytes=32)
    with pytest.raises(BarrierMisuse, match=r"48 bytes complete.*more than it was told"):
        barrier.complete_tx(48)
    early = MBarrier(1)
    early.complete_tx(48)
    with pytest.raises(BarrierMisuse, match="16 more bytes than it was told to expect"):
        early.arrive(expected_bytes=32)


def test_byte_counts_beyond_hardware_are_an_error():
    with pytest.raises(BarrierMisuse, match="can be pending"):
        MBarrier(1).expect_tx(MAX_COUNT + 1)
    with pytest.raises(BarrierMisuse, match="come early"):
        MBarrier(1).complete_tx(MAX_COUNT + 1)


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_mbarrier_count_out_of_range_is_an_error(count):
    with pytest.raises(BarrierMisuse, match="allowed are 1 to"):
        MBarrier(count)


def test_token_of_an_arrival_tests_its_own_phase():
    barrier = MBarrier(2)
    token = barrier.arrive()
    assert not barrier.test_state(token)
    barrier.arrive()
    assert barrier.test_state(token)


def test_dropping_arrival_lowers_the_count_of_later_phases():
    barrier = MBarrier(2)
    barrier.arrive(drop=True)
    barrier.arrive()
    assert barrier.test_parity(0)
    assert barrier.pending == 1


def test_mbarriers_are_found_by_offset_once_initialised():
    barriers = MBarriers(rank=1)
    with pytest.raises(BarrierMisuse, match=r"offset 16 of CTA rank 1.*never initialised"):
        barriers.at(16)
    barrier = barriers.init(16, 4)
    assert barriers.at(16) is barrier
    assert list(barriers) == [barrier]
    with pytest.raises(BarrierMisuse, match="initialised again"):
        barriers.init(16, 4)
    barriers.invalidate(16)
    with pytest.raises(BarrierMisuse, match="never initialised"):
        barriers.invalidate(16)
    with pytest.raises(BarrierMisuse, match="aligned to 8"):
        barriers.init(12, 4)


def test_writes_over_an_mbarrier_are_an_error():
    barriers = MBarriers()
    barriers.init(16, 1)
    barriers.require_apart(0, 16, "A store")
    barriers.require_apart(24, 8, "A store")
    for offset, size in [(0, 17), (23, 1), (0, 64)]:
        with pytest.raises(BarrierMisuse, match=r"A store of bytes .* overwrites mbarrier at"):
            barriers.require_apart(offset, size, "A store")


# ------------------------------------------------------------ named barriers


def test_named_barrier_lets_its_last_warp_pass_at_once_and_the_others_after():
    barriers = NamedBarriers()
    assert not barriers.sync("w0", 1, 64)
    assert not barriers.sync("w0", 1, 64)  # a poll, no second arrival
    assert barriers.sync("w1", 1, 64)
    assert barriers.sync("w0", 1, 64)


def test_named_barrier_can_be_used_again_before_the_first_warp_has_polled():
    barriers = NamedBarriers()
    assert not barriers.sync("w0", 1, 64)
    assert barriers.sync("w1", 1, 64)
    assert not barriers.sync("w1", 1, 64)  # the next generation
    assert barriers.sync("w0", 1, 64)
    assert not barriers.sync("w1", 1, 64)
    assert barriers.sync("w0", 1, 64)
    assert barriers.sync("w1", 1, 64)


def test_named_barrier_arrive_counts_without_waiting():
    barriers = NamedBarriers()
    generation = barriers.arrive(3, 96)
    assert not barriers.passed(3, generation)
    assert not barriers.sync("w1", 3, 96)
    barriers.arrive(3, 96)
    assert barriers.passed(3, generation)
    assert barriers.sync("w1", 3, 96)


def test_named_barriers_do_not_count_for_each_other():
    barriers = NamedBarriers()
    assert not barriers.sync("w0", 1, 64)
    assert not barriers.sync("w1", 2, 64)
    assert "1 (32 of 64 threads" in barriers.describe(1)


def test_named_barrier_misuse_is_an_error():
    barriers = NamedBarriers()
    barriers.arrive(1, 64)
    with pytest.raises(BarrierMisuse, match="96 threads while 32 of 64"):
        barriers.arrive(1, 96)
    with pytest.raises(BarrierMisuse, match="64 threads arrive"):
        barriers.arrive(1, 64, threads=64)
    with pytest.raises(BarrierMisuse, match="does not exist"):
        barriers.arrive(16, 64)
    with pytest.raises(BarrierMisuse, match="multiples of 32"):
        barriers.arrive(2, 33)
    with pytest.raises(BarrierMisuse, match="multiples of 32"):
        barriers.arrive(2, 0)


# ------------------------------------------------------------ cluster barrier


def test_cluster_barrier_passes_when_every_warp_has_arrived():
    barrier = ClusterBarrier(2)
    barrier.arrive((0, 0))
    assert not barrier.wait((0, 0))
    barrier.arrive((1, 0))
    assert barrier.wait((1, 0))
    barrier.arrive((1, 0))  # of the next generation, before the other warp has polled
    assert not barrier.wait((1, 0))
    assert barrier.wait((0, 0))


def test_cluster_barrier_does_not_wait_for_warps_that_exited():
    barrier = ClusterBarrier(3)
    barrier.arrive("a")
    barrier.exit("c")
    assert not barrier.wait("a")
    barrier.arrive("b")
    assert barrier.wait("a")
    barrier.exit("a")
    assert barrier.wait("b")
    barrier.arrive("b")
    assert barrier.wait("b")


def test_warp_that_arrived_and_exited_is_not_counted_twice():
    barrier = ClusterBarrier(3)
    barrier.arrive("a")
    barrier.exit("a")
    barrier.arrive("b")
    assert not barrier.wait("b")
    barrier.arrive("c")
    assert barrier.wait("b")
    assert barrier.wait("c")


def test_cluster_barrier_misuse_is_an_error():
    barrier = ClusterBarrier(2)
    with pytest.raises(BarrierMisuse, match="without arriving"):
        barrier.wait("a")
    barrier.arrive("a")
    with pytest.raises(BarrierMisuse, match="twice"):
        barrier.arrive("a")
    assert "1 of 2 warps" in barrier.describe()

"""Memory of emulated kernels: spaces, bounds, alignment, and reads of what nothing wrote."""

import numpy as np
import pytest

from fa4.emulator.errors import Location, Misaligned, OutOfBounds, UnwrittenRead
from fa4.emulator.memory import (
    AddressSpace,
    GlobalMemory,
    SharedMemory,
    Space,
    address_in,
    generic_address,
    shared_address,
)

BASE = 0x7F00_0000_1000
LANES = np.arange(32)


def make_space(size=256, **options):
    memory = GlobalMemory()
    data = np.arange(size, dtype=np.uint16).astype(np.uint8)
    memory.register("q", BASE, data, **options)
    cluster = [SharedMemory.create(4096, rank) for rank in range(2)]
    return AddressSpace(memory, cluster, bytes(range(64))), data


def test_load_gathers_a_value_a_lane():
    space, data = make_space()
    loaded = space.load(Space.GLOBAL, BASE + 4 * LANES[::-1], 4)
    assert loaded.shape == (32, 4)
    assert (loaded == data[:128].reshape(32, 4)[::-1]).all()


def test_lanes_outside_the_mask_touch_nothing_and_read_zero():
    space, data = make_space()
    addresses = np.where(LANES == 3, BASE + 8, 1)  # 1 is nobody's
    loaded = space.load(Space.GLOBAL, addresses, 4, LANES == 3)
    assert (loaded[3] == data[8:12]).all()
    assert not np.delete(loaded, 3, axis=0).any()
    assert not space.load(Space.GLOBAL, addresses, 4, np.zeros(32, bool)).any()


def test_store_is_seen_by_the_owner_of_the_memory():
    space, data = make_space()
    values = np.arange(64, dtype=np.uint8).reshape(32, 2)
    space.store(Space.GLOBAL, BASE + 2 * LANES, values, LANES >= 16)
    assert (data[32:64] == np.arange(32, 64)).all()
    assert (data[:32] == np.arange(32)).all()


def test_last_lane_wins_where_lanes_store_to_one_address():
    space, data = make_space()
    space.store(Space.GLOBAL, np.full(32, BASE), LANES.astype(np.uint8)[:, None])
    assert data[0] == 31


def test_lanes_may_touch_different_allocations():
    space, data = make_space()
    other = np.full(64, 0xAB, np.uint8)
    space.global_memory.register("k", BASE + 0x1000, other)
    addresses = np.where(LANES % 2 == 0, BASE, BASE + 0x1000)
    loaded = space.load(Space.GLOBAL, addresses, 1)[:, 0]
    assert (loaded[::2] == data[0]).all()
    assert (loaded[1::2] == 0xAB).all()


def test_overlapping_views_of_one_tensor_are_both_readable():
    memory, data = GlobalMemory(), np.arange(64, dtype=np.uint8)
    memory.register("q of qkv", BASE, data[:40])
    memory.register("k of qkv", BASE + 16, data[16:])
    assert memory.find(BASE, BASE + 40).name == "q of qkv"
    assert memory.find(BASE + 32, BASE + 48).name == "k of qkv"
    assert memory.find(BASE, BASE + 48) is None  # no view covers it whole


def test_access_beyond_an_allocation_names_it_and_the_lane():
    space, _ = make_space()
    with pytest.raises(OutOfBounds, match=r"nearest is q \(256 bytes.*at byte 256") as caught:
        space.load(Space.GLOBAL, BASE + 4 * (LANES + 60), 4)
    assert caught.value.lane == 4


@pytest.mark.parametrize("address", [BASE - 1, BASE + 256, 0])
def test_store_outside_every_allocation_is_an_error(address):
    space, _ = make_space()
    with pytest.raises(OutOfBounds, match="no allocation's"):
        space.store(Space.GLOBAL, np.full(32, address), np.zeros((32, 1), np.uint8))


def test_store_to_read_only_memory_is_an_error():
    space, data = make_space(writable=False)
    with pytest.raises(OutOfBounds, match="read-only"):
        space.store(Space.GLOBAL, np.full(32, BASE), np.ones((32, 4), np.uint8))
    assert data[1] == 1
    with pytest.raises(OutOfBounds, match=r"kernel parameters.*read-only"):
        space.store(Space.PARAM, np.zeros(32, int), np.ones((32, 4), np.uint8))


@pytest.mark.parametrize("nbytes", [2, 4, 8, 16])
def test_misaligned_access_names_the_lane(nbytes):
    space, _ = make_space()
    addresses = np.full(32, BASE + nbytes)
    addresses[7] += nbytes // 2
    with pytest.raises(Misaligned, match=f"aligned to {nbytes} bytes") as caught:
        space.load(Space.GLOBAL, addresses, nbytes)
    assert caught.value.lane == 7


def test_reading_uninitialised_global_memory_is_an_error_until_it_is_written():
    space, _ = make_space(initialised=False)
    addresses = np.full(32, BASE + 64)
    with pytest.raises(UnwrittenRead, match="byte 64 of q"):
        space.load(Space.GLOBAL, addresses, 4)
    space.store(Space.GLOBAL, addresses, np.full((32, 3), 9, np.uint8)[:, :2])
    with pytest.raises(UnwrittenRead, match="byte 66 of q") as caught:
        space.load(Space.GLOBAL, addresses, 4, LANES >= 5)
    assert caught.value.lane == 5
    assert (space.load(Space.GLOBAL, addresses, 2) == 9).all()


def test_shared_addresses_carry_the_rank_of_their_cta():
    space, _ = make_space()
    own, remote = shared_address(0, 512), shared_address(1, 512)
    assert remote - own == 1 << 24
    space.store(Space.SHARED, np.full(32, remote), np.full((32, 4), 7, np.uint8))
    assert (space.cluster[1].bytes[512:516] == 7).all()
    with pytest.raises(UnwrittenRead, match="CTA rank 0"):
        space.load(Space.SHARED, np.full(32, own), 4)
    memory, offset = space.shared_at(remote)
    assert (memory.rank, offset) == (1, 512)


def test_cta_outside_the_cluster_is_an_error():
    space, _ = make_space()
    with pytest.raises(OutOfBounds, match=r"CTA rank 2.*2 CTAs"):
        space.shared_at(shared_address(2, 0))
    with pytest.raises(OutOfBounds, match="shared space"):
        space.load(Space.SHARED, np.full(32, shared_address(2, 0)), 4)
    with pytest.raises(OutOfBounds, match="4096 bytes"):
        space.load(Space.SHARED, np.full(32, shared_address(1, 4096)), 4)


def test_generic_addresses_reach_every_space():
    space, data = make_space()
    space.store(Space.SHARED, np.full(32, shared_address(1, 16)), np.full((32, 4), 5, np.uint8))
    addresses = np.array(
        [
            BASE + 4,
            generic_address(Space.SHARED, shared_address(1, 16)),
            generic_address(Space.PARAM, 8),
        ]
    )
    loaded = space.load(None, addresses, 4)
    assert (loaded[0] == data[4:8]).all()
    assert (loaded[1] == 5).all()
    assert (loaded[2] == [8, 9, 10, 11]).all()
    assert address_in(Space.PARAM, int(addresses[2])) == 8
    with pytest.raises(OutOfBounds, match="not in the window of shared"):
        address_in(Space.SHARED, int(addresses[2]))
    with pytest.raises(OutOfBounds, match="in no window"):
        space.load(None, np.array([9 << 56]), 4)


def test_read_returns_bytes_of_one_address():
    space, data = make_space()
    assert space.read(None, generic_address(Space.PARAM, 32), 16, 32) == bytes(range(32, 48))
    assert space.read(Space.GLOBAL, BASE + 3, 5) == data[3:8].tobytes()
    with pytest.raises(Misaligned, match="64 bytes"):
        space.read(Space.PARAM, 32, 16, 64)
    with pytest.raises(OutOfBounds, match="param space"):
        space.read(Space.PARAM, 56, 16)


def test_register_refuses_what_is_no_flat_byte_array():
    memory = GlobalMemory()
    with pytest.raises(ValueError, match="flat uint8"):
        memory.register("q", BASE, np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match="below"):
        memory.register("q", 1 << 56, np.zeros(4, np.uint8))


def test_error_names_the_instruction_nearest_to_it():
    error = OutOfBounds("A load touches nothing.", lane=3)
    assert str(error) == "A load touches nothing."
    error.locate(Location(17, "ld.global.b32  %r1, [%rd2];", (1, 0, 0), 2))
    error.locate(Location(99))
    assert str(error).endswith(
        "at PTX line 17 (ld.global.b32 %r1, [%rd2];), CTA (1, 0, 0), warp 2, lane 3"
    )

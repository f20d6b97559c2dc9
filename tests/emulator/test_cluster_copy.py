"""What CTAs of a cluster do in each other's shared memory."""

import struct

import numpy as np
import pytest

from fa4.emulator.errors import Deadlock, EmulationError, Misaligned, OutOfBounds, UnwrittenRead
from fa4.emulator.execute import Options, run_launch
from fa4.emulator.launch_record import Launch
from fa4.emulator.memory import GlobalMemory
from fa4.emulator.tensor_map import ElementType, TensorMap, encode
from tests.emulator.ptx_kernels import kernel_text, run_body

SCHEDULES = ["round_robin", "random", "adversarial"]

# Every CTA initialises the mbarrier at offset 0 for one arrival, before any other CTA uses it.
# %r1 is the CTA's rank, %r2 the other's in a cluster of two, %p1 holds in lane 0.
PROLOGUE = """
    mov.u32 %r1, %cluster_ctarank;
    xor.b32 %r2, %r1, 1;
    mov.b32 %r59, dynamic;
    setp.eq.u32 %p1, %r60, 0;
    @%p1 mbarrier.init.shared.b64 [dynamic], 1;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
EXPECT = "    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd30, [dynamic], {};\n"
WAIT = """
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [dynamic], 0;
    @!%p2 bra waiting;
"""
# No CTA ends while another may still write to it.
EPILOGUE = """
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
# Element of the output: 32 a CTA.
STORE = """
    shl.b32 %r50, %r1, 5;
    add.u32 %r50, %r50, %r60;
    mad.wide.u32 %rd50, %r50, 4, %rd0;
    st.global.b32 [%rd50], %r10;
"""


def run(body: str, *arrays: np.ndarray, cluster: int = 2, **options: object) -> None:
    text = PROLOGUE + body + EPILOGUE
    run_body(text, arrays, grid=cluster, cluster=cluster, shared_bytes=4096, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stores_and_arrivals_reach_the_other_cta(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    run(
        """
    shl.b32 %r3, %r60, 2;
    add.u32 %r3, %r3, %r59;
    mapa.shared::cluster.u32 %r4, %r3, %r2;
    getctarank.shared::cluster.u32 %r5, %r4;
    mad.lo.u32 %r6, %r1, 100, %r60;
    mad.lo.u32 %r6, %r5, 1000, %r6;
    st.shared::cluster.b32 [%r4+1024], %r6;
    bar.sync 0;
    mapa.shared::cluster.u32 %r7, %r59, %r2;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
"""
        + WAIT
        + "    ld.shared.b32 %r10, [%r3+1024];\n"
        + STORE,
        out,
        schedule=schedule,
    )
    # To rank 0 from rank 1, and the other way around.
    assert np.array_equal(out, np.r_[100 + np.arange(32), 1000 + np.arange(32)])


def test_a_rank_beyond_the_cluster_is_an_error() -> None:
    body = "    mapa.shared::cluster.u32 %r4, %r59, 2;\n    ld.shared::cluster.b32 %r5, [%r4];\n"
    with pytest.raises(OutOfBounds, match="shared space"):
        run(body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_asynchronous_store_completes_bytes_in_the_other_cta(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    run(
        EXPECT.format(32 * 8)
        + """
    shl.b32 %r3, %r60, 3;
    add.u32 %r3, %r3, %r59;
    mapa.shared::cluster.u32 %r4, %r3, %r2;
    mapa.shared::cluster.u32 %r5, %r59, %r2;
    add.u32 %r6, %r60, %r1;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4+1024], {%r6, %r60}, [%r5];
"""
        + WAIT
        + "    ld.shared.v2.b32 {%r10, %r11}, [%r3+1024];\n    mad.lo.u32 %r10, %r11, 100, %r10;\n"
        + STORE,
        out,
        schedule=schedule,
    )
    lanes = np.arange(32)
    assert np.array_equal(out, np.r_[101 * lanes + 1, 101 * lanes])


# -- bulk copies -----------------------------------------------------------------------------------

LOAD = """
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
        [dynamic+1024], [%rd1], 128, [dynamic];
"""
READ = "    shl.b32 %r3, %r60, 2;\n    add.u32 %r3, %r3, %r59;\n    ld.shared.b32 %r10, [%r3+{}];\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copies_to_a_cta_and_on_to_the_other(schedule: str) -> None:
    """Each CTA loads its 128 bytes; the second phase has what the other had loaded."""
    out, source = np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32)
    second = WAIT.replace("waiting", "again").replace(", 0;", ", 1;")
    run(
        EXPECT.format(128)
        + "    mad.wide.u32 %rd1, %r1, 128, %rd1;\n"
        + LOAD
        + WAIT
        + EPILOGUE
        + EXPECT.format(128)
        + EPILOGUE
        + """
    mapa.shared::cluster.u32 %r4, %r59, %r2;
    add.u32 %r5, %r59, 1024;
    @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
        [%r4+2048], [%r5], 128, [%r4];
"""
        + second
        + READ.format(2048)
        + STORE,
        out,
        source,
        schedule=schedule,
    )
    assert np.array_equal(out, np.r_[source[32:], source[:32]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bulk_multicast_fills_every_cta_of_its_mask(schedule: str) -> None:
    out, source = np.zeros(128, np.uint32), np.arange(32, dtype=np.uint32) + 7
    body = f"""
    {EXPECT.format(128)}
    {EPILOGUE}
    mov.b16 %h1, 11;
    setp.eq.u32 %p3, %r1, 1;
    and.pred %p3, %p3, %p1;
    @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
        [dynamic+1024], [%rd1], 128, [dynamic], %h1;
    setp.eq.u32 %p3, %r1, 2;
    @%p3 bra left_out;
    {WAIT}
    {READ.format(1024)}
    {STORE}
left_out:
"""
    body = body.replace(EXPECT.format(128), EXPECT.format(128).replace("@%p1", "@%p1"))
    run(body, out, source, cluster=4, schedule=schedule)
    expected = np.tile(source, 4)
    expected[64:96] = 0  # rank 2 is not in the mask of ranks 0, 1 and 3
    assert np.array_equal(out, expected)


def test_a_multicast_beyond_the_cluster_is_an_error() -> None:
    body = """
    mov.b16 %h1, 5;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
        [dynamic+1024], [%rd0], 128, [dynamic], %h1;
"""
    with pytest.raises(OutOfBounds, match="CTAs 0b101 of a cluster of 2"):
        run(body, np.zeros(32, np.uint32))


def test_bulk_reduction_adds_to_global_memory() -> None:
    total, source = np.full(32, 0.5, np.float32), np.arange(32, dtype=np.float32)
    run(
        EXPECT.format(128)
        + LOAD
        + WAIT
        + """
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd0], [dynamic+1024], 128;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
""",
        total,
        source,
    )
    assert np.array_equal(total, 0.5 + 2 * source)  # from both CTAs


def test_bulk_store_writes_global_memory() -> None:
    target, source = np.zeros(32, np.float32), np.arange(32, dtype=np.float32)
    run(
        EXPECT.format(128)
        + LOAD
        + WAIT
        + """
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0+64], [dynamic+1024], 64;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
""",
        target,
        source,
    )
    assert np.array_equal(target, np.r_[np.zeros(16), source[:16]])


def test_a_bulk_store_of_what_nothing_wrote_is_an_error() -> None:
    body = "    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [dynamic+1024], 64;\n"
    with pytest.raises(UnwrittenRead, match="byte 1024"):
        run(body, np.zeros(32, np.float32))


@pytest.mark.parametrize(("offset", "size"), [(8, 64), (0, 40)])
def test_bulk_copies_are_in_units_of_16_bytes(offset: int, size: int) -> None:
    body = LOAD.replace("[%rd1]", f"[%rd0+{offset}]").replace("128", str(size))
    with pytest.raises(Misaligned, match="16"):
        run(body, np.zeros(64, np.float32))


# -- multicast of tiles ----------------------------------------------------------------------------


def run_tiles(opcode: str, barrier: str, expects: dict[int, int], schedule: str) -> np.ndarray:
    """Rank 1 of four loads a tile of 4 x 32 words for the ranks 0, 2 and 3; the ranks in `expects`
    wait for so many bytes, and then everyone in the mask reads the first row of its own tile."""
    source = np.arange(128, dtype=np.uint32).reshape(4, 32)
    out = np.zeros(128, np.uint32)
    tile = TensorMap(source.ctypes.data, ElementType.U32, (32, 4), (4, 128), (32, 4), 0)
    packed = np.frombuffer(encode(tile) + bytes(64), np.uint8).copy()
    start = -packed.ctypes.data % 64
    placed = np.zeros(packed.size + 64, np.uint8)
    start = -placed.ctypes.data % 64
    placed[start : start + packed.size] = packed
    waits = "".join(
        f"""
    setp.ne.u32 %p4, %r1, {rank};
    @%p4 bra no_wait_{rank};
    {EXPECT.format(nbytes)}
    {WAIT.replace("waiting", f"waiting_{rank}")}
no_wait_{rank}:
"""
        for rank, nbytes in expects.items()
    )
    body = f"""
    mov.b16 %h1, 13;
    setp.eq.u32 %p3, %r1, 1;
    and.pred %p3, %p3, %p1;
    mov.b32 %r8, 0;
    {barrier}
    @%p3 {opcode} [dynamic+1024], [%rd1, {{%r8, %r8}}], [%r9], %h1;
    {waits}
    {EPILOGUE}
    setp.eq.u32 %p3, %r1, 1;
    @%p3 bra left_out;
    {READ.format(1024)}
    {STORE}
left_out:
"""
    memory = GlobalMemory()
    for name, array in (("out", out), ("map", placed), ("source", source)):
        memory.register(name, array.ctypes.data, array.reshape(-1).view(np.uint8))
    params = struct.pack("<QQ", out.ctypes.data, placed.ctypes.data + start)
    text = kernel_text(PROLOGUE + body + EPILOGUE, 2)
    launch = Launch("kernel", text, (4, 1, 1), (32, 1, 1), (4, 1, 1), 4096, params)
    run_launch(launch, memory, Options(schedule=schedule))
    return out.reshape(4, 32)


OPCODE = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster"
)
TILE_BYTES = 4 * 32 * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tile_multicast_completes_in_every_cta_of_its_mask(schedule: str) -> None:
    expects = dict.fromkeys((0, 2, 3), TILE_BYTES)
    out = run_tiles(OPCODE, "mov.b32 %r9, %r59;", expects, schedule)
    assert np.array_equal(out[[0, 2, 3]], np.tile(np.arange(32), (3, 1)))
    assert not out[1].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tile_multicast_by_pairs_completes_in_the_ctas_of_one_parity(schedule: str) -> None:
    """Rank 1 names its own mbarrier with bit 24 cleared: the even CTA of each pair counts both."""
    barrier = "and.b32 %r9, %r59, 0xFEFFFFFF;"
    expects = {0: TILE_BYTES, 2: 2 * TILE_BYTES}
    out = run_tiles(OPCODE + ".cta_group::2", barrier, expects, schedule)
    assert np.array_equal(out[[0, 2, 3]], np.tile(np.arange(32), (3, 1)))


def test_bytes_that_go_to_another_mbarrier_are_a_deadlock() -> None:
    barrier = "and.b32 %r9, %r59, 0xFEFFFFFF;"
    with pytest.raises(Deadlock, match=f"{TILE_BYTES} bytes pending"):
        run_tiles(OPCODE + ".cta_group::2", barrier, {3: TILE_BYTES}, "round_robin")


# -- parts of a warp at the cluster's barrier ------------------------------------------------------

APART = """
    setp.eq.u32 %p1, %r60, 0;
    mov.b32 %r1, 0;
    @!%p1 bra together;
work:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 5;
    @%p2 bra work;
together:
    barrier.cluster.arrive{aligned};
    barrier.cluster.wait{aligned};
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_lanes_may_come_apart_to_a_barrier_that_is_not_aligned(schedule: str) -> None:
    out = np.zeros(2, np.uint32)
    body = APART.format(aligned="") + "    red.global.add.u32 [%rd0], 1;\n"
    body = body.replace("@!%p1 bra together", "@%p1 bra work;\n    bra together")
    run_body(body + APART.format(aligned="").replace("work", "more").replace("together", "behind"),
             [out], threads=32, grid=2, cluster=2, schedule=schedule)  # fmt: skip
    assert out[0] == 64


def test_a_lane_alone_cannot_pass_the_barrier() -> None:
    body = """
    setp.eq.u32 %p1, %r60, 0;
    @!%p1 bra skip;
    barrier.cluster.arrive;
    barrier.cluster.wait;
skip:
    bar.warp.sync -1;
"""
    with pytest.raises(Deadlock, match="the cluster's barrier"):
        run_body(body, threads=32, grid=2, cluster=2)


def test_an_aligned_barrier_needs_the_whole_warp() -> None:
    body = "    setp.eq.u32 %p1, %r60, 0;\n    @%p1 bra skip;\n"
    body += "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\nskip:\n"
    with pytest.raises(EmulationError, match="part of the warp"):
        run_body(body, threads=32, grid=2, cluster=2)

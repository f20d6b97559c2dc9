"""Small kernels with one race or missing fence each, next to the same kernel without it.

The race detector must name the fault under every schedule, and stay silent about the right kernel.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from fa4.emulator.errors import (
    BarrierMisuse,
    DataRace,
    EmulationError,
    MissingProxyFence,
    OutOfBounds,
    UnfinishedCopy,
)
from fa4.emulator.execute import Options
from fa4.emulator.race_detector import Shadow
from tests.emulator.ptx_kernels import mapped_text, run_mapped

SCHEDULES = (("round_robin", 0), ("random", 1), ("adversarial", 2), ("adversarial", 3))

# mbarriers are at %r0 and %r0+8, tiles from %r0+1024 on; %r2 is where this thread's 8 bytes of the
# first tile are.
PRELUDE = """
    shr.u32 %r5, %r1, 5;
    setp.eq.b32 %p3, %r1, 32;
    mov.u32 %r6, %cluster_ctarank;
    shl.b32 %r2, %r1, 3;
    add.s32 %r2, %r2, %r0;
    mov.b64 %rd3, 0;
    mov.b32 %r3, 7;
    mov.b16 %h0, 7;
    mov.b64 %rd4, 0x4000004000010040;
    setp.ne.b32 %p2, 0, 0;
    mov.b64 %rd6, {matrix};
    mov.b32 %r11, {shape};
"""
# For tcgen05: M = 64, N = 8, bf16 to f32. K-major without swizzle in the 256 bytes from 1024 on,
# which hold every 8 rows: no stride between those.
TCGEN05_SHAPE = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 17 | 4 << 24
TCGEN05_MATRIX = 1024 // 16 | (128 // 16) << 16 | 1 << 46
PRELUDE = PRELUDE.replace("{matrix}", hex(TCGEN05_MATRIX)).replace("{shape}", hex(TCGEN05_SHAPE))

INIT = "@%p0 mbarrier.init.shared.b64 [%r0], 1; @%p0 mbarrier.init.shared.b64 [%r0+8], 1;"
PUBLISH = "fence.mbarrier_init.release.cluster; bar.sync 0;"
SETUP = INIT + PUBLISH
LOAD = (
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r0], 1024;"
    "@%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    " [%r0+1024], [%rd1, {0, 0}], [%r0];"
)
LOAD_AGAIN = LOAD.replace("[%r0]", "[%r0+8]")
STORE = (
    "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 8}], [%r0+1024];"
)
COMMIT = "@%p0 cp.async.bulk.commit_group;"
DRAIN = "@%p0 cp.async.bulk.wait_group.read 0;"
FENCE = "fence.proxy.async.shared::cta;"
FILL = "st.shared.b64 [%r2+1024], %rd3;"
SYNC = "bar.sync 0;"
MULTIPLY = (
    "wgmma.fence.sync.aligned;"
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    " {%acc0, %acc1, %acc2, %acc3}, {%r1, %r1, %r1, %r1}, %rd4, %p2, 1, 1, 0;"
    "wgmma.commit_group.sync.aligned;"
)
MULTIPLIED = "wgmma.wait_group.sync.aligned 0;"


def wait(offset: int = 0) -> str:
    return (
        f"WAIT_{offset}: mbarrier.try_wait.parity.shared.b64 %p1, [%r0+{offset}], 0;"
        f"@%p1 bra DONE_{offset}; bra WAIT_{offset}; DONE_{offset}:"
    )


_labels = itertools.count()


def _unless(condition: str, body: str) -> str:
    label = f"AROUND_{next(_labels)}"
    return f"{condition}; @%p4 bra {label}; {body} {label}:"


def in_warp(number: int, body: str) -> str:
    """A body for one warp; the others go around it."""
    return _unless(f"setp.ne.b32 %p4, %r5, {number}", body)


def in_cta(rank: int, body: str) -> str:
    return _unless(f"setp.ne.b32 %p4, %r6, {rank}", body)


WRITE = "@%p0 st.shared.b32 [%r0+64], %r3;"
READ_WORD = "ld.shared.b32 %r4, [%r0+64];"
READ = in_warp(1, READ_WORD)
OVERWRITE = in_warp(1, "st.shared.b32 [%r0+64], %r3;")
READ_TILE = "ld.shared.b64 %rd5, [%r2+1024];"
COPY = "cp.async.ca.shared.global [%r2+1024], [%rd0], 8;"
COPY_COMMIT = "cp.async.commit_group;"
SETUP_COPIES = "@%p0 mbarrier.init.shared.b64 [%r0], 32;" + PUBLISH
COPY_WAIT = "cp.async.wait_group 0;"
COPY_ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r0];"
READ_COPIED = in_warp(1, "ld.shared.b64 %rd5, [%r2+768];")  # what warp 0 copied
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
PEER = "mapa.shared::cluster.u32 %r7, %r0, 1;"
EXPECT_WORD = "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r0], 4;"
REMOTE_STORE = (
    "add.s32 %r8, %r7, 64;"
    "@%p0 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8], %r3, [%r7];"
)
BULK_LOAD = (
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r0], 1024;"
    "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    " [%r0+1024], [%rd0], 1024, [%r0];"
)
BULK_STORE = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r0+1024], 1024;"
TRY_CANCEL = (
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r0], 16;"
    "@%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
    " [%r0+48], [%r0];"
)
READ_ANSWER = "ld.shared.b64 %rd5, [%r0+48];"
ALLOCATE = (
    in_warp(0, "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+32], 32;")
    + SYNC
    + "ld.shared.b32 %r10, [%r0+32];"
)
FREE = in_warp(0, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;")
STORE_TENSOR = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%r1};"
STORED_TENSOR = "tcgen05.wait::st.sync.aligned;"
LOAD_TENSOR = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r10];"
PRODUCT = (
    "@%p0 tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd6, %rd6, %r11, %p2;"
    "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];"
)
NEXT_PRODUCT = PRODUCT.replace("%p0", "%p3").replace("[%r0]", "[%r0+8]")  # by another warp
PREPARE = SETUP + ALLOCATE + FILL
REMOTE_WRITE = "@%p0 st.shared::cluster.b32 [%r7+64], %r3;"
REMOTE_ARRIVE = "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];"
CLUSTER_SETUP = INIT + "fence.mbarrier_init.release.cluster;" + CLUSTER_SYNC


@dataclass(frozen=True)
class Fault:
    """A kernel body that is wrong and one that is right.

    wrong, right  PTX
    error         what the wrong one raises
    message       pattern in the error's text
    cluster       CTAs
    """

    name: str
    wrong: str
    right: str
    error: type[EmulationError] | tuple[type[EmulationError], ...]
    message: str
    cluster: int = 1

    def __str__(self) -> str:
        return self.name


FAULTS = [
    Fault(
        "read beside a write",
        WRITE + READ,
        WRITE + SYNC + READ,
        DataRace,
        r"byte 64 of shared memory.*(load by warp 1.*store by warp 0|store.*load by warp 1)",
    ),
    Fault(
        "write beside a read",
        WRITE + SYNC + READ_WORD + OVERWRITE,
        WRITE + SYNC + READ_WORD + SYNC + OVERWRITE,
        DataRace,
        "byte 64 .*(after a load by warp|after a store by warp 1)",
    ),
    Fault(
        "write beside a write",
        WRITE + OVERWRITE,
        WRITE + SYNC + OVERWRITE,
        DataRace,
        "store by warp .* comes after a store by warp",
    ),
    Fault(
        "bytes of one word",
        "@%p0 st.shared.b8 [%r0+65], %h0;" + in_warp(1, "st.shared.b8 [%r0+65], %h0;"),
        "@%p0 st.shared.b8 [%r0+64], %h0;" + in_warp(1, "st.shared.b8 [%r0+65], %h0;"),
        DataRace,
        "byte 65 ",
    ),
    Fault(
        "plain read beside atomics",
        WRITE + SYNC + "red.shared.add.u32 [%r0+64], %r3;" + READ,
        WRITE + SYNC + "red.shared.add.u32 [%r0+64], %r3;" + SYNC + READ,
        DataRace,
        "(an atomic|a load) by warp .* comes after (an atomic|a load) by warp",
    ),
    Fault(
        "arrival at an mbarrier before the write",
        SETUP + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + WRITE + wait() + READ,
        SETUP + WRITE + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + wait() + READ,
        DataRace,
        "byte 64 ",
    ),
    Fault(
        "arrival that nobody waits for",
        SETUP + WRITE + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + READ,
        SETUP + WRITE + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + wait() + READ,
        DataRace,
        "byte 64 ",
    ),
    Fault(
        "arrival at a named barrier without a wait for it",
        WRITE + in_warp(0, "bar.arrive 1, 64;") + in_warp(2, "bar.sync 1, 64;") + READ,
        WRITE + in_warp(0, "bar.arrive 1, 64;") + in_warp(1, "bar.sync 1, 64;") + READ,
        DataRace,
        "byte 64 ",
    ),
    Fault(
        "mbarrier used by a warp that cannot know of it",
        INIT + in_warp(1, "@%p3 mbarrier.arrive.shared.b64 %rd2, [%r0];"),
        INIT + SYNC + in_warp(1, "@%p3 mbarrier.arrive.shared.b64 %rd2, [%r0];"),
        (DataRace, BarrierMisuse),  # the latter when it comes first
        "warp 1 uses mbarrier at shared offset 0|never initialised",
    ),
    Fault(
        "mbarrier used by TMA without a fence after its initialisation",
        INIT + SYNC + LOAD + wait(),
        SETUP + LOAD + wait(),
        MissingProxyFence,
        "TMA load uses mbarrier at shared offset 0.*fence.mbarrier_init",
    ),
    Fault(
        "read of a loaded tile by a warp that did not wait",
        SETUP + LOAD + in_warp(0, wait()) + READ_TILE,
        SETUP + LOAD + wait() + READ_TILE,
        DataRace,
        "a load by warp .*TMA|a TMA load by .*load by warp",
    ),
    Fault(
        "tile loaded over one that is still read",
        SETUP + LOAD + wait() + READ_TILE + LOAD_AGAIN + wait(8),
        SETUP + LOAD + wait() + READ_TILE + SYNC + LOAD_AGAIN + wait(8),
        DataRace,
        "a TMA load|a load by warp",
    ),
    Fault(
        "tile loaded that nobody waits for",
        SETUP + LOAD,
        SETUP + LOAD + in_warp(2, wait()),
        UnfinishedCopy,
        "TMA load to mbarrier at shared offset 0",
    ),
    Fault(
        "tile stored by TMA without a proxy fence",
        FILL + SYNC + STORE + COMMIT + DRAIN,
        FILL + FENCE + SYNC + STORE + COMMIT + DRAIN,
        MissingProxyFence,
        "a TMA store by the bulk stores of warp 0 .*after a store by warp",
    ),
    Fault(
        "proxy fence before the writes",
        FENCE + FILL + SYNC + STORE + COMMIT + DRAIN,
        FILL + SYNC + FENCE + STORE + COMMIT + DRAIN,
        MissingProxyFence,
        "fence.proxy.async",
    ),
    Fault(
        "proxy fence for global memory",
        FILL + "fence.proxy.async.global;" + SYNC + STORE + COMMIT + DRAIN,
        FILL + "fence.proxy.async;" + SYNC + STORE + COMMIT + DRAIN,
        MissingProxyFence,
        "fence.proxy.async",
    ),
    Fault(
        "tile overwritten while it is stored",
        FILL + FENCE + SYNC + STORE + COMMIT + SYNC + FILL + DRAIN,
        FILL + FENCE + SYNC + STORE + COMMIT + DRAIN + SYNC + FILL,
        DataRace,
        "a store by warp .* after a TMA store",
    ),
    Fault(
        "wait that leaves the latest store pending",
        FILL + FENCE + SYNC + STORE + COMMIT + DRAIN.replace("0;", "1;") + SYNC + FILL + DRAIN,
        FILL + FENCE + SYNC + STORE + COMMIT + COMMIT + DRAIN.replace("0;", "1;") + SYNC + FILL,
        DataRace,
        "a store by warp .* after a TMA store",
    ),
    Fault(
        "exit before a tile is stored",
        FILL + FENCE + SYNC + STORE + COMMIT,
        FILL + FENCE + SYNC + STORE + COMMIT + DRAIN,
        UnfinishedCopy,
        "bulk stores may still read",
    ),
    Fault(
        "store in no group that could be waited for",
        FILL + FENCE + SYNC + STORE + DRAIN,
        FILL + FENCE + SYNC + STORE + COMMIT + DRAIN,
        UnfinishedCopy,
        "bulk stores may still read",
    ),
    Fault(
        "operand of wgmma without a proxy fence",
        FILL + SYNC + MULTIPLY + MULTIPLIED,
        FILL + FENCE + SYNC + MULTIPLY + MULTIPLIED,
        MissingProxyFence,
        "a wgmma by the wgmmas of warp .*after a store by warp",
    ),
    Fault(
        "operand of wgmma that other warps still write",
        FILL + FENCE + MULTIPLY + MULTIPLIED,
        FILL + FENCE + SYNC + MULTIPLY + MULTIPLIED,
        DataRace,
        "a wgmma|a store",
    ),
    Fault(
        "operand of wgmma overwritten before the wait",
        FILL + FENCE + SYNC + MULTIPLY + FILL + MULTIPLIED,
        FILL + FENCE + SYNC + MULTIPLY + MULTIPLIED + SYNC + FILL,
        DataRace,
        "a store by warp .* after a wgmma|a wgmma .* after a store",
    ),
    Fault(
        "operand of wgmma overwritten while other warps still multiply",
        FILL + FENCE + SYNC + MULTIPLY + MULTIPLIED + FILL,
        FILL + FENCE + SYNC + MULTIPLY + MULTIPLIED + SYNC + FILL,
        DataRace,
        "a store by warp .* after a wgmma|a wgmma .* after a store",
    ),
    Fault(
        "cp.async read without a wait",
        in_warp(0, COPY + COPY_COMMIT) + SYNC + READ_COPIED,
        in_warp(0, COPY + COPY_COMMIT + COPY_WAIT) + SYNC + READ_COPIED,
        DataRace,
        "cp.async",
    ),
    Fault(
        "cp.async issued after the arrival for it",
        SETUP_COPIES + in_warp(0, COPY_ARRIVE + COPY) + wait() + READ_COPIED,
        SETUP_COPIES + in_warp(0, COPY + COPY_ARRIVE) + wait() + READ_COPIED,
        DataRace,
        "cp.async",
    ),
    Fault(
        "copied tile stored by TMA without a proxy fence",
        COPY + COPY_COMMIT + COPY_WAIT + SYNC + STORE + COMMIT + DRAIN,
        COPY + COPY_COMMIT + COPY_WAIT + FENCE + SYNC + STORE + COMMIT + DRAIN,
        MissingProxyFence,
        "a TMA store .*after a cp.async",
    ),
    Fault(
        "write to another CTA without the cluster's barrier",
        in_cta(0, PEER + REMOTE_WRITE) + in_cta(1, READ_WORD),
        in_cta(0, PEER + REMOTE_WRITE) + CLUSTER_SYNC + in_cta(1, READ_WORD),
        DataRace,
        "byte 64 of shared memory of CTA rank 1",
        cluster=2,
    ),
    Fault(
        "arrival in another CTA before the write there",
        CLUSTER_SETUP
        + in_cta(0, PEER + REMOTE_ARRIVE + REMOTE_WRITE)
        + in_cta(1, wait() + READ_WORD),
        CLUSTER_SETUP
        + in_cta(0, PEER + REMOTE_WRITE + REMOTE_ARRIVE)
        + in_cta(1, wait() + READ_WORD),
        DataRace,
        "byte 64 of shared memory of CTA rank 1",
        cluster=2,
    ),
    Fault(
        "st.async read by a warp that did not wait",
        CLUSTER_SETUP
        + in_cta(1, EXPECT_WORD + in_warp(0, wait()) + READ_WORD)
        + in_cta(0, PEER + REMOTE_STORE),
        CLUSTER_SETUP
        + in_cta(1, EXPECT_WORD + wait() + READ_WORD)
        + in_cta(0, PEER + REMOTE_STORE),
        DataRace,
        "byte 64 of shared memory of CTA rank 1.*(a st.async|a load)",
        cluster=2,
    ),
    Fault(
        "bulk copy read by a warp that did not wait",
        SETUP + BULK_LOAD + in_warp(0, wait()) + READ_TILE,
        SETUP + BULK_LOAD + wait() + READ_TILE,
        DataRace,
        "a bulk copy",
    ),
    Fault(
        "bulk copy to global memory without a proxy fence",
        FILL + SYNC + BULK_STORE + COMMIT + DRAIN,
        FILL + FENCE + SYNC + BULK_STORE + COMMIT + DRAIN,
        MissingProxyFence,
        "a bulk copy by the bulk stores of warp 0 .*after a store by warp",
    ),
    Fault(
        "answer of cluster launch control read by a warp that did not wait",
        SETUP + TRY_CANCEL + in_warp(0, wait()) + READ_ANSWER,
        SETUP + TRY_CANCEL + wait() + READ_ANSWER,
        DataRace,
        "a try_cancel",
    ),
    Fault(
        "tensor memory loaded before its store was waited for",
        ALLOCATE + STORE_TENSOR + LOAD_TENSOR + SYNC + FREE,
        ALLOCATE + STORE_TENSOR + STORED_TENSOR + LOAD_TENSOR + SYNC + FREE,
        DataRace,
        "lane .*, column 0 of tensor memory .*a tcgen05.ld .*after a tcgen05.st",
    ),
    Fault(
        "tensor memory given back while others read it",
        ALLOCATE + STORE_TENSOR + STORED_TENSOR + LOAD_TENSOR + FREE,
        ALLOCATE + STORE_TENSOR + STORED_TENSOR + LOAD_TENSOR + SYNC + FREE,
        (DataRace, OutOfBounds),  # the latter when they come later
        "tcgen05.dealloc .* after a tcgen05|touches columns",
    ),
    Fault(
        "operand of tcgen05.mma without a proxy fence",
        PREPARE + SYNC + PRODUCT + wait() + SYNC + FREE,
        PREPARE + FENCE + SYNC + PRODUCT + wait() + SYNC + FREE,
        MissingProxyFence,
        "a tcgen05.mma by .*after a store by warp",
    ),
    Fault(
        "product loaded by warps that did not wait for it",
        PREPARE + FENCE + SYNC + PRODUCT + in_warp(0, wait()) + LOAD_TENSOR + SYNC + FREE,
        PREPARE + FENCE + SYNC + PRODUCT + wait() + LOAD_TENSOR + SYNC + FREE,
        DataRace,
        "a tcgen05.ld by .*after a tcgen05.mma|a tcgen05.mma by .*after a tcgen05.ld",
    ),
    Fault(
        "operand of tcgen05.mma overwritten before its commit was waited for",
        PREPARE + FENCE + SYNC + PRODUCT + FILL + wait() + SYNC + FREE,
        PREPARE + FENCE + SYNC + PRODUCT + wait() + FILL + SYNC + FREE,
        DataRace,
        "a store by warp .*after a tcgen05.mma|a tcgen05.mma by .*after a store",
    ),
    Fault(
        "product stored over one that is still read",
        PREPARE
        + FENCE
        + SYNC
        + PRODUCT
        + wait()
        + LOAD_TENSOR
        + NEXT_PRODUCT
        + wait(8)
        + SYNC
        + FREE,
        PREPARE
        + FENCE
        + SYNC
        + PRODUCT
        + wait()
        + LOAD_TENSOR
        + SYNC
        + NEXT_PRODUCT
        + wait(8)
        + SYNC
        + FREE,
        DataRace,
        "a tcgen05.mma by .*after a tcgen05.ld|a tcgen05.ld by .*after a tcgen05.mma",
    ),
]


def run(body: str, cluster: int, schedule: str, seed: int) -> None:
    # A read that overtakes its write is a race here, not a read of nothing.
    options = Options(schedule, seed, check_unwritten=False, check_races=True)
    run_mapped(PRELUDE + body, cluster, options=options)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_reported_under_every_schedule(fault):
    for schedule, seed in SCHEDULES:
        with pytest.raises(fault.error, match=f"(?s){fault.message}") as caught:
            run(fault.wrong, fault.cluster, schedule, seed)
        assert caught.value.location is not None


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_kernel_without_the_fault_is_clean_under_every_schedule(fault):
    for schedule, seed in SCHEDULES:
        run(fault.right, fault.cluster, schedule, seed)


def test_faults_are_reported_on_demand_only():
    run_mapped(PRELUDE + WRITE + SYNC + OVERWRITE + READ)


def test_report_names_both_instructions():
    with pytest.raises(DataRace) as caught:
        run(WRITE + READ, 1, "round_robin", 0)
    lines = mapped_text(PRELUDE + WRITE + READ).splitlines()
    write = next(n for n, line in enumerate(lines, 1) if "st.shared" in line)
    read = next(n for n, line in enumerate(lines, 1) if "ld.shared" in line)
    assert f"a load by warp 1 of CTA rank 0 (PTX line {read})" in caught.value.message
    assert f"a store by warp 0 of CTA rank 0 (PTX line {write})" in caught.value.message
    assert caught.value.location.line == read


def test_shadow_cells_become_bytes_for_narrow_accesses_and_keep_what_they_know():
    shadow = Shadow("memory", 16)
    shadow.writes[1] = 5
    assert shadow.range(4, 8) == slice(1, 3)
    assert shadow.lanes(np.array([2, 6]), 2).tolist() == [2, 3, 6, 7]
    assert shadow.writes.tolist() == [0] * 4 + [5] * 4 + [0] * 8
    assert shadow.range(4, 8) == slice(4, 12)

"""Small kernels with one race or missing fence each, next to the same kernel without it.

The race detector must name the fault under every schedule, and stay silent about the right kernel.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from fa4.emulator.checker import Shadow
from fa4.emulator.errors import DataRace, EmulationError, MissingProxyFence, UnfinishedCopy
from fa4.emulator.execute import Options, run_launch
from fa4.emulator.launch_record import Launch
from fa4.emulator.memory import GlobalMemory
from fa4.emulator.tensor_map import ElementType, TensorMap, encode

BASE = 0x7F00_0000_0000
NBYTES = 4096
SHARED_BYTES = 16384
THREADS = 128
SCHEDULES = (("round_robin", 0), ("random", 1), ("adversarial", 2), ("adversarial", 3))

# (dim 64, rows 16) of bf16 in tiles of 8 rows: 1024 bytes, swizzled.
MAP = encode(TensorMap(BASE, ElementType.BF16, (64, 16), (2, 128), (64, 8), 128))

# mbarriers are at %r0 and %r0+8, tiles from %r0+1024 on; %r2 is where this thread's 8 bytes of the
# first tile are.
HEADER = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(
    .param .align 64 .b8 map[128],
    .param .u64 pointer
)
.reqntid 128, 1, 1
{
    .reg .pred %p<8>;
    .reg .b16 %h<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .reg .b32 %acc<4>;
    ld.param.b64 %rd0, [pointer];
    mov.b64 %rd1, map;
    cvta.param.u64 %rd1, %rd1;
    mov.b32 %r0, dynamic;
    mov.u32 %r1, %tid.x;
    shr.u32 %r5, %r1, 5;
    setp.eq.b32 %p0, %r1, 0;
    setp.eq.b32 %p3, %r1, 32;
    mov.u32 %r6, %cluster_ctarank;
    shl.b32 %r2, %r1, 3;
    add.s32 %r2, %r2, %r0;
    mov.b64 %rd3, 0;
    mov.b32 %r3, 7;
    mov.b16 %h0, 7;
    mov.b64 %rd4, 0x4000004000010040;
    setp.ne.b32 %p2, 0, 0;
"""

INIT = "@%p0 mbarrier.init.shared.b64 [%r0], 1; @%p0 mbarrier.init.shared.b64 [%r0+8], 1;"
PUBLISH = "fence.mbarrier_init.release.cluster; bar.sync 0;"
SETUP = INIT + PUBLISH
LOAD = (
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r0], 1024;"
    "@%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    " [%r0+1024], [%rd1, {0, 0}], [%r0];"
)
STORE = "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 8}], [%r0+1024];"
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


def wait(offset: int = 0, parity: int = 0) -> str:
    name = f"{offset}_{parity}"
    return (
        f"WAIT_{name}: mbarrier.try_wait.parity.shared.b64 %p1, [%r0+{offset}], {parity};"
        f"@%p1 bra DONE_{name}; bra WAIT_{name}; DONE_{name}:"
    )


def in_warp(number: int, body: str) -> str:
    """A body for one warp; the others go around it."""
    label = f"AROUND_{number}_{abs(hash(body))}"
    return f"setp.ne.b32 %p4, %r5, {number}; @%p4 bra {label}; {body} {label}:"


def in_cta(rank: int, body: str) -> str:
    label = f"BESIDE_{rank}_{abs(hash(body))}"
    return f"setp.ne.b32 %p4, %r6, {rank}; @%p4 bra {label}; {body} {label}:"


WRITE = "@%p0 st.shared.b32 [%r0+64], %r3;"
READ = in_warp(1, "ld.shared.b32 %r4, [%r0+64];")
OVERWRITE = in_warp(1, "st.shared.b32 [%r0+64], %r3;")
COPY = in_warp(0, "cp.async.ca.shared.global [%r2+1024], [%rd0], 8;")
COPY_COMMIT = "cp.async.commit_group;"
COPY_WAIT = "cp.async.wait_group 0;"
READ_COPIED = in_warp(1, "ld.shared.b64 %rd5, [%r2+768];")  # what warp 0 copied
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# To the other CTA of a pair, whose barrier and shared memory must exist.
REMOTE_WRITE = in_cta(
    0,
    "mapa.shared::cluster.u32 %r7, %r0, 1;@%p0 st.shared::cluster.b32 [%r7+64], %r3;",
)
REMOTE_READ = in_cta(1, "ld.shared.b32 %r4, [%r0+64];")


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
    error: type[EmulationError]
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
        WRITE + SYNC + "ld.shared.b32 %r4, [%r0+64];" + OVERWRITE,
        WRITE + SYNC + "ld.shared.b32 %r4, [%r0+64];" + SYNC + OVERWRITE,
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
        "wait for the phase before",
        SETUP + WRITE + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + wait(parity=1) + READ,
        SETUP + WRITE + "@%p0 mbarrier.arrive.shared.b64 %rd2, [%r0];" + wait(parity=0) + READ,
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
        "mbarrier used before others can know of it",
        "@%p0 mbarrier.init.shared.b64 [%r0], 1; bar.arrive 1, 128;"
        + in_warp(0, "bar.sync 2, 64;")
        + in_warp(1, "bar.arrive 2, 64; bar.sync 3, 64; bar.sync 4, 64;"
                  "@%p3 mbarrier.arrive.shared.b64 %rd2, [%r0];")
        if False
        else INIT + in_warp(0, "mov.u32 %r8, %r9;") + in_warp(3, "@%p6 bra NOWHERE; NOWHERE:")
        + in_warp(0, "st.shared.b32 [%r0+128], %r3;")
        + in_warp(1, "ld.shared.b32 %r4, [%r0+128];"),
        SETUP + in_warp(0, "st.shared.b32 [%r0+128], %r3;"),
        DataRace,
        "byte 128 ",
    ),
]

"""Small kernels that do one thing wrong, each next to one that does it right.

Every fault must be reported as its kind, with the instruction that committed it.
"""

from dataclasses import dataclass

import pytest

from fa4.emulator.errors import (
    BarrierMisuse,
    Deadlock,
    EmulationError,
    InvalidDescriptor,
    Misaligned,
    OutOfBounds,
    UnwrittenRead,
)
from tests.emulator.ptx_kernels import MAPPED_BYTES, MAPPED_SHARED_BYTES, run_mapped

SETUP = """
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd0, %rd2;
"""
INIT = """
    @%p0 mbarrier.init.shared.b64 [%r0], 1;
    bar.sync 0;
"""
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
WAIT = """
    LOOP:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0;
    @%p1 bra DONE;
    bra LOOP;
    DONE:
"""
# Fills the 1024 bytes from offset 1024 on, eight a thread.
FILL = """
    shl.b32 %r2, %r1, 3;
    add.s32 %r2, %r2, %r0;
    mov.b64 %rd3, 0;
    st.shared.b64 [%r2+1024], %rd3;
    bar.sync 0;
"""
# K-major rows of 128 bytes under a swizzle of 128: stride offset 1024, start 1024.
MULTIPLY = """
    mov.b64 %rd4, 0x4000004000010040;
    setp.ne.b32 %p2, 0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {%acc0, %acc1, %acc2, %acc3}, {%r1, %r1, %r1, %r1}, %rd4, %p2, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
"""


@dataclass(frozen=True)
class Fault:
    """A kernel body that is wrong and one that is right.

    wrong, right  PTX
    error         what the wrong one raises
    message       pattern in the error's text
    at            text of the instruction that it must name; None where there is no single one
    read_only     whether the global memory may not be written
    """

    name: str
    wrong: str
    right: str
    error: type[EmulationError]
    message: str
    at: str | None
    read_only: bool = False

    def __str__(self) -> str:
        return self.name


FAULTS = [
    Fault(
        "load behind the last byte",
        f"ld.global.b32 %r3, [%rd2+{MAPPED_BYTES - 508}];",
        f"ld.global.b32 %r3, [%rd2+{MAPPED_BYTES - 512}];",
        OutOfBounds,
        "nearest is data.*starts at byte 4096",
        "ld.global.b32",
    ),
    Fault(
        "misaligned load",
        "ld.global.b64 %rd3, [%rd2];",
        "ld.global.b32 %r3, [%rd2];",
        Misaligned,
        "aligned to 8 bytes",
        "ld.global.b64",
    ),
    Fault(
        "store to an input",
        "st.global.b32 [%rd2], %r1;",
        "ld.global.b32 %r3, [%rd2];",
        OutOfBounds,
        "data .*read-only",
        "st.global.b32",
        read_only=True,
    ),
    Fault(
        "shared load before the store",
        "ld.shared.b32 %r3, [%r0+64];",
        "@%p0 st.shared.b32 [%r0+64], %r1; bar.sync 0; ld.shared.b32 %r3, [%r0+64];",
        UnwrittenRead,
        "byte 64 of shared memory",
        "ld.shared.b32",
    ),
    Fault(
        "shared store behind the end",
        f"@%p0 st.shared.b32 [%r0+{MAPPED_SHARED_BYTES}], %r1;",
        f"@%p0 st.shared.b32 [%r0+{MAPPED_SHARED_BYTES - 4}], %r1;",
        OutOfBounds,
        f"{MAPPED_SHARED_BYTES} bytes",
        "st.shared.b32",
    ),
    Fault(
        "barrier that is not initialised",
        "@%p0 mbarrier.arrive.shared.b64 %rd3, [%r0];",
        INIT + "@%p0 mbarrier.arrive.shared.b64 %rd3, [%r0];",
        BarrierMisuse,
        "offset 0 .*never initialised",
        "mbarrier.arrive",
    ),
    Fault(
        "arrival of a whole warp instead of one lane",
        INIT + "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r0], 16; bar.sync 0;"
        "mbarrier.arrive.shared.b64 %rd3, [%r0];",
        INIT + "@%p0 mbarrier.arrive.shared.b64 %rd3, [%r0];",
        BarrierMisuse,
        "more than it still waits for",
        "mbarrier.arrive.shared",
    ),
    Fault(
        "wait that nobody ends",
        INIT + WAIT,
        INIT + "@%p0 mbarrier.arrive.shared.b64 %rd3, [%r0];" + WAIT,
        Deadlock,
        r"parity 0 of mbarrier at shared offset 0 .*1 of 1 arrivals.*mbarrier\.try_wait",
        None,
    ),
    Fault(
        "more bytes expected than copied",
        INIT + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r0], 2048;"
        f"@%p0 {LOAD} [%r0+1024], [%rd1, {{0, 0}}], [%r0];" + WAIT,
        INIT + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r0], 1024;"
        f"@%p0 {LOAD} [%r0+1024], [%rd1, {{0, 0}}], [%r0];" + WAIT,
        Deadlock,
        "0 of 1 arrivals and 1024 bytes pending",
        None,
    ),
    Fault(
        "more bytes copied than expected",
        INIT + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r0], 512;"
        f"@%p0 {LOAD} [%r0+1024], [%rd1, {{0, 0}}], [%r0];",
        INIT + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r0], 1024;"
        f"@%p0 {LOAD} [%r0+1024], [%rd1, {{0, 0}}], [%r0];",
        BarrierMisuse,
        "1024 bytes complete",
        "cp.async.bulk.tensor.2d.shared::cta",
    ),
    Fault(
        "tile that is not aligned",
        INIT + f"@%p0 {LOAD} [%r0+1040], [%rd1, {{0, 0}}], [%r0];",
        INIT + f"@%p0 {LOAD} [%r0+1152], [%rd1, {{0, 0}}], [%r0];",
        Misaligned,
        "128 bytes",
        "cp.async.bulk.tensor.2d.shared::cta",
    ),
    Fault(
        "no tensor map",
        INIT + f"@%p0 {LOAD} [%r0+1024], [%rd0, {{0, 0}}], [%r0];",
        INIT + f"@%p0 {LOAD} [%r0+1024], [%rd1, {{0, 0}}], [%r0];",
        InvalidDescriptor,
        "no tensor map",
        "cp.async.bulk.tensor.2d.shared::cta",
    ),
    Fault(
        "tile stored before it is written",
        f"@%p0 {STORE} [%rd1, {{0, 8}}], [%r0+1024];",
        FILL + f"@%p0 {STORE} [%rd1, {{0, 8}}], [%r0+1024];",
        UnwrittenRead,
        "TMA store reads byte 1024 of shared memory",
        "cp.async.bulk.tensor.2d.global",
    ),
    Fault(
        "operand multiplied before it is written",
        MULTIPLY,
        FILL + MULTIPLY,
        UnwrittenRead,
        "B of wgmma reads byte",
        "wgmma.mma_async",
    ),
    Fault(
        "named barrier with too few arrivals",
        "setp.lt.u32 %p3, %r1, 64; @%p3 bra END; bar.sync 1, 128; END:",
        "setp.lt.u32 %p3, %r1, 64; @%p3 bra END; bar.sync 1, 64; END:",
        Deadlock,
        r"2 of 4 have exited.*named barrier 1 \(64 of 128 threads.*bar\.sync",
        None,
    ),
    Fault(
        "warps that disagree about a named barrier's threads",
        "setp.lt.u32 %p3, %r1, 64; @%p3 bra OTHER; bar.sync 1, 128; bra END;"
        "OTHER: bar.sync 1, 96; END:",
        "bar.sync 1, 128;",
        BarrierMisuse,
        "named barrier 1 is used with",
        "bar.sync",
    ),
]


def run(body: str, read_only: bool = False) -> None:
    run_mapped(SETUP + body, read_only=read_only)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_reported_with_its_instruction(fault):
    with pytest.raises(fault.error, match=f"(?s){fault.message}") as caught:
        run(fault.wrong, fault.read_only)
    assert type(caught.value) is fault.error
    if fault.at is not None:
        assert fault.at in caught.value.location.text
        assert f"PTX line {caught.value.location.line}" in str(caught.value)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_kernel_without_the_fault_runs(fault):
    run(fault.right, fault.read_only)

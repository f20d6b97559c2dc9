"""Local memory: each thread's own."""

import numpy as np
import pytest

from fa4.emulator.errors import EmulationError, Misaligned, OutOfBounds, UnwrittenRead
from tests.emulator.ptx_kernels import run_body

# Two arrays, of which the second must be aligned to 16 bytes: it lies at 16.
DECLARATIONS = """
    .local .align 4 .b8 first[4];
    .local .align 16 .b8 second[32];
    .reg .b64 %SP;
    mov.b64 %SP, second;
    and.b32 %r1, %r60, 3;
    mad.wide.u32 %rd1, %r1, 8, %SP;
"""


def test_each_thread_reads_what_it_stored() -> None:
    out = np.zeros(64, np.uint32)
    run_body(
        DECLARATIONS
        + """
    mov.b64 %rd2, first;
    st.local.b32 [%rd2], %r60;
    add.u32 %r2, %r60, 100;
    st.local.v2.b32 [%rd1], {%r2, %r60};
    ld.local.s32 %rd3, [%rd2];
    ld.local.b32 %r3, [%rd1];
    ld.local.b32 %r4, [%rd1+4];
    cvt.u32.u64 %r5, %rd3;
    add.u32 %r3, %r3, %r4;
    add.u32 %r3, %r3, %r5;
    mad.lo.u64 %rd50, %rd60, 4, %rd0;
    st.global.b32 [%rd50], %r3;
""",
        [out],
        threads=64,
    )
    assert np.array_equal(out, 100 + 3 * np.arange(64))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("ld.local.b32 %r2, [%rd1];", UnwrittenRead, "byte 16 of local memory"),
        ("st.local.b32 [%rd1+32], %r1;", OutOfBounds, "a thread has 48"),
        ("st.local.b32 [%rd1-64], %r1;", OutOfBounds, "byte -48"),
        ("st.local.b32 [%rd1+2], %r1;", Misaligned, "aligned to 4"),
    ],
)
def test_faults_are_reported(body: str, error: type[EmulationError], message: str) -> None:
    with pytest.raises(error, match=message):
        run_body(DECLARATIONS + body)


def test_unwritten_bytes_can_be_read_where_that_is_not_checked() -> None:
    out = np.zeros(1, np.uint32)
    body = "ld.local.b32 %r2, [%rd1];\n    st.global.b32 [%rd0], %r2;\n"
    run_body(DECLARATIONS + body, [out], check_unwritten=False)
    assert out[0] == 0xFFFFFFFF

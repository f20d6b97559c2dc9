"""Control flow of translated kernels: divergence, loops, liveness, and where faults are located."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.errors import EmulationError, OutOfBounds
from fa4.emulator.translate import translate
from tests.emulator.ptx_kernels import kernel_text, run_body

STORE_R1 = "mad.lo.u64 %rd50, %rd60, 4, %rd0;\nst.global.b32 [%rd50], %r1;\n"


def test_lanes_part_and_rejoin() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        """
        setp.lt.u32 %p1, %r60, 10;
        @%p1 bra LESS;
        mov.b32 %r1, 100;
        bra.uni JOIN;
        LESS:
        mov.b32 %r1, 200;
        JOIN:
        vote.sync.ballot.b32 %r2, %p1, -1;
        popc.b32 %r2, %r2;
        add.u32 %r1, %r1, %r2;
        """
        + STORE_R1,
        [output],
    )
    assert output.tolist() == [210] * 10 + [110] * 22


def test_lanes_leave_a_loop_at_different_times() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        """
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        LOOP:
        add.u32 %r1, %r1, %r2;
        add.u32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r60;
        @%p1 bra LOOP;
        """
        + STORE_R1,
        [output],
    )
    assert output.tolist() == [n * (n + 1) // 2 for n in range(32)]


INDEXED_BRANCH = """
    and.b32 %r2, %r60, {mask};
    TABLE: .branchtargets ZERO, ONE, ONE, THREE;
    brx.idx %r2, TABLE;
    ZERO: mov.b32 %r1, 10; bra.uni JOIN;
    ONE: mov.b32 %r1, 11; bra.uni JOIN;
    THREE: mov.b32 %r1, 13;
    JOIN:
"""


def test_indexed_branches_part_lanes_by_target() -> None:
    output = np.zeros(32, np.uint32)
    run_body(INDEXED_BRANCH.replace("{mask}", "3") + STORE_R1, [output])
    assert output.tolist() == [10, 11, 11, 13] * 8
    run_body(INDEXED_BRANCH.replace("{mask}", "0") + STORE_R1, [output])
    assert output.tolist() == [10] * 32


def test_an_indexed_branch_past_its_table_is_an_error() -> None:
    with pytest.raises(EmulationError, match=r"brx\.idx to target 7 of 4"):
        run_body(INDEXED_BRANCH.replace("{mask}", "7"))


def test_a_branch_to_no_label_is_an_error() -> None:
    with pytest.raises(EmulationError, match="a branch to no label"):
        run_body("bra NOWHERE;\n")


def test_lanes_may_exit_early() -> None:
    output = np.full(32, 7, np.uint32)
    run_body("setp.ge.u32 %p1, %r60, 20;\n@%p1 exit;\nmov.b32 %r1, 1;\n" + STORE_R1, [output])
    assert output.tolist() == [1] * 20 + [7] * 12


def test_a_partial_last_warp_has_its_threads_only() -> None:
    output = np.full(64, 7, np.uint32)
    run_body("activemask.b32 %r1;\n" + STORE_R1, [output], threads=40)
    assert output.tolist() == [2**32 - 1] * 32 + [255] * 8 + [7] * 24


def test_registers_of_lanes_elsewhere_survive() -> None:
    """Lanes outside a block keep values that the block overwrites and that are dead inside."""
    output = np.zeros(32, np.uint32)
    run_body(
        """
        mov.b32 %r1, %r60;
        setp.lt.u32 %p1, %r60, 4;
        @!%p1 bra JOIN;
        mov.b32 %r1, 50;
        add.u32 %r1, %r1, %r60;
        JOIN:
        """
        + STORE_R1,
        [output],
    )
    assert output.tolist() == [50, 51, 52, 53] + list(range(4, 32))


def test_collectives_need_all_lanes_that_they_name() -> None:
    body = "setp.lt.u32 %p1, %r60, 4;\n@%p1 bra L;\nshfl.sync.idx.b32 %r2, %r60, 0, 31, -1;\nL:\n"
    with pytest.raises(EmulationError, match="the warp has diverged"):
        run_body(body)


def test_collectives_of_a_part_are_fine() -> None:
    output = np.zeros(32, np.uint32)
    run_body(
        "mov.b32 %r1, 0;\nsetp.lt.u32 %p1, %r60, 4;\n@!%p1 bra L;\n"
        "shfl.sync.idx.b32 %r1, %r60, 3, 31, 15;\nL:\n" + STORE_R1,
        [output],
    )
    assert output.tolist() == [3] * 4 + [0] * 28


def test_faults_name_their_instruction() -> None:
    output = np.zeros(32, np.uint32)
    with pytest.raises(OutOfBounds) as raised:
        run_body("mov.b32 %r1, 1;\nadd.s64 %rd0, %rd0, 4;\n" + STORE_R1, [output], threads=64)
    location = raised.value.location
    assert location is not None
    assert location.text == "st.global.b32 [%rd50], %r1;"
    assert (location.cta, location.warp, location.lane) == ((0, 0, 0), 0, 31)


def test_trap_is_an_error() -> None:
    with pytest.raises(EmulationError, match="trap"):
        run_body("trap;\n")


def test_an_entry_that_is_not_there_is_named() -> None:
    with pytest.raises(EmulationError, match="no entry 'other'; it has kernel"):
        translate(kernel_text("", 0), "other")


def test_dead_registers_are_not_stored() -> None:
    body = "mov.b32 %r1, 5;\nadd.s32 %r2, %r1, 1;\nbra.uni L;\nL:\nst.global.b32 [%rd0], %r2;\n"
    program = translate(kernel_text(body, 1), "kernel")
    names = list(dict.fromkeys(r for i in program.kernel.instructions for r in _registers(i)))
    assert f"R[{names.index('%r2')}] = " in program.source
    assert f"R[{names.index('%r1')}] = " not in program.source


def _registers(instruction):
    from fa4.emulator.instructions import registers_of

    return registers_of(instruction)

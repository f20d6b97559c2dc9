"""Synchronisation instructions are found and taken away one at a time, and most are missed."""

from collections import Counter

import pytest

import fa4
from fa4.emulator.device import prepare_forward
from fa4.emulator.execute import Options
from fa4.emulator.mutation import (
    SyncInstruction,
    Verdict,
    score,
    sync_instructions,
    table,
    without,
)
from tests.oracle import Case, bits, make_inputs

TEXT = """\
mbarrier.init.shared.b64 [%r1], 1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], 64;
mbarrier.arrive.shared.b64 %rd2, [%r1+8];
{ .reg .pred P1; WAIT:
  mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 1000;
  @P1 bra DONE; bra WAIT; DONE: }
// bar.sync 1; is only a comment
bar.sync \t%r3, 128;
wgmma.wait_group.sync.aligned 0;
"""


def test_instructions_are_found_with_their_kind_and_line() -> None:
    assert sync_instructions(TEXT) == [
        SyncInstruction(
            2,
            "arrive.expect_tx",
            "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], 64;",
        ),
        SyncInstruction(3, "mbarrier arrive", "mbarrier.arrive.shared.b64 %rd2, [%r1+8];"),
        SyncInstruction(
            5,
            "mbarrier wait",
            "mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 1000;",
        ),
        SyncInstruction(8, "named barrier sync", "bar.sync \t%r3, 128;"),
        SyncInstruction(9, "wgmma wait", "wgmma.wait_group.sync.aligned 0;"),
    ]


@pytest.mark.parametrize(
    ("index", "line", "left"),
    [
        (0, 2, "    "),  # with its predicate
        (1, 3, ""),
        (2, 5, "  setp.eq.u32 P1, 0, 0;"),  # the loop around a wait must end
        (3, 8, ""),
    ],
)
def test_only_the_one_instruction_is_taken_away(index: int, line: int, left: str) -> None:
    mutant = without(TEXT, sync_instructions(TEXT)[index]).splitlines()
    expected = TEXT.splitlines()
    expected[line - 1] = left
    assert mutant == expected


def test_table_counts_by_kind_and_lists_survivors() -> None:
    first, second, *_ = sync_instructions(TEXT)
    text = table([Verdict(first, "Deadlock", Options()), Verdict(second, None)])
    assert text.splitlines() == [
        "arrive.expect_tx           1 / 1",
        "mbarrier arrive            0 / 1",
        "survives: line 3: mbarrier.arrive.shared.b64 %rd2, [%r1+8];",
    ]


def test_forward_kernel_without_an_arrival_a_wait_or_a_wgmma_wait_is_noticed() -> None:
    inputs = make_inputs(Case((64,), (300,), 1, 1), seed=0)
    decision = fa4.explain(inputs.q, inputs.k, inputs.v, arch="sm_90a")
    prepared, out, lse = prepare_forward(decision, inputs.q, inputs.k, inputs.v)
    every = sync_instructions(prepared.launches[0].ptx)
    chosen = {
        kind: next(i for i in every if i.kind == kind)
        for kind in ("arrive.expect_tx", "wgmma wait", "wgmma fence")
    }

    def result() -> bytes:
        return bytes(bits(out).numpy().tobytes() + bits(lse).numpy().tobytes())

    verdicts = score(prepared, result, [Options()], chosen.values())
    assert [verdict.fault for verdict in verdicts] == [
        "Deadlock",
        "EarlyRegisterAccess",
        "EarlyRegisterAccess",
    ]


# What is not noticed, and why.
UNNOTICED = {
    # Redundant: where a tile is repeated, the producer's waits for the first K and for Q of three
    # warpgroups, because all have met before; there, too, the second look at V, which the first one
    # has found; and the waits of warpgroups without rows for K and V that go by, because they take
    # turns.
    "mbarrier wait": 7,
    # For speed: a warpgroup's turn orders when matmuls are issued.
    "named barrier sync": 1,
    # Redundant: the fence of P V directly behind that of Q K; no register changes between them.
    "wgmma fence": 2,
}


@pytest.mark.slow
def test_every_missing_synchronisation_is_noticed_unless_it_is_redundant() -> None:
    """Four tiles a CTA, more key blocks than stages, and a last one that overflows."""
    inputs = make_inputs(Case((200, 200), (600, 600), 1, 1), seed=0)
    inputs.q[1, 150:] = inputs.k[1, :100] = 4.0
    decision = fa4.explain(inputs.q, inputs.k, inputs.v, arch="sm_90a")
    prepared, out, lse = prepare_forward(decision, inputs.q, inputs.k, inputs.v, multiprocessors=1)

    def result() -> bytes:
        return bytes(bits(out).numpy().tobytes() + bits(lse).numpy().tobytes())

    schedules = (("round_robin", 0), ("random", 1), ("adversarial", 1))
    options = [Options(name, seed, check_races=True) for name, seed in schedules]
    verdicts = score(prepared, result, options)
    survivors = Counter(v.instruction.kind for v in verdicts if v.fault is None)
    assert dict(survivors) == UNNOTICED, table(verdicts)
    assert len(verdicts) > 60

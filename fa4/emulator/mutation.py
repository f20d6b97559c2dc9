"""Kernels with one synchronisation instruction taken away: how good are the emulator's checks?

`sync_instructions` finds them in a PTX text, `without` deletes one, `score` runs the mutants. A
mutant that no run notices is either redundant there or a gap in the checks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fa4.emulator.device import PreparedRun
from fa4.emulator.errors import EmulationError
from fa4.emulator.execute import Options

# Beginnings of opcodes, the longer of two that match first; the value names the kind.
SYNC_OPCODES = {
    "mbarrier.arrive.expect_tx": "arrive.expect_tx",
    "mbarrier.expect_tx": "expect_tx",
    "mbarrier.arrive": "mbarrier arrive",
    "mbarrier.try_wait": "mbarrier wait",
    "mbarrier.test_wait": "mbarrier wait",
    "bar.arrive": "named barrier arrive",
    "barrier.arrive": "named barrier arrive",
    "bar.sync": "named barrier sync",
    "barrier.sync": "named barrier sync",
    "barrier.cluster.arrive": "cluster barrier arrive",
    "barrier.cluster.wait": "cluster barrier wait",
    "wgmma.wait_group": "wgmma wait",
    "wgmma.commit_group": "wgmma commit",
    "wgmma.fence": "wgmma fence",
    "tcgen05.commit": "tcgen05 commit",
    "tcgen05.wait": "tcgen05 wait",
    "tcgen05.fence": "tcgen05 fence",
    "fence.proxy.async": "proxy fence",
    "fence.mbarrier_init": "mbarrier-init fence",
    "cp.async.bulk.wait_group": "bulk wait",
    "cp.async.bulk.commit_group": "bulk commit",
}

_SYNC = re.compile(
    "|".join(re.escape(opcode) for opcode in sorted(SYNC_OPCODES, key=len, reverse=True))
)


@dataclass(frozen=True)
class SyncInstruction:
    """A synchronisation instruction of a PTX text.

    line   from 1
    kind   a value of `SYNC_OPCODES`
    text   as it is written, without its predicate
    """

    line: int
    kind: str
    text: str


def sync_instructions(ptx: str) -> list[SyncInstruction]:
    """All of them, in order."""
    found = []
    for number, line in enumerate(ptx.splitlines(), 1):
        for match in re.finditer(rf"(?:^|[\s;{{])({_SYNC.pattern})[^;]*;", line.split("//")[0]):
            text = match[0].lstrip(" \t;{")
            found.append(SyncInstruction(number, SYNC_OPCODES[match[1]], text))
    return found


def without(ptx: str, instruction: SyncInstruction) -> str:
    """The text without one instruction; lines keep their numbers. A wait succeeds at once."""
    lines = ptx.splitlines()
    line = lines[instruction.line - 1]
    start = line.index(instruction.text)
    replacement = ""
    if instruction.kind == "mbarrier wait":
        predicate = re.match(r"\S+\s+([\w%$]+)", instruction.text)
        assert predicate is not None
        replacement = f"setp.eq.u32 {predicate[1]}, 0, 0;"
    before = line[:start]
    if not replacement:  # a predicate without an instruction is none
        before = re.sub(r"@!?[%\w$]+\s*$", "", before)
    lines[instruction.line - 1] = before + replacement + line[start + len(instruction.text) :]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the first fault that was noticed and how it was run, or None."""

    instruction: SyncInstruction
    fault: str | None
    options: Options | None = None


def score(
    prepared: PreparedRun,
    result: Callable[[], bytes],
    options: Sequence[Options],
    instructions: Iterable[SyncInstruction] | None = None,
) -> list[Verdict]:
    """Run a launch without each of its synchronisation instructions in turn.

    prepared      one launch that is right
    result        reads what the launch computed, to be compared with what the whole kernel gives
    options       ways to run it, tried in order until one notices
    instructions  which to take away; all by default
    """
    (launch,) = prepared.launches
    prepared.execute(options[0])
    expected = result()
    verdicts = []
    for instruction in instructions or sync_instructions(launch.ptx):
        mutant = dataclasses.replace(launch, ptx=without(launch.ptx, instruction))
        verdict = Verdict(instruction, None)
        for chosen in options:
            fault = _fault(dataclasses.replace(prepared, launches=(mutant,)), chosen)
            if fault is None and result() != expected:
                fault = "wrong result"
            if fault is not None:
                verdict = Verdict(instruction, fault, chosen)
                break
        verdicts.append(verdict)
    return verdicts


def _fault(prepared: PreparedRun, options: Options) -> str | None:
    try:
        prepared.execute(options)
    except EmulationError as error:
        return type(error).__name__
    return None


def table(verdicts: Iterable[Verdict]) -> str:
    """Noticed and all by kind of instruction, then the survivors, one a line."""
    verdicts = list(verdicts)
    kinds = dict.fromkeys(v.instruction.kind for v in verdicts)
    lines = []
    for kind in kinds:
        of_kind = [v for v in verdicts if v.instruction.kind == kind]
        noticed = sum(v.fault is not None for v in of_kind)
        lines.append(f"{kind:24}{noticed:4} / {len(of_kind)}")
    lines += [
        f"survives: line {v.instruction.line}: {v.instruction.text}"
        for v in verdicts
        if v.fault is None
    ]
    return "\n".join(lines)

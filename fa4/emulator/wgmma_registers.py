"""Whether registers of asynchronous wgmma instructions are left alone while they are in use.

Hardware computes a wgmma some time between the instruction and the `wgmma.wait_group` that covers
it. Until then its accumulator must be neither read nor written and its A registers not written, and
what an operand register gets from other instructions must be followed by a `wgmma.fence` before the
next wgmma (PTX ISA, "Asynchronous wgmma", wgmma.fence). The emulator computes at once, so that
breaking these rules does not show in its results. They are checked here on every path through the
kernel, by data flow over the PTX text, whether or not a launch takes the path.

A plain move between registers counts as a renaming: the compiler writes them where it keeps loop
variables apart, and the assembler removes them. Its destination is in use as long as its source.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fa4.emulator.errors import EmulationError, Location
from fa4.emulator.instructions import uses_and_definitions, wgmma_operands
from fa4.emulator.ptx import (
    Immediate,
    Instruction,
    Kernel,
    Module,
    Register,
    basic_blocks,
    successors,
)

# A loop that commits and does not wait would grow the state for ever; older groups are merged.
MAX_GROUPS = 8


class EarlyRegisterAccess(EmulationError):
    """A register of a wgmma is touched before a wait covers it, or a wgmma.fence is missing."""


def check_wgmma_registers(kernel: Kernel, module: Module) -> None:
    """Raises `EarlyRegisterAccess`, with its line, for the first register that is misused."""
    instructions = kernel.instructions
    if not any(i.opcode.startswith("wgmma.mma_async") for i in instructions):
        return
    blocks, label_blocks = basic_blocks(kernel)
    following_blocks = successors(kernel, blocks, label_blocks)
    before: dict[int, _State] = {0: _State()}
    unchecked = _Analysis(kernel, module, raises=False)
    work = [0]
    while work:
        index = work.pop()
        state = before[index]
        for instruction in blocks[index].instructions:
            state = unchecked.after(state, instruction)
        for following in following_blocks[index]:
            if following < len(blocks):
                old = before.get(following)
                new = state if old is None else old.joined(state)
                if new != old:
                    before[following] = new
                    work.append(following)
    checked = _Analysis(kernel, module, raises=True)
    for index in sorted(before):
        state = before[index]
        for instruction in blocks[index].instructions:
            state = checked.after(state, instruction)


@dataclass(frozen=True)
class _Group:
    """Registers of wgmma instructions that one wait covers; sets as ints, a bit a register."""

    accumulators: int = 0
    a: int = 0

    def __or__(self, other: _Group) -> _Group:
        return _Group(self.accumulators | other.accumulators, self.a | other.a)

    def renamed(self, source: int, destination: int) -> _Group:
        return _Group(
            _renamed(self.accumulators, source, destination),
            _renamed(self.a, source, destination),
        )


def _renamed(registers: int, source: int, destination: int) -> int:
    return registers | destination if registers & source else registers & ~destination


@dataclass(frozen=True)
class _State:
    """What may be the case before an instruction, over all paths to it.

    open       wgmma instructions since the last commit
    groups     committed and not waited for, the latest last
    unfenced   registers that were written since the last fence
    is_fenced  there was a fence on every path
    """

    open: _Group = _Group()
    groups: tuple[_Group, ...] = ()
    unfenced: int = 0
    is_fenced: bool = False

    @property
    def busy(self) -> _Group:
        return functools.reduce(_Group.__or__, self.groups, self.open)

    def joined(self, other: _State) -> _State:
        longer, shorter = sorted((self.groups, other.groups), key=len, reverse=True)
        extra = len(longer) - len(shorter)
        merged = [a | b for a, b in zip(longer[extra:], shorter, strict=True)]
        return _State(
            self.open | other.open,
            (*longer[:extra], *merged),
            self.unfenced | other.unfenced,
            self.is_fenced and other.is_fenced,
        )

    def committed(self) -> _State:
        groups = (*self.groups, self.open)
        if len(groups) > MAX_GROUPS:
            groups = (groups[0] | groups[1], *groups[2:])
        return replace(self, open=_Group(), groups=groups)

    def waited(self, pending: int) -> _State:
        return replace(self, groups=self.groups[len(self.groups) - pending :] if pending else ())


class _Analysis:
    """What one instruction does to a state."""

    def __init__(self, kernel: Kernel, module: Module, raises: bool):
        self.module = module
        self.raises = raises
        names: dict[str, None] = {}
        for instruction in kernel.instructions:
            if instruction.opcode.startswith("wgmma.mma_async"):
                for registers in wgmma_operands(instruction):
                    names |= dict.fromkeys(registers)
        moves = [move for i in kernel.instructions if (move := _move(i)) is not None]
        count = -1
        while count != len(names):  # moves of moves
            count = len(names)
            for pair in moves:
                if pair[0] in names or pair[1] in names:
                    names |= dict.fromkeys(pair)
        self.names = list(names)
        self.bits = {name: 1 << number for number, name in enumerate(self.names)}

    def after(self, state: _State, instruction: Instruction) -> _State:
        opcode = instruction.opcode
        if opcode.startswith("wgmma.mma_async"):
            return self.after_wgmma(state, instruction)
        if opcode.startswith("wgmma.fence"):
            return replace(state, unfenced=0, is_fenced=True)
        if opcode.startswith("wgmma.commit_group"):
            return state.committed()
        if opcode.startswith("wgmma.wait_group"):
            pending = instruction.operands[0]
            assert isinstance(pending, Immediate)
            return state.waited(int(pending.value))
        move = _move(instruction)
        if move is not None:
            return self.after_move(state, *(self.bits.get(name, 0) for name in move))
        uses, definitions = uses_and_definitions(instruction)
        written = self.set_of(definitions)
        busy = state.busy
        early = (self.set_of(uses) | written) & busy.accumulators | written & busy.a
        if early:
            self.complain(
                instruction,
                f"Register {self.name(early)} is accessed while a wgmma may still use it; a "
                "wgmma.wait_group that covers the wgmma must come first.",
            )
        return replace(state, unfenced=state.unfenced | written)

    def after_move(self, state: _State, destination: int, source: int) -> _State:
        if not destination:
            return state
        return _State(
            state.open.renamed(source, destination),
            tuple(group.renamed(source, destination) for group in state.groups),
            _renamed(state.unfenced, source, destination),
            state.is_fenced,
        )

    def after_wgmma(self, state: _State, instruction: Instruction) -> _State:
        accumulators, a = (self.set_of(names) for names in wgmma_operands(instruction))
        busy = state.busy
        if not state.is_fenced:
            self.complain(instruction, "A wgmma is executed without a wgmma.fence before it.")
        unfenced = (accumulators | a) & state.unfenced
        if unfenced:
            self.complain(
                instruction,
                f"A wgmma uses register {self.name(unfenced)}, which was written after the last "
                "wgmma.fence.",
            )
        if a & busy.accumulators:
            self.complain(
                instruction,
                f"A wgmma reads register {self.name(a & busy.accumulators)} as A while another "
                "may still write it.",
            )
        if accumulators & busy.a:
            self.complain(
                instruction,
                f"A wgmma writes register {self.name(accumulators & busy.a)} while another may "
                "still read it as A.",
            )
        return replace(state, open=state.open | _Group(accumulators, a))

    def set_of(self, names: Iterable[str]) -> int:
        found = 0
        for name in names:
            found |= self.bits.get(name, 0)
        return found

    def name(self, registers: int) -> str:
        """One register of a set."""
        return self.names[(registers & -registers).bit_length() - 1]

    def complain(self, instruction: Instruction, message: str) -> None:
        if self.raises:
            error = EarlyRegisterAccess(message)
            text = self.module.line_text(instruction.line)
            error.locate(Location(instruction.line, text))
            raise error


def _move(instruction: Instruction) -> tuple[str, str] | None:
    """(destination, source) of a plain move between registers."""
    if instruction.parts[0] != "mov" or instruction.predicate is not None:
        return None
    destination, source = instruction.operands
    if isinstance(destination, Register) and isinstance(source, Register):
        return destination.name, source.name
    return None

"""Kernels to Python: one function a basic block, working on all lanes of a warp at once.

A register is an immutable array of 32 lanes, so that a move is an alias. The functions keep the
registers of their block in local variables and write those that are live afterwards back to the
warp's register list. How one instruction becomes Python is in instructions.py; here is what all of
them share:

storage     Registers of PTX have a width and no type. Each is kept as the NumPy type that most of
            its instructions use; other types are views.
predication A predicated instruction computes all lanes and keeps the old value where its predicate
            is false. Whatever acts on memory or barriers gets a mask instead.
divergence  A block runs with the mask of the lanes in it (`mask`; `full` says that it is all 32)
            and returns the next block, or tells the warp that its lanes part (execute.py).
blocking    An instruction that may have to wait is the first of its block; a block that cannot
            start returns BLOCKED, having changed nothing.

A generated line knows its PTX line: `Program.ptx_line` turns the traceback of a fault into it.
"""

from __future__ import annotations

import functools
import marshal
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.emulator import arithmetic, instructions, ptx, translation_cache
from fa4.emulator.errors import EmulationError, UnknownInstruction
from fa4.emulator.parallel import clusters_are_independent
from fa4.emulator.ptx import Immediate, Instruction, Not, Operand, Register, Symbol
from fa4.emulator.register_kinds import KINDS, LANES, kind_of
from fa4.emulator.wgmma_registers import check_wgmma_registers

# What a block's function returns instead of the next block's number.
BLOCKED = -1
EXITED = -2
DIVERGED = -3

BlockFunction = Callable[[Any, list[Any], Any, bool], int]


@dataclass(frozen=True)
class Translation:
    """A translated kernel as plain data, which can be kept on disk.

    first_lines   PTX line of each block's first instruction
    storage       NumPy type of each register, by its index in the warp's register list
    instructions  how many instructions each block has
    source        the generated Python; `code` is the same, compiled and marshalled
    python_lines  python_lines[n - 1] is the PTX line of line n of `source`
    constants     names and values that `source` uses
    sources       PTX line: file:line, where the PTX has line info
    """

    kernel: ptx.Kernel
    module: ptx.Module
    first_lines: list[int]
    storage: list[str]
    instructions: list[int]
    source: str
    code: bytes
    python_lines: list[int]
    constants: dict[str, Any]
    sources: dict[int, str]


class Program:
    """A kernel ready to run: a `Translation` with its functions.

    blocks           functions (warp, registers, mask, full) -> next block, BLOCKED, EXITED or
                     DIVERGED
    cluster_seconds  that the first cluster to run took, None before
    """

    cluster_seconds: float | None = None

    def __init__(self, translation: Translation):
        self.kernel = translation.kernel
        self.module = translation.module
        self.first_lines = translation.first_lines
        self.storage = translation.storage
        self.instructions = translation.instructions
        self.source = translation.source
        self.python_lines = translation.python_lines
        self.sources = translation.sources
        self.filename = _filename(translation.kernel)
        types = {f"t_{name}": kind.dtype for name, kind in KINDS.items()}
        names = {"np": np, "A": arithmetic, "where": np.where, **types, **translation.constants}
        exec(marshal.loads(translation.code), names)
        self.blocks: list[BlockFunction] = [
            names[f"block_{index}"] for index in range(len(self.first_lines))
        ]

    @functools.cached_property
    def clusters_are_independent(self) -> bool:
        return clusters_are_independent(self.kernel)

    def ptx_line(self, error: BaseException) -> int | None:
        """PTX line that an exception came from."""
        trace, line = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.filename:
                line = self.python_lines[trace.tb_lineno - 1]
            trace = trace.tb_next
        return line


def _filename(kernel: ptx.Kernel) -> str:
    return f"<emulated {kernel.name}>"


@functools.lru_cache(maxsize=64)
def translate(text: str, entry: str) -> Program:
    """One entry of a PTX module as a program; translated once, and kept on disk if it is large.

    Raises `UnknownInstruction` for an instruction that is not modelled, reached or not,
    `EarlyRegisterAccess` for registers of wgmma that are touched too early on some path, and
    `PtxSyntaxError`.
    """
    target = ptx.target_of(text)
    translation = translation_cache.read(text, entry, target)
    if translation is None:
        translation = _translation_of(text, entry)
        translation_cache.store(text, entry, target, translation)
    return Program(translation)


def _translation_of(text: str, entry: str) -> Translation:
    module = ptx.parse(text)
    if entry not in module.kernels:
        raise EmulationError(
            f"The PTX has no entry {entry!r}; it has {', '.join(module.kernels) or 'none'}."
        )
    kernel = module.kernels[entry]
    translation = _Translator(module, kernel).translation()
    check_wgmma_registers(kernel, module)
    return translation


class _Translator:
    """All blocks of a kernel."""

    def __init__(self, module: ptx.Module, kernel: ptx.Kernel):
        self.module = module
        self.kernel = kernel
        self.blocks, self.label_blocks = ptx.basic_blocks(kernel)
        self.registers = _register_indices(kernel)
        self.storage = _storage_votes(kernel, self.registers)
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[tuple[str, int], str] = {}
        self.lines: list[str] = []
        self.python_lines: list[int] = []

    def translation(self) -> Translation:
        live_out = _live_after(
            self.blocks,
            ptx.successors(self.kernel, self.blocks, self.label_blocks),
            self.registers,
        )
        for block, live in zip(self.blocks, live_out, strict=True):
            emitter = Emitter(self, block, live)
            body = emitter.translate()
            self.emit(f"def block_{block.index}(w, R, mask, full):", block.instructions[0].line)
            for text, line in body:
                self.emit("    " + text, line)
        # Where control arrives that runs off the end.
        last = self.kernel.instructions[-1].line
        self.emit(f"def block_{len(self.blocks)}(w, R, mask, full):", last)
        self.emit("    return w.leave(mask, mask, -1)", last)
        source = "\n".join(self.lines) + "\n"
        return Translation(
            self.kernel,
            self.module,
            [*(block.instructions[0].line for block in self.blocks), last],
            [self.storage[name] for name in self.registers],
            [*(len(block.instructions) for block in self.blocks), 0],
            source,
            marshal.dumps(compile(source, _filename(self.kernel), "exec")),
            self.python_lines,
            self.constants,
            {i.line: i.source for i in self.kernel.instructions if i.source is not None},
        )

    def emit(self, text: str, line: int) -> None:
        self.lines.append(text)
        self.python_lines.append(line)

    def branch_blocks(self, branch: Instruction) -> list[int]:
        return [self.label_blocks[label] for label in ptx.branch_labels(self.kernel, branch)]

    def constant(self, kind: str, bits: int) -> str:
        """Name of an array that holds one bit pattern in all lanes."""
        info = KINDS[kind]
        bits &= (1 << info.bits) - 1
        name = self.constant_names.get((kind, bits))
        if name is None:
            name = f"k{len(self.constants)}_{kind}"
            if kind == "pred":
                array = np.full(LANES, bool(bits))
            else:
                pattern = bits.to_bytes(info.bits // 8, "little") * LANES
                array = np.frombuffer(pattern, info.dtype)
            self.constants[name] = array
            self.constant_names[kind, bits] = name
        return name


def _register_indices(kernel: ptx.Kernel) -> dict[str, int]:
    """Registers that instructions name, in order of appearance."""
    names: dict[str, int] = {}
    for instruction in kernel.instructions:
        for name in instructions.registers_of(instruction):
            names.setdefault(name, len(names))
    return names


def _storage_votes(kernel: ptx.Kernel, registers: dict[str, int]) -> dict[str, str]:
    """For each register the kind that most instructions use it as."""
    votes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for instruction in kernel.instructions:
        for name, kind in instructions.kind_votes(instruction):
            votes[name][kind] += 1
    chosen = {}
    for name in registers:
        declared = kind_of(str(kernel.register_type(name)))
        usable = [
            (count, kind)
            for kind, count in votes[name].items()
            if KINDS[kind].bits == KINDS[declared].bits
        ]
        chosen[name] = max(usable)[1] if usable else declared
    return chosen


def _live_after(
    blocks: Sequence[ptx.Block], successors: list[list[int]], registers: dict[str, int]
) -> list[set[str]]:
    """Registers whose value is needed after each block (backward data flow on bit sets)."""
    used, defined = [], []
    for block in blocks:
        block_uses = block_defines = 0
        for instruction in block.instructions:
            sources, destinations = instructions.uses_and_definitions(instruction)
            block_uses |= _bits(sources, registers) & ~block_defines
            block_defines |= _bits(destinations, registers)
        used.append(block_uses)
        defined.append(block_defines)
    live_in = [0] * len(blocks)
    live_out = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(blocks))):
            following = (number for number in successors[index] if number < len(blocks))
            out = functools.reduce(lambda bits, number: bits | live_in[number], following, 0)
            new = used[index] | (out & ~defined[index])
            changed |= new != live_in[index]
            live_out[index], live_in[index] = out, new
    names = list(registers)
    return [{name for name in names if bits >> registers[name] & 1} for bits in live_out]


def _bits(names: Sequence[str], registers: dict[str, int]) -> int:
    bits = 0
    for name in names:
        bits |= 1 << registers[name]
    return bits


@dataclass
class _MatrixChain:
    """wgmma instructions in a row that add to one accumulator; executed by one call."""

    shape: tuple[Any, ...]
    accumulators: tuple[str, ...]
    start: str  # expression of the (registers, lanes) block that the chain starts from
    steps: list[str]
    line: int


class Emitter:
    """Writes the function of one block; what instructions.py sees of the translation."""

    def __init__(self, translation: _Translator, block: ptx.Block, live_after: set[str]):
        self.translation = translation
        self.block = block
        self.live_after = live_after
        self.lines: list[tuple[str, int]] = []
        self.forms: dict[str, dict[str, str]] = {}  # register: kind: local variable
        self.changed: dict[str, None] = {}  # registers to write back, in order
        self.predicate: str | None = None  # expression of the current instruction's predicate
        self.instruction = block.instructions[0]
        self.names = 0
        self.chain: _MatrixChain | None = None
        self.ended = False

    def translate(self) -> list[tuple[str, int]]:
        for instruction in self.block.instructions:
            self.instruction = instruction
            self.predicate = None
            if instruction.predicate is not None and instruction.parts[0] != "bra":
                self.predicate = self.predicate_value()
            instructions.emit(self, instruction)
        if not self.ended:
            self.write_back()
            self.line(f"return {self.block.index + 1}")
        return self.lines

    def line(self, text: str) -> None:
        self.lines.append((text, self.instruction.line))

    def unknown(self, why: str) -> UnknownInstruction:
        return UnknownInstruction(
            f"PTX line {self.instruction.line}: {self.instruction.opcode} is not emulated: {why}."
        )

    def name(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def local(self, expression: str) -> str:
        """A new local variable with a value."""
        name = self.name()
        self.line(f"{name} = {expression}")
        return name

    def predicate_value(self) -> str:
        """The current instruction's predicate, negated where it says so."""
        value = self.read(Register(str(self.instruction.predicate)), "pred")
        return self.local(f"~{value}") if self.instruction.predicate_negated else value

    def active(self) -> str:
        """Lanes in which the current instruction acts."""
        return "mask" if self.predicate is None else self.local(f"{self.predicate} & mask")

    def declared(self, register: Register) -> str:
        return kind_of(str(self.translation.kernel.register_type(register.name)))

    def read(self, operand: Operand, kind: str) -> str:
        """Local variable or constant with an operand's lanes as a kind."""
        if isinstance(operand, Immediate):
            return self.translation.constant(kind, instructions.immediate_bits(operand, kind))
        if isinstance(operand, Symbol):
            return self.local(f"w.symbol({operand.name!r}).astype(t_{kind})")
        if isinstance(operand, Not):
            return self.local(f"~{self.read(operand.operand, 'pred')}")
        if not isinstance(operand, Register):
            raise self.unknown(f"operand {operand} is not a value")
        declared = self.declared(operand)
        if KINDS[kind].bits < KINDS[declared].bits and self.may_be_wider():
            whole = self.read(operand, f"u{KINDS[declared].bits}")
            return self.local(f"{whole}.astype(t_u{KINDS[kind].bits}).view(t_{kind})")
        if KINDS[kind].bits != KINDS[declared].bits:
            raise self.unknown(f"{operand.name} has type {declared}, which is no {kind}")
        return self.form(operand.name, kind)

    def may_be_wider(self) -> bool:
        """Whether registers may be wider than the type (PTX ISA, operand size exceeding type)."""
        return self.instruction.parts[0] in ("cvt", "ld", "st")

    def form(self, name: str, kind: str) -> str:
        """Local variable with a register's lanes as a kind of its width."""
        if self.chain is not None and name in self.chain.accumulators:
            self.flush_chain()
        translation = self.translation
        storage = translation.storage[name]
        forms = self.forms.setdefault(name, {})
        if not forms:
            forms[storage] = self.local(f"R[{translation.registers[name]}]")
        if kind not in forms:
            source = next(
                (form for other, form in forms.items() if KINDS[other].dtype == KINDS[kind].dtype),
                None,
            )
            if source is None:
                source = self.local(f"{next(iter(forms.values()))}.view(t_{kind})")
            forms[kind] = source
        form = forms[kind]
        if form.endswith("]"):  # a row of a matrix accumulator, not taken out yet
            form = forms[kind] = self.local(form)
        return form

    def write(self, operand: Operand, kind: str, expression: str) -> None:
        """Give a register a value; the predicate applies. `_` swallows it."""
        if isinstance(operand, Symbol) and operand.name == "_":
            self.line(expression)
            return
        if not isinstance(operand, Register):
            raise self.unknown(f"{operand} cannot be a destination")
        declared = self.declared(operand)
        if KINDS[kind].bits < KINDS[declared].bits and self.may_be_wider():
            wide = f"{'s' if kind[0] == 's' else 'u'}{KINDS[declared].bits}"
            narrow = kind if kind[0] in "us" else f"u{KINDS[kind].bits}"
            expression = f"({expression}).view(t_{narrow}).astype(t_{wide})"
            kind = wide
        elif KINDS[kind].bits != KINDS[declared].bits:
            raise self.unknown(f"{operand.name} has type {declared}, which is no {kind}")
        if KINDS[kind].packed:
            word = f"u{KINDS[kind].bits}"
            expression, kind = f"({expression}).view(t_{word})", word
        if self.predicate is not None:
            old = self.read(operand, kind)
            expression = f"where({self.predicate}, {expression}, {old})"
        self.set_form(operand.name, kind, self.local(expression))

    def set_form(self, name: str, kind: str, local: str) -> None:
        if self.chain is not None and name in self.chain.accumulators:
            self.flush_chain()
        self.forms[name] = {kind: local}
        self.changed[name] = None

    def move(self, destination: Register, source: Register) -> None:
        """Alias: arrays are never changed in place."""
        storage = self.translation.storage[source.name]
        if not self.forms.get(source.name):
            self.form(source.name, storage)
        if self.chain is not None and source.name in self.chain.accumulators:
            self.flush_chain()
        kind = next(iter(self.forms[source.name]))
        self.form(source.name, kind)
        self.forms[destination.name] = dict(self.forms[source.name])
        self.changed[destination.name] = None

    def matrix_step(self, shape: tuple[Any, ...], accumulators: tuple[str, ...], step: str) -> None:
        """One wgmma; those in a row with one accumulator become one call."""
        chain = self.chain
        if chain is not None and (chain.shape, chain.accumulators) == (shape, accumulators):
            chain.steps.append(step)
            return
        self.flush_chain()
        rows = [next(iter(self.forms.get(name, {}).values()), "") for name in accumulators]
        block = rows[0].partition("[")[0]
        if not all(row == f"{block}[{index}]" for index, row in enumerate(rows)):
            inputs = ", ".join(self.form(name, "f32") for name in accumulators)
            block = f"({inputs},)"
        self.chain = _MatrixChain(shape, accumulators, block, [step], self.instruction.line)

    def flush_chain(self) -> None:
        chain, self.chain = self.chain, None
        if chain is None:
            return
        result = self.name()
        call = (
            f"{result} = w.wgmma(full, {chain.shape!r}, {chain.start}, ({', '.join(chain.steps)},))"
        )
        self.lines.append((call, chain.line))
        for index, name in enumerate(chain.accumulators):
            self.set_form(name, "f32", f"{result}[{index}]")

    def write_back(self) -> None:
        """Store what later blocks need. Lanes outside the mask keep what they had."""
        self.flush_chain()
        pairs = []
        for name in self.changed:
            if name in self.live_after:
                storage = self.translation.storage[name]
                pairs.append((self.translation.registers[name], self.stored_form(name, storage)))
        if not pairs:
            return
        self.line("if full:")
        for index, value in pairs:
            self.line(f"    R[{index}] = {value}")
        self.line("else:")
        for index, value in pairs:
            self.line(f"    R[{index}] = where(mask, {value}, R[{index}])")

    def stored_form(self, name: str, storage: str) -> str:
        forms = self.forms[name]
        if storage in forms:
            return forms[storage]
        return self.form(name, storage)

    def end(self, text: str) -> None:
        """The last statement of the block."""
        self.write_back()
        self.line(text)
        self.ended = True

    def indexed_branch(self, branch: Instruction) -> None:
        targets = tuple(self.translation.branch_blocks(branch))
        index = self.read(branch.operands[0], "u32")
        self.end(f"return w.indexed_branch({index}, mask, {targets!r})")

    def branch(self, target: Instruction) -> None:
        (taken,) = self.translation.branch_blocks(target)
        following = self.block.index + 1
        if target.predicate is None:
            self.end(f"return {taken}")
            return
        condition = self.predicate_value()
        self.write_back()
        self.line(f"return w.branch({condition}, mask, {taken}, {following})")
        self.ended = True

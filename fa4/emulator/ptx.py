"""PTX text to instructions and basic blocks.

The parser knows the syntax, not the instructions: opcodes stay text, and what an opcode means is
the translator's business (translate.py). Registers and labels that inline assembly declares in a
nested scope are renamed, so that a name means one thing in the whole kernel. What is not understood
is a `PtxSyntaxError` with its line, never skipped.

Syntax: PTX ISA 9.x, chapters "Syntax" and "State Spaces, Types, and Variables".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fa4.emulator.errors import EmulationError


class PtxSyntaxError(EmulationError):
    """PTX text that this parser does not understand."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant. `bits` is set for those written as the bit pattern of a float (0f..., 0d...)."""

    value: int | float
    bits: int | None = None


@dataclass(frozen=True)
class Symbol:
    """A name that is no register: a parameter, shared variable or label, or %tid.x and the like."""

    name: str


@dataclass(frozen=True)
class Vector:
    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Memory:
    """[base + offset], for tensor copies [base, {coordinates}]."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two destinations written a|b."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """A predicate operand written !p."""

    operand: Register


Operand = Register | Immediate | Symbol | Vector | Memory | Pair | Not


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction; `opcode` keeps its dots, `source` is file:line where line info is on."""

    line: int
    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None = None
    predicate_negated: bool = False
    source: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int  # in the parameter buffer, with natural alignment
    size: int
    align: int


@dataclass(frozen=True)
class SharedVariable:
    name: str
    size: int  # 0 for the dynamic part
    align: int


@dataclass
class Kernel:
    """One .entry: its parameters, registers, and instructions in program order."""

    name: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    parameter_bytes: int = 0
    shared: dict[str, SharedVariable] = field(default_factory=dict)
    local: dict[str, SharedVariable] = field(default_factory=dict)  # of each thread
    register_banks: dict[str, tuple[str, int]] = field(default_factory=dict)  # prefix: (type, n)
    registers: dict[str, str] = field(default_factory=dict)  # name: type, declared one by one
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label: index of the next instruction
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # tables of brx.idx
    reqntid: tuple[int, int, int] | None = None
    ctas_per_sm: int = 1  # that the assembler leaves registers for

    def register_type(self, name: str) -> str | None:
        """Declared type without its dot ("b32", "pred"), or None for a name that is no register."""
        if name in self.registers:
            return self.registers[name]
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match and match[1] in self.register_banks:
            kind, count = self.register_banks[match[1]]
            if int(match[2]) < count:
                return kind
        return None


@dataclass
class Module:
    target: str
    shared: dict[str, SharedVariable]
    kernels: dict[str, Kernel]
    lines: list[str]  # the text, for messages; line n is lines[n - 1]

    def line_text(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""


@dataclass
class Block:
    """Instructions that run one after the other; entered at the first, left at the last."""

    index: int
    instructions: list[Instruction]


TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4}
TYPE_BYTES |= {"s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}

_TOKEN = re.compile(
    r"""(?P<space>\s+ | //[^\n]* | /\*.*?\*/)
      | (?P<string>"[^"\n]*")
      | (?P<word>[.%$_A-Za-z][\w$.]*(?:::\w+(?:\.\w+)*)*)
      | (?P<number>0[fF][0-9a-fA-F]{8} | 0[dD][0-9a-fA-F]{16} | 0[xX][0-9a-fA-F]+U?
            | \d+\.\d*(?:[eE][-+]?\d+)? | \d+U?)
      | (?P<mark>[{}()\[\]<>,;:|@!+\-=])""",
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxSyntaxError(f"PTX line {line}: unexpected character {text[position]!r}.")
        text_here = match[0]
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), text_here, line)
        else:
            line += text_here.count("\n")
        position = match.end()


class _Stream:
    """The tokens, with one to look at in advance."""

    def __init__(self, text: str):
        self.tokens = list(_tokens(text))
        self.position = 0

    def peek(self, ahead: int = 0) -> _Token:
        index = self.position + ahead
        last_line = self.tokens[-1].line if self.tokens else 1
        return self.tokens[index] if index < len(self.tokens) else _Token("end", "", last_line)

    def next(self) -> _Token:
        token = self.peek()
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.peek().text == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> _Token:
        token = self.next()
        if token.text != text:
            raise PtxSyntaxError(
                f"PTX line {token.line}: expected {text!r}, found {token.text or 'the end'!r}."
            )
        return token

    def integer(self) -> int:
        token = self.next()
        if token.kind != "number":
            raise PtxSyntaxError(f"PTX line {token.line}: expected a number, found {token.text!r}.")
        value = _number(token).value
        if not isinstance(value, int):
            raise PtxSyntaxError(f"PTX line {token.line}: expected an integer, found {value!r}.")
        return value

    def skip_line(self, line: int) -> None:
        """Skip what is left of a line."""
        while self.peek().kind != "end" and self.peek().line == line:
            self.next()


def _number(token: _Token) -> Immediate:
    text = token.text.rstrip("U")
    lowered = text.lower()
    if lowered.startswith(("0f", "0d")):
        bits = int(text[2:], 16)
        return Immediate(bits, bits)
    if lowered.startswith("0x"):
        return Immediate(int(text, 16))
    if "." in text or "e" in lowered:
        return Immediate(float(text))
    return Immediate(int(text, 8) if len(text) > 1 and text[0] == "0" else int(text))


def target_of(text: str) -> str:
    """The .target of a module, such as "sm_90a", without parsing the rest."""
    match = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if match is None:
        raise PtxSyntaxError("The PTX has no .target.")
    return match[1]


@functools.lru_cache(maxsize=32)
def parse(text: str) -> Module:
    """Parses one PTX module; see the module's docstring for what it refuses.

    The result is shared by everybody who parses the same text: nobody may change it.
    """
    return _Parser(text).module()


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(.*?)"', re.M)


class _Parser:
    def __init__(self, text: str):
        self.text_lines = text.splitlines()
        self.stream = _Stream(text)
        self.shared: dict[str, SharedVariable] = {}
        self.kernels: dict[str, Kernel] = {}
        # They may stand behind the code that refers to them.
        self.files = {int(number): name for number, name in _FILE.findall(text)}
        self.target = ""

    def module(self) -> Module:
        stream = self.stream
        while stream.peek().kind != "end":
            token = stream.next()
            if token.text in (".version", ".address_size", ".file"):
                stream.skip_line(token.line)
            elif token.text == ".target":
                self.target = stream.next().text
                stream.skip_line(token.line)
            elif token.text == ".section":
                self.skip_section()
            elif token.text in (".visible", ".weak", ".extern"):
                continue  # linkage says nothing about execution
            elif token.text == ".shared":
                self.shared_variable(self.shared)
            elif token.text == ".entry":
                self.entry()
            else:
                raise PtxSyntaxError(
                    f"PTX line {token.line}: {token.text!r} is not supported at module level."
                )
        return Module(self.target, self.shared, self.kernels, self.text_lines)

    def skip_section(self) -> None:
        self.stream.next()
        self.stream.expect("{")
        while self.stream.next().text != "}":
            if self.stream.peek().kind == "end":
                raise PtxSyntaxError("The PTX ends inside a .section.")

    def variable(self) -> tuple[str, int, int]:
        """`.align n .type name[count]` after the state space: (name, bytes, alignment)."""
        stream = self.stream
        align = stream.integer() if stream.accept(".align") else 0
        kind = stream.next()
        if kind.text[1:] not in TYPE_BYTES:
            raise PtxSyntaxError(f"PTX line {kind.line}: unknown type {kind.text!r}.")
        size = TYPE_BYTES[kind.text[1:]]
        align = align or size
        # Pointer attributes of a parameter: .ptr .global .align 16
        while stream.peek().text in (".ptr", ".global", ".shared", ".const", ".local", ".align"):
            if stream.next().text == ".align":
                stream.integer()
        name = stream.next().text
        if stream.accept("["):
            size *= 0 if stream.peek().text == "]" else stream.integer()
            stream.expect("]")
        return name, size, align

    def shared_variable(self, into: dict[str, SharedVariable]) -> None:
        name, size, align = self.variable()
        self.stream.expect(";")
        into[name] = SharedVariable(name, size, align)

    def entry(self) -> None:
        stream = self.stream
        kernel = Kernel(stream.next().text)
        if stream.accept("("):
            offset = 0
            while not stream.accept(")"):
                stream.expect(".param")
                name, size, align = self.variable()
                offset = -(-offset // align) * align
                kernel.parameters[name] = Parameter(name, offset, size, align)
                offset += size
                stream.accept(",")
            kernel.parameter_bytes = offset
        while not stream.accept("{"):
            token = stream.next()
            if token.text == ".reqntid":
                kernel.reqntid = self.dimensions()
            elif token.text == ".minnctapersm":
                kernel.ctas_per_sm = self.dimensions()[0]
            elif token.text in (".maxntid", ".maxnreg", ".reqnctapercluster"):
                self.dimensions()
            elif token.text not in (".explicitcluster", ".blocksareclusters"):
                raise PtxSyntaxError(
                    f"PTX line {token.line}: {token.text!r} is not supported after .entry."
                )
        _BodyParser(self, kernel).body()
        self.kernels[kernel.name] = kernel

    def dimensions(self) -> tuple[int, int, int]:
        found = [self.stream.integer()]
        while self.stream.accept(","):
            found.append(self.stream.integer())
        x, y, z = (found + [1, 1])[:3]
        return x, y, z


class _Scope:
    def __init__(self, number: int, parent: _Scope | None):
        self.number = number
        self.parent = parent
        self.names: dict[str, str] = {}  # as written: unique
        self.banks: dict[str, str] = {}  # prefixes of %r<n> declarations

    def declare(self, name: str) -> str:
        unique = name if self.parent is None else f"{name}@{self.number}"
        self.names[name] = unique
        return unique

    def resolve(self, name: str) -> str:
        scope: _Scope | None = self
        match = re.fullmatch(r"(.*?)(\d+)", name)
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            if match and match[1] in scope.banks:
                return scope.banks[match[1]] + match[2]
            scope = scope.parent
        return name


class _BodyParser:
    """The body of one entry. Names are resolved at the end: a label may be used before it."""

    def __init__(self, parser: _Parser, kernel: Kernel):
        self.parser = parser
        self.stream = parser.stream
        self.kernel = kernel
        self.scope = _Scope(0, None)
        self.scopes = 0
        self.location: str | None = None
        self.written: list[tuple[_Scope, Instruction]] = []
        self.tables: dict[str, tuple[_Scope, list[str]]] = {}

    def body(self) -> None:
        stream = self.stream
        while True:
            token = stream.next()
            if token.kind == "end":
                raise PtxSyntaxError(f"The PTX ends inside {self.kernel.name}.")
            if token.text == "{":
                self.scopes += 1
                self.scope = _Scope(self.scopes, self.scope)
            elif token.text == "}":
                if self.scope.parent is None:
                    break
                self.scope = self.scope.parent
            elif token.text.startswith("."):
                self.directive(token)
            elif token.kind == "word" and stream.peek().text == ":":
                stream.next()
                if stream.accept(".branchtargets"):
                    self.branch_targets(token.text)
                    continue
                self.kernel.labels[self.scope.declare(token.text)] = len(self.written)
            else:
                self.instruction(token)
        self.kernel.instructions = [self.resolved(*written) for written in self.written]
        self.kernel.branch_targets = {
            name: tuple(scope.resolve(label) for label in labels)
            for name, (scope, labels) in self.tables.items()
        }

    def directive(self, token: _Token) -> None:
        stream = self.stream
        if token.text == ".reg":
            self.register_declaration()
        elif token.text == ".shared":
            self.parser.shared_variable(self.kernel.shared)
        elif token.text == ".local":
            self.parser.shared_variable(self.kernel.local)
        elif token.text == ".pragma":
            stream.next()
            stream.expect(";")
        elif token.text == ".loc":
            file, line = stream.integer(), stream.integer()
            self.location = f"{self.parser.files.get(file, file)}:{line}"
            # The column, and ", function_name label, inlined_at ..." on the same line.
            stream.skip_line(token.line)
        else:
            raise PtxSyntaxError(f"PTX line {token.line}: {token.text!r} is not supported here.")

    def branch_targets(self, name: str) -> None:
        labels = [self.stream.next().text]
        while self.stream.accept(","):
            labels.append(self.stream.next().text)
        self.stream.expect(";")
        self.tables[self.scope.declare(name)] = self.scope, labels

    def register_declaration(self) -> None:
        stream = self.stream
        kind = stream.next().text[1:]
        while True:
            name = stream.next().text
            if stream.accept("<"):
                unique = name if self.scope.parent is None else f"{name}@{self.scope.number}_"
                self.scope.banks[name] = unique
                self.kernel.register_banks[unique] = (kind, stream.integer())
                stream.expect(">")
            else:
                self.kernel.registers[self.scope.declare(name)] = kind
            if not stream.accept(","):
                break
        stream.expect(";")

    def instruction(self, token: _Token) -> None:
        stream = self.stream
        predicate, negated = None, False
        if token.text == "@":
            negated = stream.accept("!")
            predicate = stream.next().text
            token = stream.next()
        if token.kind != "word":
            raise PtxSyntaxError(f"PTX line {token.line}: unexpected {token.text!r}.")
        opcode = token.text
        # An opcode may be continued on the next line: "mma.sync\n.aligned ...".
        while stream.peek().text.startswith("."):
            opcode += stream.next().text
        operands: list[Operand] = []
        while not stream.accept(";"):
            operands.append(self.operand())
            if stream.peek().text != ";":
                stream.expect(",")
        self.written.append(
            (
                self.scope,
                Instruction(token.line, opcode, tuple(operands), predicate, negated, self.location),
            )
        )

    def operand(self) -> Operand:
        stream = self.stream
        if stream.accept("{"):
            elements = []
            while not stream.accept("}"):
                elements.append(self.operand())
                stream.accept(",")
            return Vector(tuple(elements))
        if stream.accept("["):
            return self.memory()
        if stream.accept("!"):
            return Not(Register(stream.next().text))
        if stream.accept("-"):
            number = _number(stream.next())
            return Immediate(-number.value)
        token = stream.next()
        if token.kind == "number":
            return _number(token)
        if token.kind != "word":
            raise PtxSyntaxError(f"PTX line {token.line}: unexpected operand {token.text!r}.")
        if stream.accept("|"):
            return Pair(Symbol(token.text), self.operand())
        return Symbol(token.text)

    def memory(self) -> Memory:
        stream = self.stream
        base = self.operand()
        if not isinstance(base, Symbol | Immediate):
            raise PtxSyntaxError(f"PTX line {stream.peek().line}: {base} cannot be an address.")
        offset = 0
        if stream.accept("+"):
            sign = -1 if stream.accept("-") else 1
            offset = sign * stream.integer()
        elif stream.accept("-"):
            offset = -stream.integer()
        coordinates: tuple[Operand, ...] = ()
        if stream.accept(","):
            vector = self.operand()
            coordinates = vector.elements if isinstance(vector, Vector) else (vector,)
        stream.expect("]")
        return Memory(base, offset, coordinates)

    def resolved(self, scope: _Scope, instruction: Instruction) -> Instruction:
        def name_of(name: str) -> Register | Symbol:
            unique = scope.resolve(name)
            return Register(unique) if self.kernel.register_type(unique) else Symbol(unique)

        def resolve(operand: Operand) -> Operand:
            if isinstance(operand, Symbol):
                return name_of(operand.name)
            if isinstance(operand, Not):
                return Not(Register(scope.resolve(operand.operand.name)))
            if isinstance(operand, Vector):
                return Vector(tuple(resolve(element) for element in operand.elements))
            if isinstance(operand, Pair):
                return Pair(resolve(operand.first), resolve(operand.second))
            if isinstance(operand, Memory):
                base = operand.base
                if isinstance(base, Symbol):
                    base = name_of(base.name)
                coordinates = tuple(resolve(element) for element in operand.coordinates)
                return Memory(base, operand.offset, coordinates)
            return operand

        predicate = instruction.predicate
        return Instruction(
            instruction.line,
            instruction.opcode,
            tuple(resolve(operand) for operand in instruction.operands),
            None if predicate is None else scope.resolve(predicate),
            instruction.predicate_negated,
            instruction.source,
        )


# What can stop a warp until another has done something. Such an instruction is the first of its
# block, so that a blocked block has changed nothing and can simply be run again.
BLOCKING = (
    "mbarrier.try_wait",
    "bar.sync",
    "barrier.sync",
    "bar.red",
    "bar.warp.sync",
    "barrier.red",
    "barrier.cluster.wait",
    "tcgen05.alloc",
    "wgmma.fence",
    "setmaxnreg.inc",
)


def is_blocking(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return any(opcode == name or opcode.startswith(name + ".") for name in BLOCKING) or (
        opcode.startswith(("barrier.cta.sync", "barrier.cta.red"))
    )


def ends_block(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("bra", "brx", "ret", "exit", "trap")


def basic_blocks(kernel: Kernel) -> tuple[list[Block], dict[str, int]]:
    """Cuts the kernel at labels, after branches and before blocking instructions.

    Returns the blocks in program order and the block each label names (one past the last block
    for a label at the end).
    """
    leaders = {0, *kernel.labels.values()}
    for index, instruction in enumerate(kernel.instructions):
        if ends_block(instruction):
            leaders.add(index + 1)
        elif is_blocking(instruction):
            leaders.add(index)
    count = len(kernel.instructions)
    starts = sorted(leader for leader in leaders if leader < count)
    blocks = [
        Block(number, kernel.instructions[start:end])
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], count], strict=True))
    ]
    number_at = {start: number for number, start in enumerate(starts)} | {count: len(blocks)}
    return blocks, {label: number_at[index] for label, index in kernel.labels.items()}


def branch_labels(kernel: Kernel, instruction: Instruction) -> tuple[str, ...]:
    """Labels that a bra or brx.idx can go to; none for other instructions."""
    if instruction.parts[0] == "bra":
        target = instruction.operands[0]
        names: tuple[str, ...] = (target.name,) if isinstance(target, Symbol) else ()
    elif instruction.parts[0] == "brx":
        table = instruction.operands[1]
        names = kernel.branch_targets.get(table.name, ()) if isinstance(table, Symbol) else ()
    else:
        return ()
    if not names or any(name not in kernel.labels for name in names):
        raise PtxSyntaxError(f"PTX line {instruction.line}: a branch to no label.")
    return names


def successors(
    kernel: Kernel, blocks: list[Block], label_blocks: dict[str, int]
) -> list[list[int]]:
    """For each block those that can follow it; one past the last block is the end."""
    found = []
    for block in blocks:
        last = block.instructions[-1]
        following = [label_blocks[label] for label in branch_labels(kernel, last)]
        if last.predicate is not None or not ends_block(last):
            following.append(block.index + 1)
        found.append(following)
    return found

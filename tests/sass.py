"""Machine code of compiled kernels: instructions and the loops they form.

`code_of` compiles through fa4's cache, takes the GPU program (a cubin) out of the cache entry, and
reads what nvdisasm makes of it. Needs no GPU.

Loops are natural loops of the flow graph, not pairs of addresses: ptxas moves rarely taken pieces,
such as waiting for a barrier, behind the end of the program, and their way back is a backward
branch across everything.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fa4.compiler import KernelSpec, cache_dir, compile_kernel

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

_ELF_MAGIC = b"\x7fELF"
_EM_CUDA = 190  # machine number of ELF files for NVIDIA GPUs
_NOBITS = 8  # section type without bytes in the file
_SIZED, _REGCOUNT = 0x04, 0x2F  # format and attribute of a record in .nv.info

_LABEL = re.compile(r"^([.$\w]+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


@dataclass(frozen=True)
class Instruction:
    """One line, such as ``@!P1 BRA `(.L_x_4)``: predicate "@!P1", opcode "BRA", operands the rest.

    The opcode has its modifiers: "MUFU.EX2", "HGMMA.64x128x16.F32.BF16".
    """

    address: int
    predicate: str
    opcode: str
    operands: str

    def is_a(self, opcode: str) -> bool:
        """Whether the opcode begins with ``opcode``, modifier by modifier."""
        return f"{self.opcode}.".startswith(f"{opcode}.")

    @property
    def target(self) -> str | None:
        """Label that it names."""
        found = _TARGET.search(self.operands)
        return None if found is None else found[1]


def count(instructions: Iterable[Instruction], opcode: str) -> int:
    """How many instructions are ``opcode``, whatever further modifiers they have."""
    return sum(instruction.is_a(opcode) for instruction in instructions)


@dataclass(frozen=True)
class Code:
    """The program of one kernel.

    name          that a profiler shows
    registers     of each thread at launch
    instructions  in the order of their addresses
    labels        index of the instruction behind each label
    """

    name: str
    registers: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def count(self, opcode: str) -> int:
        return count(self.instructions, opcode)

    @functools.cached_property
    def loops(self) -> tuple[frozenset[int], ...]:
        """Each loop as the indices of its instructions; an outer loop has those of its inner ones.

        A back edge goes to a block that every way to its source passes; the loop is what reaches
        that source without passing the block (Aho, Lam, Sethi and Ullman 2006, section 9.6).
        """
        blocks, successors = self._flow
        order = _reverse_postorder(successors)
        predecessors: dict[int, list[int]] = {block: [] for block in order}
        for block in order:
            for successor in successors[block]:
                predecessors[successor].append(block)
        dominators = _dominators(order, predecessors)
        bodies: dict[int, set[int]] = {}
        for block in order:
            for head in successors[block]:
                if head not in dominators[block]:
                    continue
                body = bodies.setdefault(head, {head})
                pending = [block]
                while pending:
                    inside = pending.pop()
                    if inside not in body:
                        body.add(inside)
                        pending += predecessors[inside]
        return tuple(
            frozenset(i for block in body for i in range(block, blocks[block]))
            for _, body in sorted(bodies.items())
        )

    def loops_with(self, opcode: str) -> list[list[Instruction]]:
        """Loops that hold such an instruction, the innermost ones only, in order of address."""
        matching = {
            i for i, instruction in enumerate(self.instructions) if instruction.is_a(opcode)
        }
        holding = [loop for loop in self.loops if loop & matching]
        innermost = [loop for loop in holding if not any(other < loop for other in holding)]
        return [[self.instructions[i] for i in sorted(loop)] for loop in sorted(innermost, key=min)]

    @functools.cached_property
    def _flow(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Blocks (first instruction: end) and for each the blocks that may follow it."""
        instructions = self.instructions
        following = {i: self._following(i) for i in range(len(instructions))}
        starts = {0} | set(self.labels.values())
        for i, successors in following.items():
            if successors != [i + 1]:
                starts |= {i + 1, *successors}
        ordered = sorted(start for start in starts if start < len(instructions))
        blocks = dict(zip(ordered, [*ordered[1:], len(instructions)], strict=True))
        return blocks, {start: following[end - 1] for start, end in blocks.items()}

    def _following(self, index: int) -> list[int]:
        """Instructions that may be executed after one; a call comes back."""
        instruction = self.instructions[index]
        kind = instruction.opcode.split(".")[0]
        next_one = [index + 1] if index + 1 < len(self.instructions) else []
        if kind == "BRA":
            assert instruction.target is not None, instruction
            target = [self.labels[instruction.target]]
            # Before the label there may be a second predicate.
            is_certain = not instruction.predicate and instruction.operands.startswith("`")
            return target if is_certain else target + next_one
        if kind in ("EXIT", "RET"):
            return next_one if instruction.predicate else []
        if kind == "BSYNC":
            # Threads that left each other behind BSSY go on together at its label.
            barrier = instruction.operands.split(",")[0]
            targets = {
                self.labels[other.target]
                for other in self.instructions
                if other.is_a("BSSY")
                and other.operands.split(",")[0] == barrier
                and other.target is not None
            }
            return next_one if index + 1 in targets else sorted(targets)
        assert kind not in ("BRX", "BRXU", "JMP", "JMX", "JMXU"), f"unknown flow: {instruction}"
        return next_one


def _reverse_postorder(successors: dict[int, list[int]]) -> list[int]:
    """Blocks that can be reached from block 0, each before what follows it, loops apart."""
    seen = {0}
    order = []
    stack = [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    return order[::-1]


def _dominators(order: list[int], predecessors: dict[int, list[int]]) -> dict[int, set[int]]:
    """For each block those that every way to it passes, itself included."""
    dominators = {block: set(order) for block in order}
    dominators[order[0]] = {order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
            changed = changed or common != dominators[block]
            dominators[block] = common
    return dominators


# -- from a specialisation to its code -----------------------------------------------------------


@functools.cache
def code_of(spec: KernelSpec) -> Code:
    """Machine code of a specialisation, compiled unless fa4's disk cache holds it."""
    path = compile_kernel(spec).path
    assert path is not None, f"{spec.name} cannot be read back: {cache_dir()} could not store it"
    cubin = cubin_in(path.read_bytes())
    return parse(disassemble(cubin), registers_of(cubin))


def cubin_in(library: bytes) -> bytes:
    """The one GPU program inside a host library or object."""
    cubins = []
    start = library.find(_ELF_MAGIC)
    while start >= 0:
        if struct.unpack_from("<H", library, start + 18)[0] == _EM_CUDA:
            cubins.append(library[start : start + _elf_size(library, start)])
        start = library.find(_ELF_MAGIC, start + 1)
    assert len(cubins) == 1, f"{len(cubins)} GPU programs, not one"
    return cubins[0]


class _Section(NamedTuple):
    name: str
    kind: int
    offset: int
    size: int


def _elf_size(image: bytes, start: int) -> int:
    """Bytes of the 64-bit ELF file at ``start``: to the end of its last table or section."""
    program_table, section_table = struct.unpack_from("<QQ", image, start + 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", image, start + 54)
    return max(
        program_table + programs * program_size,
        section_table + sections * section_size,
        *(s.offset + s.size for s in _sections(image[start:]) if s.kind != _NOBITS),
    )


def _sections(elf: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, number, names_index = struct.unpack_from("<3H", elf, 58)
    (names,) = struct.unpack_from("<Q", elf, table + names_index * size + 24)
    sections = []
    for header in range(table, table + number * size, size):
        name, kind = struct.unpack_from("<II", elf, header)
        offset, bytes_in_file = struct.unpack_from("<QQ", elf, header + 24)
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        sections.append(_Section(text, kind, offset, bytes_in_file))
    return sections


def registers_of(cubin: bytes) -> int:
    """Registers that each thread of the one kernel has at launch.

    .nv.info is a list of records: format, attribute, and a payload or its size. The attribute
    REGCOUNT has the payload (symbol, registers).
    """
    (section,) = (s for s in _sections(cubin) if s.name == ".nv.info")
    counts = []
    position, end = section.offset, section.offset + section.size
    while position < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if (form, attribute) == (_SIZED, _REGCOUNT):
            counts.append(struct.unpack_from("<II", cubin, position)[1])
        position += size if form == _SIZED else 0
    assert len(counts) == 1, f"{len(counts)} register counts, not one"
    return int(counts[0])


def disassemble(cubin: bytes) -> str:
    """nvdisasm's listing of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [nvdisasm(), "-c", file.name], check=True, capture_output=True, text=True
        ).stdout


@functools.cache
def nvdisasm() -> str:
    """NVIDIA's disassembler: of the package in the `test` extra, else of a CUDA toolkit."""
    try:
        files = importlib.metadata.files(NVDISASM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.removesuffix(".exe") == "nvdisasm":
            return str(Path(str(file.locate())))
    found = shutil.which("nvdisasm")
    assert found is not None, f"nvdisasm is missing; install {NVDISASM_PACKAGE}"
    return found


def parse(listing: str, registers: int) -> Code:
    """Read a listing of one kernel."""
    kernels = re.findall(r"^\s*\.section\s+\.text\.([$\w]+)", listing, re.M)
    assert len(kernels) == 1, f"the listing has the kernels {kernels}, not one"
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            instructions.append(Instruction(int(address, 16), predicate or "", opcode, operands))
    assert instructions, "the listing has no instructions"
    return Code(kernels[0], registers, tuple(instructions), labels)

"""What a launch would ask of the units of a multiprocessor: a model, not a measurement.

Counts come from the run: how often each warp executed each instruction, and the bytes its TMA
copies moved. Each instruction is charged to the units below at their full rate; nothing is said
about latencies, waiting, or how well the units overlap, so the busiest unit is a lower bound of the
time. The assembler's code differs from PTX: moves and parameter loads cost nothing here,
multiplications and additions are not fused. Accesses to tensor memory and copies to it are not
charged.

Rates of one multiprocessor and clock, from NVIDIA's tables of arithmetic throughput:

    issue     4 warp-instructions
    tensor    4096 FLOP of 16-bit wgmma on Hopper, 8192 of tcgen05.mma on Blackwell; twice that for
              8 bits, four times for 4-bit kinds, half for tf32
    exp       16 lanes of ex2, rcp, lg2, tanh and the like
    fma       128 lanes of float32 add, multiply, fma
    alu       64 lanes of integers, logic, selection, comparison, conversion
    shared    128 bytes of shared memory: operands of tensor cores, loads, stores, shuffles, TMA

A tcgen05.mma of a pair of CTAs is charged to the warp that issues it, for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa4.emulator.execute import Statistics
from fa4.emulator.launch_record import Launch
from fa4.emulator.ptx import Instruction, Vector, basic_blocks
from fa4.emulator.register_kinds import KINDS, LANES, kind_of
from fa4.emulator.translate import translate

UNITS = ("issue", "tensor", "exp", "fma", "alu", "shared")

_ISSUE_RATE = 4
_LANE_RATES = {"exp": 16, "fma": 128, "alu": 64}
_SHARED_RATE = 128  # bytes
_TENSOR_RATES = {"tf32": 2048, "f16": 4096, "bf16": 4096, "e4m3": 8192, "e5m2": 8192}
_TCGEN05_RATES = {
    "tf32": 4096,
    "f16": 8192,
    "f8f6f4": 16384,
    "i8": 16384,
    "mxf8f6f4": 16384,
    "mxf4": 32768,
    "mxf4nvf4": 32768,
}
_OPERAND_BYTES = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}

_EXP = ("ex2", "rcp", "lg2", "tanh", "sin", "cos", "sqrt", "rsqrt")
_FLOAT = ("add", "sub", "mul", "fma")
_ALU = (
    "abs", "neg", "min", "max", "setp", "selp", "and", "or", "xor", "not", "shl", "shr", "shf",
    "prmt", "lop3", "bfe", "bfi", "popc", "clz", "bfind", "brev", "cvt", "mad", "div", "rem",
    "vote", "elect", "redux",
)  # fmt: skip
# The assembler has no instruction for these, or another one already pays for them.
_FREE = ("mov", "cvta", "prefetch", "createpolicy", "fence", "membar")


@dataclass(frozen=True)
class Costs:
    """What warps asked for: instructions, clocks of each unit, and bytes that TMA moved."""

    instructions: int
    clocks: dict[str, float]
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Costs) -> Costs:
        clocks = {unit: self.clocks[unit] + other.clocks[unit] for unit in UNITS}
        return Costs(
            self.instructions + other.instructions,
            clocks,
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
        )

    def __sub__(self, other: Costs) -> Costs:
        """For what one more tile costs: the difference of two launches."""
        clocks = {unit: self.clocks[unit] - other.clocks[unit] for unit in UNITS}
        return Costs(
            self.instructions - other.instructions,
            clocks,
            self.loaded_bytes - other.loaded_bytes,
            self.stored_bytes - other.stored_bytes,
        )

    @property
    def busiest(self) -> str:
        """The unit that bounds the time from below."""
        return max(UNITS, key=lambda unit: self.clocks[unit])


@dataclass(frozen=True)
class CostReport:
    """Costs of a launch by warp of its CTAs (all CTAs together), and their sum."""

    entry: str
    warps: dict[int, Costs]

    @property
    def total(self) -> Costs:
        return sum(self.warps.values(), _NOTHING)

    def __str__(self) -> str:
        titles = ["warps", "instructions", *UNITS, "TMA in", "TMA out"]
        lines = [f"{self.entry}: modelled clocks of each unit, all CTAs together"]
        rows = [titles]
        for first in range(0, max(self.warps, default=-1) + 1, 4):
            members = [self.warps[w] for w in range(first, first + 4) if w in self.warps]
            name = f"{first}-{first + len(members) - 1}" if len(members) > 1 else str(first)
            rows.append(_row(name, sum(members, _NOTHING)))
        rows.append(_row("all", self.total))
        widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells))
        lines.append(f"busiest: {self.total.busiest}")
        return "\n".join(lines)


_NOTHING = Costs(0, dict.fromkeys(UNITS, 0.0))


def _row(name: str, costs: Costs) -> list[str]:
    clocks = [f"{costs.clocks[unit]:.0f}" for unit in UNITS]
    return [
        name, str(costs.instructions), *clocks, str(costs.loaded_bytes), str(costs.stored_bytes)
    ]  # fmt: skip


def cost_report(launch: Launch, statistics: Statistics) -> CostReport:
    """Costs of a launch that `run_launch` has run."""
    program = translate(launch.ptx, launch.entry)
    blocks, _ = basic_blocks(program.kernel)
    block_costs = [_sum_of(block.instructions) for block in blocks]
    warps = {}
    for warp, work in statistics.warps.items():
        clocks = dict.fromkeys(UNITS, 0.0)
        for runs, costs in zip(work.block_runs, block_costs, strict=False):
            for unit in UNITS:
                clocks[unit] += runs * costs[unit]
        moved = work.loaded_bytes + work.stored_bytes + work.operand_bytes
        clocks["shared"] += moved / _SHARED_RATE
        for kind, flop in work.tensor_flop.items():
            clocks["tensor"] += flop / _TCGEN05_RATES[kind]
        instructions = sum(
            runs * size for runs, size in zip(work.block_runs, program.instructions, strict=True)
        )
        warps[warp] = Costs(instructions, clocks, work.loaded_bytes, work.stored_bytes)
    return CostReport(launch.entry, dict(sorted(warps.items())))


def _sum_of(instructions: Sequence[Instruction]) -> dict[str, float]:
    clocks = dict.fromkeys(UNITS, 0.0)
    for instruction in instructions:
        for unit, number in instruction_clocks(instruction).items():
            clocks[unit] += number
    return clocks


def instruction_clocks(i: Instruction) -> dict[str, float]:
    """Clocks that one warp's execution takes of the units of a multiprocessor.

    A wgmma is shared by four warps: each is charged a quarter.
    """
    name = i.parts[0]
    if name in _FREE or i.opcode.startswith("ld.param"):
        return {}
    clocks: dict[str, float] = {"issue": 1 / _ISSUE_RATE}
    if i.opcode.startswith("wgmma.mma_async"):
        clocks |= _wgmma_clocks(i)
    elif name in _EXP:
        clocks["exp"] = LANES / _LANE_RATES["exp"]
    elif name in _FLOAT and i.parts[-1] in ("f32", "f32x2"):
        elements = 2 if i.parts[-1] == "f32x2" else 1
        clocks["fma"] = elements * LANES / _LANE_RATES["fma"]
    elif name in _FLOAT or name in _ALU:
        clocks["alu"] = LANES / _LANE_RATES["alu"]
    elif name == "shfl":
        clocks["shared"] = LANES * 4 / _SHARED_RATE
    elif name in ("stmatrix", "ldmatrix"):
        registers = i.operands[1 if name == "stmatrix" else 0]
        count = len(registers.elements) if isinstance(registers, Vector) else 1
        clocks["shared"] = LANES * 4 * count / _SHARED_RATE
    elif name in ("ld", "st") and any(part.startswith("shared") for part in i.parts):
        clocks["shared"] = LANES * _access_bytes(i) / _SHARED_RATE
    return clocks


def _access_bytes(i: Instruction) -> int:
    vector = {"v2": 2, "v4": 4, "v8": 8}
    count = next((vector[part] for part in i.parts if part in vector), 1)
    return count * KINDS[kind_of(i.parts[-1])].bits // 8


def _wgmma_clocks(i: Instruction) -> dict[str, float]:
    shape, _, a_kind, b_kind = i.parts[4:8]
    n, k = (int(number) for number in shape.removeprefix("m64n").split("k"))
    rate = min(_TENSOR_RATES[a_kind], _TENSOR_RATES[b_kind])
    operand_bytes = n * k * _OPERAND_BYTES[b_kind]
    if not isinstance(i.operands[1], Vector):
        operand_bytes += 64 * k * _OPERAND_BYTES[a_kind]
    return {
        "tensor": 2 * 64 * n * k / rate / 4,
        "shared": operand_bytes / _SHARED_RATE / 4,
    }

"""Tensor memory of one CTA of sm_100: 128 lanes of 512 columns of 32 bits.

An address has the column in bits 0-15 and the lane in bits 16-31. Columns are given out by
`allocate`, must be given back before the CTA ends, and only those that are can be touched. What
nothing wrote since its allocation cannot be read.

A warp reaches the quarter of the lanes that its number modulo 4 names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.emulator.errors import (
    EmulationError,
    Misaligned,
    OutOfBounds,
    UnwrittenRead,
)
from fa4.emulator.register_kinds import LANES

Array = np.ndarray[Any, Any]

TMEM_LANES = 128
TMEM_COLUMNS = 512
QUARTER = 32  # lanes that one warp reaches
LANE_SHIFT = 16
COLUMN_MASK = (1 << LANE_SHIFT) - 1
SMALLEST_ALLOCATION = 32  # columns; larger ones are powers of two
_POISON = 0xFFFFFFFF  # a NaN: kernels must not get away with reading what they never wrote


class TensorMemoryMisuse(EmulationError):
    """Tensor memory that is allocated or given back wrongly, or not given back."""


class TensorMemory:
    """See the module's docstring.

    words        (columns, lanes) uint32; made at the first allocation
    written      (columns, lanes) bool, true where a read is allowed; None if not checked
    allocations  first column: number of columns
    """

    def __init__(self, name: str = "tensor memory", check_unwritten: bool = True):
        self.name = name
        self.words: Array = np.empty((0, TMEM_LANES), np.uint32)
        self.written: Array | None = None
        self.allocations: dict[int, int] = {}
        self._checks_unwritten = check_unwritten
        self._has_permit = True

    # -- allocation ------------------------------------------------------------------------------

    def allocate(self, columns: int) -> int | None:
        """First column of a new allocation; None while there is no room.

        columns  a power of two from 32 to 512
        """
        self._require_size(columns, "tcgen05.alloc")
        if not self._has_permit:
            raise TensorMemoryMisuse(
                f"{self.name}: tcgen05.alloc after tcgen05.relinquish_alloc_permit."
            )
        start = self._first_gap(columns)
        if start is None:
            return None
        if not self.words.size:
            self.words = np.empty((TMEM_COLUMNS, TMEM_LANES), np.uint32)
            if self._checks_unwritten:
                self.written = np.zeros((TMEM_COLUMNS, TMEM_LANES), np.bool_)
        self.words[start : start + columns] = _POISON
        if self.written is not None:
            self.written[start : start + columns] = False
        self.allocations[start] = columns
        return start

    def has_room(self, columns: int) -> bool:
        return self._first_gap(columns) is not None

    def deallocate(self, address: int, columns: int) -> None:
        self._require_size(columns, "tcgen05.dealloc")
        if self.allocations.get(address) != columns:
            raise TensorMemoryMisuse(
                f"{self.name}: tcgen05.dealloc of {columns} columns at {address:#x}, where no such "
                f"allocation is; there are {self.describe()}."
            )
        del self.allocations[address]

    def relinquish_permit(self) -> None:
        self._has_permit = False

    def require_freed(self) -> None:
        """Raise `TensorMemoryMisuse` for allocations that the CTA left behind."""
        if self.allocations:
            raise TensorMemoryMisuse(
                f"{self.name} is not given back at the end of the CTA: {self.describe()}."
            )

    def describe(self) -> str:
        return ", ".join(f"{n} columns at {c}" for c, n in self.allocations.items()) or "none"

    def _require_size(self, columns: int, what: str) -> None:
        is_power = columns > 0 and columns & (columns - 1) == 0
        if not is_power or not SMALLEST_ALLOCATION <= columns <= TMEM_COLUMNS:
            raise TensorMemoryMisuse(
                f"{what} names {columns} columns; allowed are powers of two from "
                f"{SMALLEST_ALLOCATION} to {TMEM_COLUMNS}."
            )

    def _first_gap(self, columns: int) -> int | None:
        for start in range(0, TMEM_COLUMNS - columns + 1, SMALLEST_ALLOCATION):
            end = start + columns
            if all(end <= c or c + n <= start for c, n in self.allocations.items()):
                return start
        return None

    # -- access ----------------------------------------------------------------------------------

    def require_columns(self, column: int, count: int, what: str) -> None:
        """Raise `OutOfBounds` unless columns [column, column + count) lie in one allocation."""
        for start, size in self.allocations.items():
            if start <= column and column + count <= start + size:
                return
        raise OutOfBounds(
            f"{what} touches columns {column} to {column + count} of {self.name}, which has "
            f"allocations: {self.describe()}."
        )

    def read(self, column: int, count: int, lanes: slice | Array, what: str) -> Array:
        """(count, lanes) words of columns from ``column`` on; a view where ``lanes`` is a slice."""
        self.require_columns(column, count, what)
        columns = slice(column, column + count)
        if self.written is not None:
            readable = self.written[columns, lanes]
            if not readable.all():
                raise self._unwritten(readable, column, lanes, what)
        block: Array = self.words[columns, lanes]
        return block

    def write(self, column: int, lanes: slice | Array, block: Array, what: str) -> None:
        """Store (columns, lanes) words."""
        self.require_columns(column, len(block), what)
        columns = slice(column, column + len(block))
        self.words[columns, lanes] = block
        if self.written is not None:
            self.written[columns, lanes] = True

    def _unwritten(
        self, readable: Array, column: int, lanes: slice | Array, what: str
    ) -> UnwrittenRead:
        behind, place = (
            int(index) for index in np.unravel_index(readable.argmin(), readable.shape)
        )
        lane = int(np.arange(TMEM_LANES)[lanes][place])
        return UnwrittenRead(
            f"{what} reads lane {lane}, column {column + behind} of {self.name}, which nothing "
            "wrote."
        )


# -- registers of tcgen05.ld and tcgen05.st ----------------------------------------------------


# For each shape: columns, lanes and registers of .x1. 16x* shapes repeat along the columns.
_SHAPES = {
    "32x32b": (1, 32, 1),
    "16x64b": (2, 16, 1),
    "16x128b": (4, 16, 2),
    "16x256b": (8, 16, 4),
    "16x32bx2": (1, 16, 1),
}
SHAPES = tuple(_SHAPES)
_MAX_REGISTERS = 128


@dataclass(frozen=True)
class RegisterAccess:
    """What a tcgen05.ld or tcgen05.st moves.

    packs       whether a register has the lower halves of two words, of adjacent columns
    half_split  columns from the first half of 16x32bx2, of threads 0 to 15, to the second
    """

    shape: str
    repeat: int
    packs: bool = False
    half_split: int = 0

    @property
    def columns(self) -> int:
        """Columns in a row; 16x32bx2 has two such ranges."""
        return _SHAPES[self.shape][0] * self.repeat * (2 if self.packs else 1)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where ranges of columns start, from the address on."""
        return (0, self.half_split) if self.shape == "16x32bx2" else (0,)


def registers_of(shape: str, repeat: int) -> int:
    """Registers a lane of tcgen05.ld and tcgen05.st."""
    return _SHAPES[shape][2] * repeat


def largest_repeat(shape: str) -> int:
    return _MAX_REGISTERS // _SHAPES[shape][2]


def warp_lanes(address: int, warp: int, shape: str, what: str) -> slice:
    """Lanes of tensor memory that a warp reaches with an address.

    An address may name the first lane of the warp's quarter or lane 0, and its half for the shapes
    of 16 lanes.
    """
    _, lanes, _ = _SHAPES[shape]
    lane = address >> LANE_SHIFT
    start = QUARTER * (warp % 4)
    quarter, half = lane - lane % QUARTER, lane % QUARTER
    if quarter not in (0, start) or half not in range(0, QUARTER, lanes):
        raise Misaligned(
            f"{what} by warp {warp} names lane {lane}; the warp reaches lanes {start} to "
            f"{start + QUARTER}."
        )
    return slice(start + half, start + half + lanes)


def load_registers(
    memory: TensorMemory, address: int, warp: int, access: RegisterAccess, what: str
) -> Array:
    """(registers, 32 lanes) uint32 of tcgen05.ld."""
    lanes = warp_lanes(address, warp, access.shape, what)
    blocks = []
    for start in access.starts:
        column = (address & COLUMN_MASK) + start
        block = memory.read(column, access.columns, lanes, what)
        if access.packs:
            halves = block.reshape(-1, 2, block.shape[1]) & np.uint32(0xFFFF)
            block = halves[:, 0] | halves[:, 1] << np.uint32(16)
        blocks.append(block)
    if len(blocks) == 2:
        return np.concatenate(blocks, axis=1)
    if access.shape == "32x32b":
        return blocks[0] if access.packs else blocks[0].copy()
    columns, rows = _fragment(access.shape, access.repeat)
    return np.ascontiguousarray(blocks[0][columns, rows])


def store_registers(
    memory: TensorMemory,
    address: int,
    warp: int,
    access: RegisterAccess,
    registers: Array,
    what: str,
) -> None:
    """Write (registers, 32 lanes) uint32 as tcgen05.st does.

    The upper halves of the words that unpacked halves go to are poison.
    """
    lanes = warp_lanes(address, warp, access.shape, what)
    if access.shape == "16x32bx2":
        blocks = [registers[:, : LANES // 2], registers[:, LANES // 2 :]]
    elif access.shape == "32x32b":
        blocks = [registers]
    else:
        blocks = [_from_registers(registers, access)]
    for start, block in zip(access.starts, blocks, strict=True):
        if access.packs:
            halves = np.stack((block & np.uint32(0xFFFF), block >> np.uint32(16)), axis=1)
            block = halves.reshape(-1, block.shape[1]) | np.uint32(_POISON & ~0xFFFF)
        memory.write((address & COLUMN_MASK) + start, lanes, block, what)


def _from_registers(registers: Array, access: RegisterAccess) -> Array:
    columns, lanes, _ = _SHAPES[access.shape]
    column, row = _fragment(access.shape, access.repeat)
    block = np.empty((columns * access.repeat, lanes), np.uint32)
    block[column, row] = registers
    return block


def _fragment(shape: str, repeat: int) -> tuple[Array, Array]:
    """Column and lane (of 16) of each register and thread.

    16x64b   thread t: column t div 2 mod 2 of lane t div 4 + 8 (t mod 2)
    16x128b  thread t: column t mod 4 of lanes t div 4 and t div 4 + 8
    16x256b  thread t: columns 2 (t mod 4) and the next, of lanes t div 4 and t div 4 + 8
    """
    register, thread = np.ogrid[: registers_of(shape, repeat), :LANES]
    if shape == "16x128b":
        column = 4 * (register // 2) + thread % 4
        row = thread // 4 + 8 * (register % 2)
    elif shape == "16x256b":
        column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
        row = thread // 4 + 8 * (register // 2 % 2)
    else:
        assert shape == "16x64b"
        column = 2 * register + thread // 2 % 2
        row = thread // 4 + 8 * (thread % 2)
    zeros = np.zeros((len(register), LANES), np.int64)
    return column + zeros, row + zeros

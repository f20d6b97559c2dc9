"""TMA: the packed tensor map, and tiles copied through it between global and shared memory.

CuTe's tiled copies do not ask the driver to encode a tensor map. Their host code packs the 128
bytes itself, in hardware's layout, and writes the first 64 only. As 64-bit little-endian words:

    word  bits   meaning
    0     0-63   global address
    1     0-3    2
    1     4-6    rank - 1
    1     7-10   element type, see `ElementType`
    1     13-14  swizzle: none 0, 32 bytes 1, 64 bytes 2, 128 bytes 3
    1     16     whether loads of f32 round to tf32, to nearest even
    1     18,21  L2 promotion and a hint; without effect on results
    1     19     whether the swizzle's atoms have 32 bytes instead of 16
    1     32-63  stride of dimension 1, in units of 16 bytes
    2     0-31, 32-63  strides of dimensions 2 and 3
    3     0-31   stride of dimension 4
    3     32-47  bits 32-35 of the four strides, 4 each (dimension 4's inferred)
    4-6   32 each  sizes of dimensions 0 to 4, minus 1
    6     56-63  box size of dimension 0, minus 1
    7     8 each box sizes of dimensions 1 to 4, minus 1

Dimension 0 is contiguous; of 4-bit elements its sizes and coordinates count each. Addresses are
sums modulo 2**64: a "ragged" map has a stride so long that it leads around and back, so only the
touched elements of a box are checked, never the map's extent.
The layout was found by changing one property of a map at a time, and confirmed by what kernels
computed through it. Interleaving, element strides and NaN fill were not located; any bit that is
not in this table is refused.
"""

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.arithmetic import tf32_from_f32
from fa4.emulator.errors import (
    InvalidDescriptor,
    Misaligned,
    OutOfBounds,
    UnknownInstruction,
    UnwrittenRead,
)
from fa4.emulator.float_formats import bf16_to_f32, f32_to_bf16
from fa4.emulator.memory import Allocation, Bytes, GlobalMemory, SharedMemory, unwritten
from fa4.emulator.swizzle import CHUNK, PERIOD, swizzled_range

MAP_BYTES = 128
PACKED_BYTES = 64  # the rest is not written by whoever packs a map
MAP_ALIGNMENT = 64
SHARED_TILE_ALIGNMENT = 128
MAX_RANK = 5
GATHERED_ROWS = 4  # of tile::gather4
_WORDS = struct.Struct("<8Q")
_FORMAT = 2  # in the lowest bits of word 1
# Bits of the table above; the others were never seen set.
_KNOWN_BITS = {
    1: 0xFFFFFFFF_002D_67FF,
    3: 0x0000FFFF_FFFFFFFF,
    6: 0xFF000000_FFFFFFFF,
    7: 0xFFFFFFFF,
}


class ElementType(IntEnum):
    U8 = 0
    U16 = 1
    U32 = 2
    U64 = 4
    F16 = 6
    F32 = 7
    F64 = 9
    BF16 = 10
    U4 = 11

    @property
    def nbytes(self) -> int:
        """Of an element; of a pair of U4."""
        return _ELEMENT_BYTES[self]

    @property
    def in_unit(self) -> int:
        """Elements that have `nbytes`."""
        return 2 if self is ElementType.U4 else 1


_ELEMENT_BYTES = {
    ElementType.U8: 1,
    ElementType.U16: 2,
    ElementType.U32: 4,
    ElementType.U64: 8,
    ElementType.F16: 2,
    ElementType.F32: 4,
    ElementType.F64: 8,
    ElementType.BF16: 2,
    ElementType.U4: 1,
}
_SWIZZLE_WIDTH = (0, 32, 64, 128)
_WIDE_ATOM = 32


class Reduction(Enum):
    """What `cp.reduce.async.bulk` does with an element of a tile and the one in memory."""

    ADD = "add"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; dimension 0 is contiguous.

    address         of element (0, ..., 0)
    sizes           elements a dimension (bytes of U4 in dimension 0); coordinates outside read as
                    zero and are not stored
    strides         bytes a dimension
    box             of a tile, as sizes
    swizzle         bytes of a row in which chunks are permuted; 0 is none
    atom            bytes that the swizzle keeps together
    rounds_to_tf32  what is loaded
    """

    address: int
    element: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    atom: int = CHUNK
    rounds_to_tf32: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a tile along dimension 0."""
        return self.box[0] * self.element.nbytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a whole tile: what its mbarrier is told, clipped or not."""
        return self.element.nbytes * int(np.prod(self.box))


def decode(packed: bytes) -> TensorMap:
    """Decode the first `PACKED_BYTES` of a tensor map."""
    return _decode(bytes(packed[:PACKED_BYTES]))


@lru_cache(maxsize=256)
def _decode(packed: bytes) -> TensorMap:
    if len(packed) < PACKED_BYTES:
        raise InvalidDescriptor(f"A tensor map has {MAP_BYTES} bytes, got {len(packed)}.")
    words = _WORDS.unpack(packed)
    if words[1] & 0xF != _FORMAT:
        raise InvalidDescriptor(f"These bytes are no tensor map: {packed.hex(' ', 8)}.")
    rank = (words[1] >> 4 & 0x7) + 1
    if rank > MAX_RANK:
        raise InvalidDescriptor(f"A tensor map has rank {rank}; allowed are 1 to {MAX_RANK}.")
    code = words[1] >> 7 & 0xF
    if code not in ElementType.__members__.values():
        raise UnknownInstruction(f"Element type {code} of a tensor map is not known.")
    element = ElementType(code)
    for index, known in _KNOWN_BITS.items():
        if words[index] & ~known:
            raise UnknownInstruction(
                f"Bits {words[index] & ~known:#x} of word {index} of a tensor map are not modelled."
            )
    halves = struct.unpack("<16I", packed)
    upper = [halves[7] >> 4 * dim & 0xF for dim in range(4)]
    units = [low | high << 32 for low, high in zip(halves[3:7], upper, strict=True)]
    strides = (element.nbytes, *(16 * unit for unit in units))
    sizes = tuple(size + 1 for size in halves[8:13])
    box = (packed[55] + 1, *(packed[56 + i] + 1 for i in range(4)))
    if sizes[0] % element.in_unit or box[0] % element.in_unit:
        raise InvalidDescriptor(
            f"A tensor map has {sizes[0]} elements of {element.name}, {box[0]} in a tile; both "
            f"must be multiples of {element.in_unit}."
        )
    sizes = (sizes[0] // element.in_unit, *sizes[1:])
    box = (box[0] // element.in_unit, *box[1:])
    rounds_to_tf32 = bool(words[1] >> 16 & 1)
    if rounds_to_tf32 and element != ElementType.F32:
        raise UnknownInstruction(f"A tensor map of {element.name} that rounds is not modelled.")
    tensor_map = TensorMap(
        address=words[0],
        element=element,
        sizes=sizes[:rank],
        strides=strides[:rank],
        box=box[:rank],
        swizzle=_SWIZZLE_WIDTH[words[1] >> 13 & 0x3],
        atom=_WIDE_ATOM if words[1] >> 19 & 1 else CHUNK,
        rounds_to_tf32=rounds_to_tf32,
    )
    _validate(tensor_map)
    return tensor_map


def _validate(tensor_map: TensorMap) -> None:
    if tensor_map.address % 16:
        raise InvalidDescriptor(
            f"The address {tensor_map.address:#x} of a tensor map must be aligned to 16 bytes."
        )
    if tensor_map.row_bytes % 16:
        raise InvalidDescriptor(
            f"A tile row has {tensor_map.row_bytes} bytes; it must be a multiple of 16."
        )
    if tensor_map.swizzle and tensor_map.row_bytes > tensor_map.swizzle:
        raise InvalidDescriptor(
            f"A tile row has {tensor_map.row_bytes} bytes, more than the {tensor_map.swizzle} "
            "of its swizzle."
        )
    if tensor_map.atom != CHUNK and tensor_map.swizzle != _SWIZZLE_WIDTH[-1]:
        raise UnknownInstruction(
            f"A swizzle of {tensor_map.swizzle} bytes with atoms of {tensor_map.atom} is not "
            "modelled."
        )
    if tensor_map.swizzle and tensor_map.row_bytes < tensor_map.swizzle:
        raise UnknownInstruction(
            f"Tile rows of {tensor_map.row_bytes} bytes under a swizzle of {tensor_map.swizzle} "
            "bytes are not modelled."
        )


def encode(tensor_map: TensorMap) -> bytes:
    """Pack a tensor map; the opposite of `decode`."""
    rank = tensor_map.rank
    swizzle = _SWIZZLE_WIDTH.index(tensor_map.swizzle)
    head = _FORMAT | rank - 1 << 4 | tensor_map.element << 7 | swizzle << 13
    head |= tensor_map.rounds_to_tf32 << 16 | (tensor_map.atom == _WIDE_ATOM) << 19
    missing = (0,) * (MAX_RANK - rank)
    units = [stride // 16 for stride in tensor_map.strides[1:]] + list(missing)
    in_unit = tensor_map.element.in_unit
    sizes = [tensor_map.sizes[0] * in_unit - 1, *(size - 1 for size in tensor_map.sizes[1:])]
    box = [tensor_map.box[0] * in_unit - 1, *(size - 1 for size in tensor_map.box[1:])]
    sizes, box = sizes + list(missing), box + list(missing)
    low = [unit & 0xFFFFFFFF for unit in units[:4]]
    upper = sum((unit >> 32) << 4 * dim for dim, unit in enumerate(units[:4]))
    fields = struct.pack("<QI4II5I", tensor_map.address, head, *low, upper, *sizes)
    packed = fields + bytes([0, 0, 0, box[0], *box[1:5], 0, 0, 0, 0])
    return packed + bytes(MAP_BYTES - len(packed))


@dataclass(frozen=True)
class _ClippedTile:
    """The part of a tile inside its tensor, as a strided block of one allocation.

    inside  where it lies in the tile: one slice a dimension, the last dimension first, bytes in
            dimension 0
    start   of its first byte in the allocation
    """

    allocation: Allocation
    inside: tuple[slice, ...]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self) -> Bytes:
        """The bytes in memory, shaped like the part of the tile."""
        return np.ndarray(
            self.shape, np.uint8, self.allocation.bytes.data, self.start, self.strides
        )

    def written_view(self) -> NDArray[np.bool_] | None:
        written = self.allocation.written
        if written is None:
            return None
        return np.ndarray(self.shape, np.bool_, written.data, self.start, self.strides)


def _clip(
    tensor_map: TensorMap, memory: GlobalMemory, coordinates: tuple[int, ...], what: str
) -> _ClippedTile | None:
    """The part of a tile inside its tensor; None if there is none."""
    if len(coordinates) != tensor_map.rank:
        raise InvalidDescriptor(
            f"{what} names {len(coordinates)} coordinates; its tensor map has rank "
            f"{tensor_map.rank}."
        )
    nbytes, in_unit = tensor_map.element.nbytes, tensor_map.element.in_unit
    if coordinates[0] % in_unit:
        raise Misaligned(
            f"{what} starts at element {coordinates[0]} of {tensor_map.element.name}, in a byte."
        )
    coordinates = (coordinates[0] // in_unit, *coordinates[1:])
    address = tensor_map.address
    last = 0  # offset of the last touched element's row from the first touched
    inside, shape, strides = [], [], []
    for dim in range(tensor_map.rank):
        coordinate, stride = coordinates[dim], tensor_map.strides[dim]
        low = max(0, -coordinate)
        high = min(tensor_map.box[dim], tensor_map.sizes[dim] - coordinate)
        if low >= high:
            return None
        address += (coordinate + low) * stride
        if dim == 0:
            inside.append(slice(low * nbytes, high * nbytes))
            shape.append((high - low) * nbytes)
            strides.append(1)
        else:
            inside.append(slice(low, high))
            shape.append(high - low)
            # The stride of a single step is never taken, and may be one that leads around 2**64.
            strides.append(stride if high - low > 1 else 0)
            last += (high - low - 1) * strides[-1]
    address %= 1 << 64
    end = address + last + shape[0]
    allocation = memory.find(address, end)
    if allocation is None:
        error = memory.outside(address, end, what)
        error.message += f" Coordinates {coordinates} in {tensor_map}."
        raise error
    return _ClippedTile(
        allocation,
        tuple(reversed(inside)),
        address - allocation.address,
        tuple(reversed(shape)),
        tuple(reversed(strides)),
    )


def gather_tile(tensor_map: TensorMap, memory: GlobalMemory, coordinates: tuple[int, ...]) -> Bytes:
    """Read a tile, zeros where it lies outside its tensor: flat bytes, dimension 0 fastest."""
    what = "A TMA load"
    part = _clip(tensor_map, memory, coordinates, what)
    if part is None:
        return np.zeros(tensor_map.tile_bytes, np.uint8)
    written = part.written_view()
    if written is not None and not written.all():
        raise _unwritten(part, written, what)
    shape = (*reversed(tensor_map.box[1:]), tensor_map.row_bytes)
    if part.shape == shape:
        tile = np.empty(shape, np.uint8)
    else:
        tile = np.zeros(shape, np.uint8)
    tile[part.inside] = part.view()
    if tensor_map.rounds_to_tf32:
        values = tile.reshape(-1).view(np.float32)
        return tf32_from_f32(values, "rn").view(np.uint8)
    return tile.reshape(-1)


def are_of_rows(tensor_map: TensorMap, coordinates: Sequence[Any]) -> bool:
    """Whether coordinates are those of tile::gather4: a column, and four rows."""
    return tensor_map.rank == 2 and len(coordinates) == 1 + GATHERED_ROWS


def of_gathered_rows(tensor_map: TensorMap) -> TensorMap:
    """A map of one row a tile as what tile::gather4 loads with it: rows from anywhere, together."""
    if tensor_map.rank != 2 or tensor_map.box[1] != 1:
        raise InvalidDescriptor(
            f"tile::gather4 needs a tensor map of two dimensions and one row a tile, not with "
            f"tiles of {tensor_map.box}."
        )
    return dataclasses.replace(tensor_map, box=(tensor_map.box[0], GATHERED_ROWS))


def gather_rows(tensor_map: TensorMap, memory: GlobalMemory, coordinates: tuple[int, ...]) -> Bytes:
    """The tile of a map of `of_gathered_rows`; coordinates are the column and each row."""
    column, *rows = coordinates
    one = dataclasses.replace(tensor_map, box=(tensor_map.box[0], 1))
    return np.concatenate([gather_tile(one, memory, (column, row)) for row in rows])


def _unwritten(part: _ClippedTile, written: NDArray[np.bool_], what: str) -> UnwrittenRead:
    where = np.argwhere(~written)[0]
    return unwritten(part.allocation, part.start + int(np.dot(where, part.strides)), what)


def put_tile(tensor_map: TensorMap, shared: SharedMemory, offset: int, tile: Bytes) -> None:
    """Write a tile of `gather_tile` to shared memory, swizzled."""
    what = "A TMA load"
    positions = _shared_positions(tensor_map, shared, offset, what)
    shared.chunks[positions] = tile.view(np.complex128)
    shared.mark_written(offset, tile.size)


def load_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    offset: int,
    coordinates: tuple[int, ...],
) -> int:
    """Copy a tile from global to shared memory. Returns the bytes its mbarrier is told of: those
    of the whole tile, zero fill included."""
    gather = gather_rows if are_of_rows(tensor_map, coordinates) else gather_tile
    put_tile(tensor_map, shared, offset, gather(tensor_map, memory, coordinates))
    return tensor_map.tile_bytes


def store_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    offset: int,
    coordinates: tuple[int, ...],
    reduction: Reduction | None = None,
) -> None:
    """Copy a tile from shared to global memory, or fold it into what is there; elements outside
    the tensor are dropped."""
    what = "A TMA store" if reduction is None else "A TMA reduction"
    positions = _shared_positions(tensor_map, shared, offset, what)
    part = _clip(tensor_map, memory, coordinates, what)
    if part is None:
        return
    if not part.allocation.writable:
        raise OutOfBounds(f"{what} writes to {part.allocation}, which is read-only.")
    _require_tile_written(tensor_map, shared, offset, part, what)
    shape = (*reversed(tensor_map.box[1:]), tensor_map.row_bytes)
    tile = shared.chunks[positions].view(np.uint8).reshape(shape)[part.inside]
    written = part.written_view()
    target = part.view()
    if reduction is None:
        target[...] = tile
    else:
        if written is not None and not written.all():
            raise _unwritten(part, written, what)
        target[...] = _reduced(tensor_map.element, reduction, target, tile)
    if written is not None:
        written[...] = True


def _shared_positions(tensor_map: TensorMap, shared: SharedMemory, offset: int, what: str) -> Any:
    """Where the tile's chunks lie among the chunks of shared memory."""
    if offset % SHARED_TILE_ALIGNMENT:
        raise Misaligned(
            f"{what} has its tile at shared offset {offset}; it must be aligned to "
            f"{SHARED_TILE_ALIGNMENT} bytes."
        )
    shared.require_range(offset, tensor_map.tile_bytes, what)
    start, num_chunks = offset // CHUNK, tensor_map.tile_bytes // CHUNK
    if not tensor_map.swizzle:
        return slice(start, start + num_chunks)
    in_period = start % (PERIOD // CHUNK)
    positions = swizzled_range(in_period, num_chunks, tensor_map.swizzle, tensor_map.atom)
    return positions + (start - in_period)


def _require_tile_written(
    tensor_map: TensorMap, shared: SharedMemory, offset: int, part: _ClippedTile, what: str
) -> None:
    """The whole tile must have been written, except rows that are clipped away."""
    written = shared.written
    if written is None or written[offset : offset + tensor_map.tile_bytes].all():
        return
    positions = _shared_positions(tensor_map, shared, offset, what)
    shape = (*reversed(tensor_map.box[1:]), tensor_map.row_bytes)
    chunks = written.view(np.complex128)[positions].view(np.bool_).reshape(shape)
    if not chunks[part.inside].all():
        shared.require_written(offset, tensor_map.tile_bytes, what)


def _reduced(element: ElementType, reduction: Reduction, old: Bytes, new: Bytes) -> Bytes:
    """Fold ``new`` into ``old``, both (..., bytes), elementwise; rounded to nearest even."""
    function = {Reduction.ADD: np.add, Reduction.MIN: np.minimum, Reduction.MAX: np.maximum}
    plain: dict[ElementType, Any] = {
        ElementType.U32: np.uint32,
        ElementType.U64: np.uint64,
        ElementType.F16: np.float16,
        ElementType.F32: np.float32,
        ElementType.F64: np.float64,
    }
    left, right = np.ascontiguousarray(old), np.ascontiguousarray(new)
    with np.errstate(all="ignore"):
        if element == ElementType.BF16:
            operands = [bf16_to_f32(x.view(np.uint16)) for x in (left, right)]
            return f32_to_bf16(function[reduction](*operands)).view(np.uint8)
        # The type does not say whether integers are signed, which matters to all but sums.
        is_integer = element in (ElementType.U32, ElementType.U64)
        if element not in plain or (is_integer and reduction != Reduction.ADD):
            raise UnknownInstruction(f"TMA {reduction.value} of {element.name} is not modelled.")
        dtype = plain[element]
        return function[reduction](left.view(dtype), right.view(dtype)).view(np.uint8)

"""The memory that a kernel sees: global allocations, shared memory of a cluster, parameters.

Addresses
  global    as the host knows them; only registered ranges can be touched
  shared    CTA rank in the cluster << 24 | offset. CUTLASS clears bit 24 to reach the leader of a
            pair of CTAs, and `mapa` replaces the rank, so hardware's layout is kept
  param     offset in the parameter buffer
  generic   a global address as it is; the other spaces are tagged above bit 55, where no host
            pointer has a bit

Lanes of a warp access memory together: addresses are (lanes,) integers, a mask says which lanes
take part, data is (lanes, bytes) uint8. Each access must be aligned to its size and lie inside one
allocation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.errors import EmulationError, Misaligned, OutOfBounds, UnwrittenRead

Bytes = NDArray[np.uint8]

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
TAG_SHIFT = 56
UNTAGGED_MASK = (1 << TAG_SHIFT) - 1
SHARED_ALIGNMENT = 1024  # of shared memory's start, which swizzles count from


class Space(IntEnum):
    """State spaces; the value is the tag of the space in a generic address."""

    GLOBAL = 0
    SHARED = 1
    PARAM = 2


@dataclass(eq=False)
class Allocation:
    """Bytes that a kernel may touch.

    name      for messages
    address   of the first byte in its space
    bytes     (size,) uint8; a view of the owner's memory, so that stores are seen there
    writable  whether stores are allowed
    written   (size,) bool, true where a load may read; None if everything may be read
    """

    name: str
    address: int
    bytes: Bytes
    writable: bool = True
    written: NDArray[np.bool_] | None = None

    @property
    def end(self) -> int:
        return self.address + self.bytes.size

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes.size} bytes at {self.address:#x})"


def unwritten(
    allocation: Allocation, byte: int, what: str, lane: int | None = None
) -> UnwrittenRead:
    """The error of reading a byte that nothing wrote."""
    return UnwrittenRead(f"{what} reads byte {byte} of {allocation}, which nothing wrote.", lane)


def require_written(allocation: Allocation, start: int, size: int, what: str) -> None:
    """Raise `UnwrittenRead` unless bytes [start, start + size) of an allocation were written."""
    written = allocation.written
    if written is None or written[start : start + size].all():
        return
    raise unwritten(allocation, start + int(np.argmin(written[start : start + size])), what)


class GlobalMemory:
    """The allocations of a launch, found by address.

    Ranges may overlap, as those of views of one tensor do; the first that was registered and
    covers an access whole is used. Overlapping ranges must show the same memory.
    """

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._last: Allocation | None = None

    @property
    def allocations(self) -> Sequence[Allocation]:
        return self._allocations

    def register(
        self,
        name: str,
        address: int,
        data: Bytes,
        *,
        writable: bool = True,
        initialised: bool = True,
    ) -> Allocation:
        """Let kernels touch ``data``, a flat uint8 view of memory that they address from
        ``address`` on. Loads from an uninitialised allocation are checked against its stores."""
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(
                f"data of {name} must be a flat uint8 array, got {data.dtype} of shape "
                f"{data.shape}."
            )
        if not 0 <= address <= (1 << TAG_SHIFT) - data.size:
            raise ValueError(f"address {address:#x} of {name} is not below 2**{TAG_SHIFT}.")
        written = None if initialised else np.zeros(data.size, np.bool_)
        allocation = Allocation(name, address, data, writable, written)
        self._allocations.append(allocation)
        return allocation

    def find(self, first: int, end: int) -> Allocation | None:
        """The allocation that covers [first, end) whole."""
        last = self._last
        if last is not None and last.address <= first and end <= last.end:
            return last
        for allocation in self._allocations:
            if allocation.address <= first and end <= allocation.end:
                self._last = allocation
                return allocation
        return None

    def outside(self, first: int, end: int, what: str, lane: int | None = None) -> OutOfBounds:
        """The error of an access to [first, end) that no allocation covers."""
        message = f"{what} touches [{first:#x}, {end:#x}), which is no allocation's."
        if self._allocations:
            nearest = min(self._allocations, key=lambda a: max(a.address - first, end - a.end))
            message += f" The nearest is {nearest}; the access starts at byte "
            message += f"{first - nearest.address} of it."
        return OutOfBounds(message, lane)


@dataclass(eq=False)
class SharedMemory:
    """Shared memory of one CTA.

    rank        of the CTA in its cluster
    allocation  its bytes, from offset 0; `Allocation.address` is the shared address of offset 0
    chunks      (size / 16,) the same bytes as 16-byte units, for copies; the type has no meaning
    """

    rank: int
    allocation: Allocation
    chunks: NDArray[np.complex128] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = self.bytes.view(np.complex128)

    @classmethod
    def create(cls, size: int, rank: int = 0, check_unwritten: bool = True) -> "SharedMemory":
        """Memory of at least ``size`` bytes; those of the last 16-byte unit exist too."""
        size = -(-size // 16) * 16
        data = np.zeros(size // 16, np.complex128).view(np.uint8)
        # Not zero: kernels must not get away with reading what they never wrote.
        data[:] = 0xFF
        written = np.zeros(size, np.bool_) if check_unwritten else None
        return cls(
            rank,
            Allocation(
                f"shared memory of CTA rank {rank}", rank << RANK_SHIFT, data, True, written
            ),
        )

    @property
    def bytes(self) -> Bytes:
        return self.allocation.bytes

    @property
    def written(self) -> NDArray[np.bool_] | None:
        return self.allocation.written

    @property
    def size(self) -> int:
        return self.allocation.bytes.size

    def require_range(self, offset: int, size: int, what: str) -> None:
        """Raise `OutOfBounds` unless bytes [offset, offset + size) exist."""
        if offset < 0 or offset + size > self.size:
            raise OutOfBounds(
                f"{what} touches bytes {offset} to {offset + size} of {self.allocation}."
            )

    def require_written(self, offset: int, size: int, what: str) -> None:
        require_written(self.allocation, offset, size, what)

    def mark_written(self, offset: int, size: int) -> None:
        if self.allocation.written is not None:
            self.allocation.written[offset : offset + size] = True


class AddressSpace:
    """Everything that one CTA of a cluster can address.

    global_memory  of the launch
    cluster        shared memory of every CTA of the cluster, by rank
    parameters     the launch's parameter buffer, in param space from offset 0
    """

    def __init__(
        self,
        global_memory: GlobalMemory,
        cluster: Sequence[SharedMemory] = (),
        parameters: bytes = b"",
    ):
        self.global_memory = global_memory
        self.cluster = cluster
        buffer = np.frombuffer(parameters, np.uint8)
        self.parameters = Allocation("kernel parameters", 0, buffer, writable=False)

    def load(
        self,
        space: Space | None,
        addresses: NDArray[np.integer],
        nbytes: int,
        mask: NDArray[np.bool_] | None = None,
    ) -> Bytes:
        """Load ``nbytes`` (a power of two) a lane; (lanes, nbytes), 0 in lanes outside the mask.

        space  None for generic addresses
        """
        what = f"A load of {nbytes} bytes"
        result = np.zeros((len(addresses), nbytes), np.uint8)
        for allocation, lanes, offsets in self._resolve(space, addresses, nbytes, mask, what):
            index = offsets[:, None] + np.arange(nbytes)
            if allocation.written is not None:
                readable = allocation.written[index]
                if not readable.all():
                    lane, byte = np.unravel_index(np.argmin(readable), readable.shape)
                    raise unwritten(allocation, int(index[lane, byte]), what, int(lanes[lane]))
            result[lanes] = allocation.bytes[index]
        return result

    def store(
        self,
        space: Space | None,
        addresses: NDArray[np.integer],
        data: Bytes,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Store data (lanes, nbytes). Of lanes with one address the last wins; hardware leaves
        open which."""
        nbytes = data.shape[1]
        what = f"A store of {nbytes} bytes"
        for allocation, lanes, offsets in self._resolve(space, addresses, nbytes, mask, what):
            if not allocation.writable:
                raise OutOfBounds(
                    f"{what} writes to {allocation}, which is read-only.", int(lanes[0])
                )
            index = offsets[:, None] + np.arange(nbytes)
            allocation.bytes[index] = data[lanes]
            if allocation.written is not None:
                allocation.written[index] = True

    def read(self, space: Space | None, address: int, nbytes: int, alignment: int = 1) -> bytes:
        """``nbytes`` from one address, for operands such as tensor maps."""
        space, untagged = self._space_of(space, address)
        what = f"A read of {nbytes} bytes"
        if untagged % alignment:
            raise Misaligned(f"{what} at {untagged:#x} must be aligned to {alignment} bytes.")
        allocation = self._covering(space, untagged, untagged + nbytes)
        if allocation is None:
            raise self._outside(space, untagged, untagged + nbytes, what, None)
        start = untagged - allocation.address
        require_written(allocation, start, nbytes, what)
        return allocation.bytes[start : start + nbytes].tobytes()

    def shared_at(self, address: int, what: str = "An access") -> tuple[SharedMemory, int]:
        """Shared memory and the offset in it of a shared address (or generic, in its window)."""
        if address >> TAG_SHIFT == Space.SHARED:
            address &= UNTAGGED_MASK
        rank = address >> RANK_SHIFT
        if not 0 <= rank < len(self.cluster):
            raise OutOfBounds(
                f"{what} names CTA rank {rank} in shared address {address:#x}; the cluster has "
                f"{len(self.cluster)} CTAs."
            )
        return self.cluster[rank], address & OFFSET_MASK

    def _space_of(self, space: Space | None, address: int) -> tuple[Space, int]:
        if space is not None:
            return space, address
        tag = address >> TAG_SHIFT
        if tag not in Space.__members__.values():
            raise OutOfBounds(f"Generic address {address:#x} is in no window.")
        return Space(tag), address & UNTAGGED_MASK

    def _covering(self, space: Space, first: int, end: int) -> Allocation | None:
        if space == Space.GLOBAL:
            return self.global_memory.find(first, end)
        if space == Space.PARAM:
            return self.parameters if first >= 0 and end <= self.parameters.end else None
        rank = first >> RANK_SHIFT
        if not 0 <= rank < len(self.cluster):
            return None
        allocation = self.cluster[rank].allocation
        return allocation if end <= allocation.end else None

    def _outside(
        self, space: Space, first: int, end: int, what: str, lane: int | None
    ) -> EmulationError:
        if space == Space.GLOBAL:
            return self.global_memory.outside(first, end, what, lane)
        known = [self.parameters] if space == Space.PARAM else [c.allocation for c in self.cluster]
        sizes = ", ".join(map(str, known)) or "none"
        return OutOfBounds(
            f"{what} touches [{first:#x}, {end:#x}) of {space.name.lower()} space, which has: "
            f"{sizes}.",
            lane,
        )

    def _resolve(
        self,
        space: Space | None,
        addresses: NDArray[np.integer],
        nbytes: int,
        mask: NDArray[np.bool_] | None,
        what: str,
    ) -> list[tuple[Allocation, NDArray[np.intp], NDArray[np.int64]]]:
        """Split an access by allocation: (allocation, lanes, offsets of those lanes)."""
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        remaining = addresses[lanes].astype(np.uint64)
        parts = []
        while lanes.size:
            first_space, first = self._space_of(space, int(remaining[0]))
            allocation = self._covering(first_space, first, first + nbytes)
            if allocation is None:
                raise self._outside(first_space, first, first + nbytes, what, int(lanes[0]))
            tag = 0 if space is not None else first_space << TAG_SHIFT
            # Addresses below the allocation wrap around to huge offsets.
            offsets = remaining - np.uint64(tag + allocation.address)
            inside = offsets <= np.uint64(allocation.bytes.size - nbytes)
            misaligned = inside & (remaining & np.uint64(nbytes - 1) != 0)
            if misaligned.any():
                lane = int(np.argmax(misaligned))
                raise Misaligned(
                    f"{what} at {int(remaining[lane]):#x} ({allocation}) must be aligned to "
                    f"{nbytes} bytes.",
                    int(lanes[lane]),
                )
            if inside.all():
                parts.append((allocation, lanes, offsets.view(np.int64)))
                break
            parts.append((allocation, lanes[inside], offsets[inside].view(np.int64)))
            lanes, remaining = lanes[~inside], remaining[~inside]
        return parts


def generic_address(space: Space, address: int) -> int:
    """Generic form of an address (`cvta`)."""
    return address | space << TAG_SHIFT


def address_in(space: Space, generic: int) -> int:
    """An address in its space from its generic form (`cvta.to`)."""
    if generic >> TAG_SHIFT != space:
        raise OutOfBounds(
            f"Generic address {generic:#x} is not in the window of {space.name.lower()} space."
        )
    return generic & UNTAGGED_MASK


def shared_address(rank: int, offset: int) -> int:
    return rank << RANK_SHIFT | offset

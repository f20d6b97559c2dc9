"""What an emulated kernel can do wrong, one exception type a kind.

The modules that find a fault (memory, barriers, copies, tensor cores) know the access but not the
instruction. They raise without a location, and the executor adds it with `EmulationError.locate`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """Where in a launch an instruction ran.

    line   of the PTX text, from 1
    text   the instruction as it is written there
    cta    (x, y, z) in the grid
    warp   in the CTA
    lane   in the warp; None for a whole warp
    """

    line: int
    text: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None

    def __str__(self) -> str:
        place = [f"PTX line {self.line}"]
        if self.text:
            place[0] += f" ({' '.join(self.text.split())})"
        if self.cta is not None:
            place.append(f"CTA {self.cta}")
        if self.warp is not None:
            place.append(f"warp {self.warp}")
        if self.lane is not None:
            place.append(f"lane {self.lane}")
        return ", ".join(place)


class EmulationError(Exception):
    """A kernel did what hardware would punish, hide or not define; see the subclasses."""

    def __init__(self, message: str, lane: int | None = None):
        super().__init__(message)
        self.message = message
        self.lane = lane
        self.location: Location | None = None

    def locate(self, location: Location) -> None:
        """Add the instruction; the first caller, who is nearest to it, is believed."""
        if self.location is None:
            lane = self.lane if location.lane is None else location.lane
            self.location = Location(
                location.line, location.text, location.cta, location.warp, lane
            )

    def __str__(self) -> str:
        if self.location is None:
            return self.message
        return f"{self.message}\n  at {self.location}"


class OutOfBounds(EmulationError):
    """An access touches bytes of no allocation, or writes to one that is read-only."""


class Misaligned(EmulationError):
    """An address is not a multiple of what its instruction needs."""


class UnwrittenRead(EmulationError):
    """A read of bytes that nothing wrote."""


class Deadlock(EmulationError):
    """No warp can go on."""


class BarrierMisuse(EmulationError):
    """More arrivals or bytes than a barrier was told to expect, or a barrier that is none."""


class DataRace(EmulationError):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


class MissingProxyFence(EmulationError):
    """The async proxy uses what generic accesses wrote, and no proxy fence is between them."""


class UnfinishedCopy(EmulationError):
    """Shared memory is given up while a copy from or to it may still run."""


class InvalidDescriptor(EmulationError):
    """A tensor map or a matrix descriptor that hardware would refuse."""


class UnknownInstruction(EmulationError):
    """An instruction, modifier or mode that the emulator does not model. Never skipped."""

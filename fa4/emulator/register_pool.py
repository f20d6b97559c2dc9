"""The registers of a CTA, which setmaxnreg moves between its warps.

How many a launch starts with is the assembler's choice. Taken here is the most that it can choose:
what of the register file is the CTA's, divided among its threads and rounded down to a multiple of
8. More than those an increase never gets, however many the other warps give, and waits for ever.
"""

from __future__ import annotations

from fa4.emulator.register_kinds import LANES

REGISTER_FILE = 65_536  # 32-bit registers of a multiprocessor
MOST = 256  # of a thread


class RegisterPool:
    """free: registers that no warp has."""

    def __init__(self, warps: int, ctas_per_sm: int):
        at_launch = REGISTER_FILE // (ctas_per_sm * warps * LANES) // 8 * 8
        self._held = [min(at_launch, MOST)] * warps  # by each thread of a warp
        self.free = 0

    def has(self, warp: int, count: int) -> bool:
        return (count - self._held[warp]) * LANES <= self.free

    def take(self, warp: int, count: int) -> bool:
        """Whether the warp's threads have ``count`` each from now on."""
        if not self.has(warp, count):
            return False
        self._set(warp, count)
        return True

    def give(self, warp: int, count: int) -> None:
        self._set(warp, min(count, self._held[warp]))

    def _set(self, warp: int, count: int) -> None:
        self.free += (self._held[warp] - count) * LANES
        self._held[warp] = count

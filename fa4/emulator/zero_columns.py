"""Zero-column mask descriptor of `tcgen05.mma.ws`: columns of B that count as zeros (64 bits).

    0-31   four start counts of 8 bits, one for each of the 128 / M parts of the columns
    32-35  a bit a part: whether its first span is of zeros
    39     whether there is a mask at all
    40-47  columns of a span of zeros, minus 1
    48-55  columns of a span that is used, minus 1
    56-61  column of B that the first one is

In each part spans of used columns and of zeros take turns; the first one lacks as many columns as
the start count says, but keeps one. (PTX ISA 9, "Zero-column mask descriptor"; its examples make
clear which span is which.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.emulator.errors import InvalidDescriptor
from fa4.emulator.mma_descriptor_sm100 import MmaShape

_RESERVED_BITS = 0xC000_0070_0000_0000
_LARGEST_SHIFTS = {32: 16, 64: 32, 128: 32}  # by M


@dataclass(frozen=True)
class ZeroColumns:
    """A decoded descriptor.

    starts  start count and whether the first span is of zeros, of each part
    zeros   columns of a span of zeros; 0 without a mask
    used    columns of a span that is used
    shift   column of B that the first one is
    """

    starts: tuple[tuple[int, bool], ...]
    zeros: int
    used: int
    shift: int

    @classmethod
    def decode(cls, bits: int, shape: MmaShape) -> ZeroColumns:
        shift = bits >> 56 & 0x3F
        largest = min(shape.max_shift, _LARGEST_SHIFTS[shape.m])
        if bits & _RESERVED_BITS or shift > largest:
            raise InvalidDescriptor(
                f"Zero-column mask descriptor {bits:#018x} has a shift of {shift} (at most "
                f"{largest} for this instruction), and reserved bits {bits & _RESERVED_BITS:#x}."
            )
        starts = tuple((bits >> 8 * p & 0xFF, bool(bits >> 32 + p & 1)) for p in range(4))
        zeros = (bits >> 40 & 0xFF) + 1 if bits >> 39 & 1 else 0
        return cls(starts, zeros, (bits >> 48 & 0xFF) + 1, shift)

    def mask(self, m: int, n: int) -> np.ndarray[Any, Any]:
        """(n,) bool, true where zeros are used."""
        parts = 128 // m
        column = np.arange(n // parts)
        if not self.zeros:
            return np.zeros(n, np.bool_)
        period = self.zeros + self.used
        masks = []
        for start, zeros_first in self.starts[:parts]:
            first = self.zeros if zeros_first else self.used
            position = (column + min(start, first - 1)) % period
            masks.append(position < first if zeros_first else position >= first)
        return np.concatenate(masks)

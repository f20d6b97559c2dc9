"""What one kernel launch consists of, as the host code asked for it."""

from __future__ import annotations

from dataclasses import dataclass

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One launch, complete: nothing in it refers to the host code that made it.

    entry         name of the kernel, an ``.entry`` of ptx
    ptx           text of the module that the kernel belongs to
    grid          CTAs, (x, y, z)
    block         threads of a CTA
    cluster       CTAs of a cluster; divides grid
    shared_bytes  dynamic shared memory of a CTA
    params        the kernel's parameters, laid out as ``ld.param`` addresses them: in the order of
                  the declaration, each at its natural alignment. Pointers in it are host addresses
    """

    entry: str
    ptx: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    params: bytes

    @property
    def num_ctas(self) -> int:
        x, y, z = self.grid
        return x * y * z

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        x, y, z = self.block
        return x * y * z

    def __repr__(self) -> str:  # without the megabyte of text
        return (
            f"Launch({self.entry}, grid={self.grid}, block={self.block}, cluster={self.cluster}, "
            f"shared_bytes={self.shared_bytes}, params={len(self.params)} bytes)"
        )

"""Counters in device memory by which the CTAs of a launch tell each other how far they are.

Kernels find them at 0 and leave them at 0. Launches that may run at the same time must not share
any: those of a stream run one after another, so each stream has its own; so has each launch that
is captured into a CUDA graph, which may be replayed on any stream, beside anything.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

POOL = 1 << 20  # counters set apart for captured launches of a device: 4 MiB

_pools: dict[int, Tensor] = {}  # what is left of them
_pools_lock = threading.Lock()


def device_counters(device: torch.device, count: int) -> Tensor:
    """At least ``count`` int32 counters for one launch on the current stream of a device; 1 for 1.

    The first call for a device that is not being captured waits until a pool of zeros is there,
    though for no work of the caller's. Captured launches need it to be: nothing orders their
    replays behind a fill on any stream, and a fill in the graph costs each replay another node.
    Captured before such a call, or when the pool is used up, they have that node.
    """
    if device.type != "cuda":
        return _zeros(count, device)
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(device, count)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    # Of few sizes, because all of them are kept.
    return _of_stream(device, stream, 1 << (count - 1).bit_length())


@functools.cache
def _of_stream(device: torch.device, stream: int, count: int) -> Tensor:
    with _pools_lock:
        if device.index not in _pools:
            side = torch.cuda.Stream(device)
            with torch.cuda.stream(side):
                _pools[device.index] = _zeros(POOL, device)
            side.synchronize()
    return _zeros(count, device)


def _for_capture(device: torch.device, count: int) -> Tensor:
    """Counters that no other launch gets. Kept for ever, because the graph holds their address."""
    with _pools_lock:
        pool = _pools.get(device.index)
        if pool is not None and pool.numel() >= count:
            # What is left keeps all of the memory.
            _pools[device.index] = pool[count:]
            return pool[:count]
    return _zeros(count, device)


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)

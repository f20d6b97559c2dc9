"""Counters of the partial results that are there, by which kernels of `fa4.kvcache_launch` know
who comes last.

A kernel finds its counters at 0 and leaves them at 0. Launches that may run at the same time must
not share any: each stream has its own, and so has each launch that is captured into a CUDA graph,
which may be replayed on any stream, beside anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1024  # counters of a stream, so that most launches find enough
POOL = 1 << 20  # counters set apart for captured launches of a device: 4 MiB

_of_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """At least ``count`` int32 counters for one launch on the current stream of a device."""
    if device.type != "cuda":
        return _zeros(count, device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(device, count)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    counters = _of_streams.get(key)
    if counters is None or counters.numel() < count:
        if index not in _pools:
            _pools[index] = _zeros(POOL, device)
            # Once for a device: graphs on any stream must find zeros.
            torch.cuda.current_stream(device).synchronize()
        # If there were some, the launches in front of this one use them; their memory is reused
        # behind those.
        counters = _of_streams[key] = _zeros(max(count, LEAST), device)
    return counters


def _for_capture(device: torch.device, count: int) -> Tensor:
    """Counters that no other launch gets. Kept for ever, because the graph holds their address."""
    pool = _pools.get(device.index)
    if pool is None or pool.numel() < count:
        # Set to 0 by a node of the graph, in every replay.
        return _zeros(count, device)
    _pools[device.index] = pool[count:]
    return pool[:count]


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)

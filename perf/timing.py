"""How long does a call take, on the device or on the host? All of perf/ times with this.

Device times are taken so that a sceptic would accept them:

- contenders take turns, a batch of calls each, in every round, and another one begins each round:
  a clock that drops as the card warms up meets all of them alike
- inputs are rotated, so that no call finds what it reads in L2 from the call before
- the host is hidden: a batch has an untimed call in front, which keeps the device busy while the
  first timed ones are queued; where queuing takes longer than running, the device is first put to
  sleep until all of the batch is queued
- medians of rounds are compared, and ratios are medians of each round's own ratio
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

BATCH_MS = 30.0  # of device time: a few samples of clock and power
CALLS_MAX = 400
COPIES_MAX = 32
SLEEP_CYCLES_PER_MS = 2_000_000  # no card's SM clock is above 2 GHz by much


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call of one contender, a figure for each round.

    intervals  (start, end) of each round's batch by `time.perf_counter`, for `device_state`
    """

    rounds: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def fastest(self) -> float:
        return min(self.rounds)

    @property
    def slowest(self) -> float:
        return max(self.rounds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        if len(self.rounds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (third - first) / self.median


def ratio(of: Times, to: Times) -> float:
    """How much faster ``of`` is than ``to``: the median over rounds of each round's own ratio."""
    return statistics.median(b / a for a, b in zip(of.rounds, to.rounds, strict=True))


class Timer(Protocol):
    """Times a batch of calls; `DeviceTimer`, or a fake in tests."""

    def estimate(self, call: Call) -> float:
        """Warm up, and return about how many milliseconds a call takes."""

    def batch(self, call: Call, calls: int) -> float:
        """Milliseconds of one of ``calls`` calls."""


def interleave(
    contenders: Mapping[str, Call], timer: Timer, rounds: int, batch_ms: float = BATCH_MS
) -> dict[str, Times]:
    """Time contenders in turns; round r begins with the r-th of them."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1.")
    calls = {
        name: calls_of_batch(timer.estimate(call), batch_ms) for name, call in contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for r in range(rounds):
        for name in rotated(names, r):
            start = time.perf_counter()
            times[name].append(timer.batch(contenders[name], calls[name]))
            intervals[name].append((start, time.perf_counter()))
    return {name: Times(tuple(times[name]), tuple(intervals[name])) for name in names}


def rotated(names: Sequence[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return [*names[by:], *names[:by]]


def calls_of_batch(call_ms: float, batch_ms: float = BATCH_MS) -> int:
    return max(1, min(CALLS_MAX, math.ceil(batch_ms / max(call_ms, 1e-6))))


class DeviceTimer:
    """Device time by events on the current stream of the current CUDA device."""

    def __init__(self) -> None:
        self.host_ms: dict[int, float] = {}  # of calls whose queuing must be hidden, by id

    def estimate(self, call: Call) -> float:
        self.host_ms.pop(id(call), None)
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        queued = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            queued.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
        host_ms = statistics.median(queued)
        self.host_ms[id(call)] = host_ms
        device_ms = self.batch(call, 5)
        if host_ms < device_ms / 2:
            del self.host_ms[id(call)]  # the queue stays full by itself
        return device_ms

    def batch(self, call: Call, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host_ms = self.host_ms.get(id(call))
        call()
        if host_ms is not None:
            torch.cuda._sleep(int(1.5 * host_ms * (calls + 1) * SLEEP_CYCLES_PER_MS))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls


def copies_needed(input_bytes: int, l2_bytes: int) -> int:
    """Copies of the inputs such that twice L2 is read between two uses of one of them.

    At most `COPIES_MAX`: tiny inputs may be found in L2 all the same.
    """
    return min(COPIES_MAX, 1 + math.ceil(2 * l2_bytes / max(input_bytes, 1)))


def rotating(calls: Sequence[Call]) -> Call:
    """A call that makes each of ``calls`` in turn."""
    if len(calls) == 1:
        return calls[0]
    following = itertools.cycle(calls)
    return lambda: next(following)()


def host_time(call: Call, calls: int = 3000, drain_every: int = 200) -> float:
    """Median host time of a call in microseconds, the launch included, the device left to itself.

    The queue is drained now and then, outside the clock, so that it never fills.
    """
    call()
    torch.cuda.synchronize()
    times = []
    for i in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if i % drain_every == drain_every - 1:
            torch.cuda.synchronize()
    return statistics.median(times) * 1e6

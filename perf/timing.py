"""How everything under perf/ is timed, and what is written beside each figure."""

from __future__ import annotations

import csv
import datetime
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fa4.versions import fa4_version, installed_version


@dataclass(frozen=True)
class Sample:
    """Times of one contender in milliseconds: median, fastest and slowest of the rounds."""

    median: float
    fastest: float
    slowest: float


def device_times(
    contenders: dict[str, Callable[[], Any]], rounds: int = 9, calls: int = 8
) -> dict[str, Sample]:
    """Device time of a call of each contender, by events.

    Contenders take turns within each round, ``calls`` calls at a time queued back to back, so that
    a clock that drops as the card warms up meets all of them alike.
    """
    for call in contenders.values():
        call()
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {
        name: Sample(statistics.median(sample), min(sample), max(sample))
        for name, sample in times.items()
    }


def host_time(call: Callable[[], Any], calls: int = 3000, drain_every: int = 200) -> float:
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


def surroundings() -> dict[str, str]:
    """Card, software, date and command: the columns that make a figure repeatable."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cute_dsl": installed_version("nvidia-cutlass-dsl") or "",
        "fa4": fa4_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
    }


def write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows, each with `surroundings` behind its own columns."""
    around = surroundings()
    table = [row | around for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def _module_and_arguments() -> list[str]:
    """What was run, without where the table was to go."""
    spec = sys.modules["__main__"].__spec__
    arguments = sys.argv[1:]
    if "--csv" in arguments:
        at = arguments.index("--csv")
        del arguments[at : at + 2]
    return [spec.name if spec else sys.argv[0], *arguments]

"""The command line that the benchmark scripts share, and the loop of those that compare contenders.

A row is one contender on one case. A contender that refuses a case, or is not installed, is named
with its reason: it is not left out in silence.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from perf import contenders, records
from perf.cases import Case, input_bytes, make_inputs
from perf.device_state import DeviceState, NvmlReader, Sampler
from perf.timing import Call, DeviceTimer, Times, copies_needed, interleave, ratio, rotating

OURS = "fa4"
DEVICE = "cuda"
REFUSALS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    NotImplementedError,
    ImportError,
    AttributeError,
    KeyError,
)

# FLOP of 16-bit matrix products a clock of one multiprocessor, by compute capability's major.
TENSOR_RATES = {9: 4096, 10: 8192}


def make_parser(description: str | None, rounds: int = 9) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases named like this")
    parser.add_argument(
        "--contenders", default="", metavar="REGEX", help="only contenders named like this"
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="interleaved rounds (default %(default)s)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write rows and table here, as .csv and .md"
    )
    return parser


def selected(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Cases whose name contains the regular expression; SystemExit if there is none."""
    chosen = [case for case in cases if re.search(pattern, case.name)]
    if not chosen:
        names = "\n  ".join(case.name for case in cases)
        sys.exit(f"--cases {pattern!r} matches none of\n  {names}")
    return chosen


def need_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")


def progress(items: Sequence[Any], name: Callable[[Any], str] = str) -> Iterator[Any]:
    """The items, with a line on stderr before each: which it is, of how many, and time left."""
    start = time.perf_counter()
    for i, item in enumerate(items):
        left = ""
        if i:
            seconds = (time.perf_counter() - start) / i * (len(items) - i)
            left = f", about {seconds:.0f} s left"
        print(f"[{i + 1}/{len(items)}{left}] {name(item)}", file=sys.stderr, flush=True)
        yield item


def compare(
    operation: str,
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    work: Callable[[Case], float],
    unit: str,
    stem: str = "",
) -> list[dict[str, Any]]:
    """Measure an operation, print a line a case, and write what was asked for.

    work  FLOP or bytes of a case; a millisecond of 1e9 of them is one ``unit``: tflops, tbytes
    stem  of the files in --out, the operation's name by default
    """
    need_gpu()
    found, absent = contenders.available(operation, arguments.contenders)
    for name, reason in absent.items():
        print(f"not available: {name}: {reason}")
    if not found:
        sys.exit(f"--contenders {arguments.contenders!r}: nothing to measure")
    print("measured: " + "; ".join(f"{c.name} ({c.version})" for c in found))
    rows: list[dict[str, Any]] = []
    with device_sampler() as sampler:
        for case in progress(cases, lambda case: case.name):
            table = measure(operation, case, found, arguments.rounds, sampler)
            for row in table:
                if row["ms"] is not None:
                    row |= rates(row, work(case), unit)
            print(line(case, table, unit), flush=True)
            rows += table
    finish(rows, arguments, stem or operation, unit)
    return rows


@contextlib.contextmanager
def device_sampler() -> Iterator[Sampler | None]:
    """Clock and power readings of torch's device; None, said aloud, where NVML is missing."""
    try:
        reader = NvmlReader(str(torch.cuda.get_device_properties().uuid))
    except Exception as reason:  # noqa: BLE001  an error of a module that may not be there
        print(f"clock and power are not recorded: {contenders.first_line(reason)}")
        yield None
        return
    with Sampler(reader) as sampler:
        yield sampler


def measure(
    operation: str, case: Case, found: Sequence[Any], rounds: int, sampler: Sampler | None
) -> list[dict[str, Any]]:
    """A row for each contender: times, ratio to ours, state of the card; or why it refused."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    copies = copies_needed(input_bytes(case), l2_bytes)
    inputs = [make_inputs(case, DEVICE, copy) for copy in range(copies)]
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    outputs: dict[str, Any] = {}
    for contender in found:
        name = contender.name
        try:
            prepared = [getattr(contender, operation)(case, each) for each in inputs]
            outputs[name] = contenders.output_of(prepared[0]()).detach()
        except REFUSALS as refusal:
            notes[name] = f"refused: {contenders.first_line(refusal)}"
        else:
            calls[name] = rotating(prepared)
        torch.cuda.synchronize()  # an error of the device itself ends the run here
    differences = differences_from_first(outputs)
    outputs.clear()
    times = interleave(calls, DeviceTimer(), rounds) if calls else {}
    rows = []
    for contender in found:
        name = contender.name
        row = (
            {"operation": operation}
            | case.row()
            | {"contender": name, "version": contender.version, "ms": None}
        )
        if name in times:
            row |= time_columns(times[name])
            ours = times.get(OURS)
            row["ours_faster"] = None if ours is None else ratio(ours, times[name])
            row["difference"] = differences.get(name)
            row |= state_columns(sampler.over(times[name].intervals) if sampler else None)
        rows.append(row | {"note": notes.get(name, "")})
    return rows


def differences_from_first(outputs: dict[str, Any]) -> dict[str, float]:
    """Largest distance of each output from the first one's, over that one's largest magnitude."""
    if not outputs:
        return {}
    first = next(iter(outputs.values())).float()
    scale = first.abs().max().item() or 1.0
    return {
        name: (out.reshape(first.shape).float() - first).abs().max().item() / scale
        for name, out in outputs.items()
        if out.numel() == first.numel()
    }


def time_columns(times: Times) -> dict[str, Any]:
    return {
        "ms": times.median,
        "ms_fastest": times.fastest,
        "ms_slowest": times.slowest,
        "spread": times.spread,
        "rounds": len(times.rounds),
    }


def state_columns(state: DeviceState | None) -> dict[str, Any]:
    if state is None:
        return dict.fromkeys(("sm_mhz", "sm_mhz_lowest", "power_w", "capped_share"))
    return {
        "sm_mhz": state.sm_mhz,
        "sm_mhz_lowest": state.sm_mhz_lowest,
        "power_w": state.power_w,
        "capped_share": state.capped_share,
    }


def rates(row: dict[str, Any], work: float, unit: str) -> dict[str, Any]:
    """The rate, and for FLOP the share of what the tensor cores do at the clock that was read."""
    rate = work / row["ms"] / 1e9
    columns: dict[str, Any] = {unit: rate}
    if unit == "tflops":
        device = torch.cuda.get_device_properties()
        per_clock = TENSOR_RATES.get(device.major, 0) * device.multi_processor_count
        mhz = row["sm_mhz"]
        columns["tensor_share"] = rate * 1e6 / (per_clock * mhz) if mhz and per_clock else None
    return columns


def line(case: Case, table: Sequence[dict[str, Any]], unit: str) -> str:
    """One case in one line: rates, ours over the best other, clock and power of the first."""
    measured = [row for row in table if row["ms"] is not None]
    digits = 0 if unit == "tflops" else 2
    parts = [f"{row['contender']} {row[unit]:.{digits}f}" for row in measured]
    ours = next((row for row in measured if row["contender"] == OURS), None)
    others = [row for row in measured if not row["contender"].startswith(OURS)]
    if ours and others:
        best = min(others, key=lambda row: row["ms"])
        parts.append(f"| {best['ours_faster']:.3f} of {best['contender']}")
    if measured and measured[0]["sm_mhz"]:
        parts.append(f"| {measured[0]['sm_mhz']:.0f} MHz {measured[0]['power_w']:.0f} W")
    text = f"{case.name:28} {'  '.join(parts)}"
    for row in table:
        if row["note"]:
            text += f"\n{'':28} {row['contender']} {row['note']}"
        if (row.get("difference") or 0.0) > 0.05:
            text += f"\n{'':28} {row['contender']} output differs by {row['difference']:.3f}"
    return text


def finish(
    rows: Sequence[dict[str, Any]], arguments: argparse.Namespace, stem: str, unit: str
) -> None:
    """Print the table of cases by contenders, and write the files that were asked for."""
    measured = [row for row in rows if row.get(unit) is not None]
    wide = records.comparison(measured, unit) if measured else None
    digits = {"tflops": 1, "tbytes": 2}.get(unit, 2)
    if wide is not None:
        print(f"\n{unit}\n{wide.round(max(digits, 3)).to_string()}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        records.write_csv(arguments.out / f"{stem}.csv", rows)
        if wide is not None:
            (arguments.out / f"{stem}.md").write_text(records.markdown(wide, digits))
    if arguments.csv:
        records.write_csv(arguments.csv, rows)

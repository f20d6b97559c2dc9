"""What is written beside each figure, and how: CSV files and the tables that people read."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fa4.versions import fa4_version, installed_version

ROOT = Path(__file__).resolve().parent.parent

# Behind the columns of its own, every row of every CSV has these.
SURROUNDINGS = (
    "device",
    "driver",
    "torch",
    "cuda",
    "cudnn",
    "cute_dsl",
    "python",
    "fa4",
    "commit",
    "date",
    "command",
)

# Of a shell command and its value: where results go changes no result.
_DESTINATIONS = ("--csv", "--out")


RATES = ("tflops", "tbytes")  # columns of which more is better


def surroundings(driver: str = "") -> dict[str, str]:
    """Card, software, date and command: the columns that make a figure repeatable."""
    has_gpu = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if has_gpu else None
    return {
        "device": torch.cuda.get_device_name() if has_gpu else f"CPU ({platform.machine()})",
        "driver": driver or _driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(cudnn or ""),
        "cute_dsl": installed_version("nvidia-cutlass-dsl") or "",
        "python": platform.python_version(),
        "fa4": fa4_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "command": command(sys.argv[1:]),
    }


def commit(folder: Path = ROOT) -> str:
    """The commit that was run, "+changes" behind it for an edited tree; else FA4_COMMIT's value."""
    try:
        head = _git(folder, "rev-parse", "--short=10", "HEAD")
        return head + ("+changes" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FA4_COMMIT", "unknown")


def command(arguments: list[str]) -> str:
    """What was run, as a line for a shell, without where the results were to go."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument in _DESTINATIONS:
            skips = True
        elif not argument.startswith(tuple(f"{option}=" for option in _DESTINATIONS)):
            kept.append(argument)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return shlex.join(["python", "-m", spec.name if spec else Path(sys.argv[0]).name, *kept])


def write_csv(
    path: Path, rows: Iterable[Mapping[str, Any]], around: Mapping[str, str] | None = None
) -> None:
    """Write rows, each with `surroundings` behind its own columns; absent values are empty."""
    table = pd.DataFrame(list(rows))
    for name, value in (surroundings() if around is None else around).items():
        table[name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)


def text_table(rows: Iterable[Mapping[str, Any]], digits: int = 3) -> str:
    """Rows as aligned text; columns that are empty everywhere are left out."""
    table = pd.DataFrame(list(rows)).dropna(axis=1, how="all")
    return table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.{digits}f}")


def comparison(rows: Iterable[Mapping[str, Any]], value: str, ours: str = "fa4") -> pd.DataFrame:
    """A line for each case, a column for each contender, and ours over the best other.

    The best is the highest of `RATES`, and the lowest of anything else. Contenders whose names
    begin with ours are variants of it, and no others.
    """
    table = pd.DataFrame(list(rows))
    wide = table.pivot_table(index="case", columns="contender", values=value, sort=False)
    variants = [name for name in wide.columns if name.startswith(f"{ours}-")]
    others = wide.drop(columns=[ours, *variants], errors="ignore")
    if ours in wide and len(others.columns):
        wide = wide[[ours, *variants, *others.columns]]
        best = others.max(axis=1) if value in RATES else others.min(axis=1)
        wide[f"{ours} / best other"] = wide[ours] / best
    return wide


def markdown(table: pd.DataFrame, digits: int = 1) -> str:
    """A comparison as a table for a page; ratios get three digits."""
    lines = [["case", *map(str, table.columns)]]
    lines.append(["---"] * len(lines[0]))
    for name, row in table.iterrows():
        cells = (
            "" if pd.isna(x) else f"{x:.{3 if '/ best other' in column else digits}f}"
            for column, x in row.items()
        )
        lines.append([str(name), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def _driver() -> str:
    """The driver's version, as the kernel module tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    words = text.split("Kernel Module", 1)[-1].split()
    return next((word for word in words if word[:1].isdigit()), "")

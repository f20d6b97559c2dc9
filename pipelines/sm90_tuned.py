"""Hopper schedules that were measured to beat the rule, by what a kernel must be able to do.

The table is `sm90_tuned.csv`, written by ``python -m perf.tune --write``. A row overrides the rule
of `fa4.pipelines.sm90` only where its margin, the smaller one of two separate runs, is above
`MARGIN`: less than that is noise. It is data beside the code, not code, so that writing to it
leaves the compiled kernels of every other schedule valid.

features   `ForwardFeatures.name` without the dtype: bf16 and fp16 run the same instructions
schedule   fields of `ForwardSchedule` as "name=value name=value"; those not named have defaults
margin     how many times as fast as the rule's schedule, geometric mean over the lengths
runner_up  the second best schedule's name, and how many times as fast as the rule's it was
lengths    tokens of a sequence, at which it was measured
"""

from __future__ import annotations

import ast
import csv
import functools
from pathlib import Path
from typing import Any

from fa4.kernels.features import ForwardFeatures

TABLE = Path(__file__).with_name("sm90_tuned.csv")
COLUMNS = (
    "features",
    "schedule",
    "margin",
    "runner_up",
    "lengths",
    "device",
    "commit",
    "date",
    "command",
)
MARGIN = 1.015


def winner(features: ForwardFeatures) -> dict[str, Any] | None:
    """Fields of the schedule that overrides the rule's, None where the rule stands."""
    return _winners(TABLE).get(key(features))


def key(features: ForwardFeatures) -> str:
    return features.name.removeprefix(f"{features.dtype}_")


def read_rows(table: Path) -> list[dict[str, str]]:
    """Rows as text. Raises ValueError for other columns than `COLUMNS`."""
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{table} has the columns {reader.fieldnames}, not {list(COLUMNS)}.")
    return rows


def write_row(row: dict[str, str], table: Path) -> None:
    """Put a row in place of the one with its features, or behind the others."""
    rows = [old for old in read_rows(table) if old["features"] != row["features"]]
    rows.append({column: row[column] for column in COLUMNS})
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda each: each["features"]))
    _winners.cache_clear()


def fields_of(text: str) -> dict[str, Any]:
    """ "tile_m=128 takes_turns=True" as a dictionary; values are Python literals without spaces."""
    pairs = (item.split("=", 1) for item in text.split())
    return {name: ast.literal_eval(value) for name, value in pairs}


def text_of(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in fields.items())


@functools.cache
def _winners(table: Path) -> dict[str, dict[str, Any]]:
    return {
        row["features"]: fields_of(row["schedule"])
        for row in read_rows(table)
        if float(row["margin"]) > MARGIN
    }

"""Which measured tables do the pages of results show? Makes them anew from CSV files beside them.

    python -m perf.page docs/results/hopper_forward.md

A table stands between two lines of the page,

    <!-- perf.page: hopper_forward/forward.csv tflops 0 -->
    <!-- perf.page: end -->

that name a CSV file of these scripts, relative to the page, the column that is shown and its
digits. Above the table the device, versions, date and command of the measurement are written.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pandas as pd

from perf import records

MARKED = re.compile(
    r"(?P<begin><!-- perf\.page: (?P<file>\S+) (?P<column>\w+) (?P<digits>\d) -->\n)"
    r"(?P<table>.*?)(?P<end><!-- perf\.page: end -->)",
    re.DOTALL,
)


def with_tables(page: str, folder: Path) -> str:
    """A page's text with every marked table made from the files, relative to ``folder``.

    Raises ValueError for a page without marked tables.
    """
    if not MARKED.search(page):
        raise ValueError("The page has no lines that mark a table; see python -m perf.page --help.")

    def made(mark: re.Match[str]) -> str:
        table = pd.read_csv(folder / mark["file"])
        shown = table.dropna(subset=[mark["column"]])
        rows = [{str(name): value for name, value in row.items()} for _, row in shown.iterrows()]
        wide = records.comparison(rows, mark["column"])
        written = records.markdown(wide, int(mark["digits"]))
        return f"{mark['begin']}\n{provenance(table)}\n\n{written}\n{mark['end']}"

    return MARKED.sub(made, page)


def provenance(table: pd.DataFrame) -> str:
    """Where the rows of a CSV are from, as a paragraph."""

    def every(column: str) -> str:
        return ", ".join(str(value) for value in table[column].dropna().unique())

    text = (
        f"{every('device')}, driver {every('driver')}, torch {every('torch')}, cuDNN "
        f"{every('cudnn')}, CuTe-DSL {every('cute_dsl')}; commit {every('commit')}, "
        f"{every('date')}; `{every('command')}`."
    )
    if "version" in table:
        given = table.dropna(subset=["version"]).groupby("contender", sort=False)["version"].first()
        others = [f"{name} {version}" for name, version in given.items() if "fa4" not in str(name)]
        if others:
            text += f" Others: {', '.join(others)}."
    if "sm_mhz" in table and table["sm_mhz"].notna().any():
        clock, power = table["sm_mhz"], table["power_w"]
        text += (
            f" Median SM clock {clock.min():.0f} to {clock.max():.0f} MHz, power "
            f"{power.min():.0f} to {power.max():.0f} W."
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    for path in parser.parse_args().pages:
        page = path.read_text(encoding="utf-8")
        path.write_text(with_tables(page, path.parent), encoding="utf-8")


if __name__ == "__main__":
    main()

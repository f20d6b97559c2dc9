"""Which figures do the pages show? Draws them from the CSV files that the scripts here write.

    python -m perf.plot results/forward.csv results/memory.csv --out docs/results/figures

Bars of rates by case and contender; lines, logarithmic both ways, of peak memory against length
and of the words that algorithms move (perf.io_model --csv).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt
import pandas as pd

# Okabe and Ito 2008: told apart with any colour vision. Ours is always the first.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
    "#000000",
)

CASES_A_ROW = 8

# Column that is drawn: its axis, and whether bars start at zero on a linear axis.
VALUES = {
    "tflops": ("TFLOP/s", True),
    "tbytes": ("TB/s of keys and values", True),
    "host_us": ("host time of a call, µs", True),
    "rms_error": ("root mean square error, relative", False),
    "seconds": ("seconds", False),
}


def figure_of(table: pd.DataFrame, title: str) -> Any:
    """The figure for a table, by the columns it has. Raises ValueError if there is none for it."""
    if "peak_gib" in table:
        return memory_figure(table, title)
    if "materialised" in table:
        return words_figure(table, title)
    value = next((name for name in VALUES if name in table), None)
    if value is None:
        raise ValueError(f"{title}: no figure is made of the columns {', '.join(table)}.")
    return bars(table.dropna(subset=[value]), value, title)


def contender_order(table: pd.DataFrame) -> list[str]:
    names = list(dict.fromkeys(table["contender"]))
    return sorted(names, key=lambda name: name != "fa4")  # stable: the others as they come


def bars(table: pd.DataFrame, value: str, title: str) -> Any:
    """Bars side by side for each case, at most `CASES_A_ROW` cases in a row of the figure."""
    label, starts_at_zero = VALUES[value]
    cases = list(dict.fromkeys(table["case"]))
    names = contender_order(table)
    rows = [cases[at : at + CASES_A_ROW] for at in range(0, len(cases), CASES_A_ROW)]
    figure, panels = plt.subplots(
        len(rows), 1, figsize=(11, 1 + 2.6 * len(rows)), sharey=True, squeeze=False
    )
    width = 0.85 / len(names)
    for axes, shown in zip(panels[:, 0], rows, strict=True):
        for i, name in enumerate(names):
            values = table[table["contender"] == name].groupby("case")[value].median()
            heights = [values.get(case, 0.0) for case in shown]
            places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(shown))]
            axes.bar(places, heights, width, label=name, color=COLOURS[i % len(COLOURS)])
        axes.set_xticks(range(len(shown)), shown, rotation=15, ha="right", fontsize=8)
        axes.set_xlim(-0.6, len(rows[0]) - 0.4)
        axes.set_ylabel(label)
        if not starts_at_zero:
            axes.set_yscale("log")
    return finished(figure, panels[0, 0], table, title)


def memory_figure(table: pd.DataFrame, title: str) -> Any:
    figure, axes = plt.subplots(figsize=(6.0, 4.2))
    for i, name in enumerate(contender_order(table)):
        rows = table[table["contender"] == name].sort_values("seqlen_k")
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(rows["seqlen_k"], rows["peak_gib"], marker="o", label=name, color=colour)
        computed = rows[rows["note"] != "measured"]
        axes.plot(computed["seqlen_k"], computed["peak_gib"], "o", mfc="white", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens (open circles: computed, not measured)")
    axes.set_ylabel("GiB beyond the inputs")
    return finished(figure, axes, table, title)


def words_figure(table: pd.DataFrame, title: str) -> Any:
    """Words against N, a panel for each d, at the largest M."""
    table = table[table["M"] == table["M"].max()]
    dims = sorted(table["d"].unique())
    figure, panels = plt.subplots(1, len(dims), figsize=(3.2 * len(dims), 3.6), sharey=True)
    for d, axes in zip(dims, panels if len(dims) > 1 else [panels], strict=True):
        rows = table[table["d"] == d].sort_values("N")
        for name, colour in zip(("materialised", "FA1", "FA2"), COLOURS, strict=False):
            axes.plot(rows["N"], rows[name], marker="o", label=name, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"d = {d}, M = {table['M'].iloc[0]}", fontsize=9)
        axes.set_xlabel("N")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("words")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure


def finished(figure: Any, first: Any, table: pd.DataFrame, title: str) -> Any:
    """Title with where and when it was measured; a legend above the first panel; grids."""
    where = [str(table[name].iloc[0]) for name in ("device", "date", "commit") if name in table]
    figure.suptitle(f"{title}\n{', '.join(where)}" if where else title, fontsize=10)
    for axes in figure.axes:
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    handles, labels = first.get_legend_handles_labels()
    first.legend(
        handles, labels, fontsize=8, ncols=len(labels), loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    figure.tight_layout()
    return figure


def draw(path: Path, folder: Path, kind: str) -> Path:
    """Draw one CSV into ``folder``; returns the file, the same bytes for the same CSV."""
    target = folder / f"{path.stem}.{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure = figure_of(pd.read_csv(path), path.stem.replace("_", " "))
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(target, metadata=metadata, dpi=150)
        plt.close(figure)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+", help="files that the scripts in perf/ wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the figures")
    parser.add_argument("--format", default="svg", choices=("svg", "png", "pdf"))
    arguments = parser.parse_args()
    for path in arguments.csv:
        print(draw(path, arguments.out, arguments.format))


if __name__ == "__main__":
    main()

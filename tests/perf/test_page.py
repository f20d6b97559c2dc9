"""Tables of the results pages are those of the CSV files beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pandas")
from perf import page, records

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGES = [
    path for path in sorted(RESULTS.glob("*.md")) if page.MARKED.search(path.read_text("utf-8"))
]

AROUND = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11",
    "cudnn": "91900",
    "cute_dsl": "4.8.1",
    "commit": "abc",
    "date": "2026-11-30 12:00",
    "command": "python -m perf.forward",
}


def marked(table: str) -> str:
    return (
        f"above\n<!-- perf.page: forward.csv tflops 1 -->\n{table}<!-- perf.page: end -->\nbelow\n"
    )


def write(folder: Path) -> None:
    rows = [
        {"case": "a", "contender": "fa4", "version": "1", "tflops": 30.04, "sm_mhz": 1700.0},
        {"case": "a", "contender": "peer", "version": "2", "tflops": 20.0, "sm_mhz": 1800.0},
        {"case": "b", "contender": "fa4", "version": "1", "tflops": 10.0, "sm_mhz": 1650.0},
        {"case": "b", "contender": "peer", "version": "2", "tflops": None, "sm_mhz": None},
    ]
    rows = [{**row, "power_w": row["sm_mhz"]} for row in rows]
    records.write_csv(folder / "forward.csv", rows, AROUND)


def test_a_marked_table_is_made_from_its_file(tmp_path: Path) -> None:
    write(tmp_path)
    made = page.with_tables(marked("| old |\n"), tmp_path)
    assert "old" not in made
    assert "| a | 30.0 | 20.0 | 1.502 |\n| b | 10.0 |  |  |\n" in made
    assert "NVIDIA H200, driver 580.1" in made
    assert "commit abc, 2026-11-30 12:00; `python -m perf.forward`. Others: peer 2." in made
    assert "1650 to 1800 MHz" in made
    assert made.startswith("above\n")
    assert made.endswith("-->\nbelow\n")
    assert page.with_tables(made, tmp_path) == made


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no lines that mark a table"):
        page.with_tables("a page\n", tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_true_to_their_files(path: Path) -> None:
    written = path.read_text("utf-8")
    assert page.with_tables(written, path.parent) == written, (
        f"{path.name} is out of date: python -m perf.page {path}"
    )


def test_every_file_that_a_page_names_is_there() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name} names {target}"

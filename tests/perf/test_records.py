"""What stands beside each figure, and how it is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas")
from perf import records  # noqa: E402  needs pandas


def test_every_row_has_its_surroundings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    records.write_csv(path, [{"case": "a", "ms": 1.5}, {"case": "b", "note": "refused: why"}])
    table = pd.read_csv(path, dtype=str)
    assert list(table)[:3] == ["case", "ms", "note"]
    assert tuple(list(table)[3:]) == records.SURROUNDINGS
    assert table["torch"].nunique() == 1
    assert table["ms"].tolist()[0] == "1.5"
    assert pd.isna(table["ms"].tolist()[1])
    assert table["date"].str.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d").all()
    assert set(records.surroundings()) == set(records.SURROUNDINGS)


def test_the_command_leaves_out_where_results_went(monkeypatch: pytest.MonkeyPatch) -> None:
    class Main:
        __spec__ = type("Spec", (), {"name": "perf.forward"})

    monkeypatch.setitem(sys.modules, "__main__", Main)
    given = ["--cases", "d64 full", "--csv", "a.csv", "--rounds", "3", "--out=b", "--out", "c"]
    assert records.command(given) == "python -m perf.forward --cases 'd64 full' --rounds 3"


def test_commit_says_when_the_tree_was_edited(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FA4_COMMIT", "0123456789")
    assert records.commit(tmp_path) == "0123456789"  # no repository here
    monkeypatch.delenv("FA4_COMMIT")
    assert records.commit(tmp_path) == "unknown"

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    clean = records.commit(tmp_path)
    assert len(clean) == 10
    (tmp_path / "file").write_text("2")
    assert records.commit(tmp_path) == f"{clean}+changes"


ROWS = [
    {"case": "x", "contender": "other", "tflops": 500.0},
    {"case": "x", "contender": "fa4", "tflops": 600.0},
    {"case": "x", "contender": "third", "tflops": 550.0},
    {"case": "y", "contender": "fa4", "tflops": 400.0},
    {"case": "y", "contender": "other", "tflops": 500.0},
]


def test_a_comparison_has_ours_first_and_the_ratio_to_the_best_other() -> None:
    table = records.comparison(ROWS, "tflops")
    assert list(table.columns) == ["fa4", "other", "third", "fa4 / best other"]
    assert table["fa4 / best other"].tolist() == pytest.approx([600 / 550, 0.8])
    assert list(table.index) == ["x", "y"]  # as they came
    page = records.markdown(table)
    assert page.splitlines()[0] == "| case | fa4 | other | third | fa4 / best other |"
    assert page.splitlines()[3] == "| y | 400.0 | 500.0 |  | 0.800 |"


def test_the_best_time_or_error_is_the_lowest() -> None:
    rows = [{**row, "host_us": row["tflops"]} for row in ROWS]
    table = records.comparison(rows, "host_us")
    assert table["fa4 / best other"].tolist() == pytest.approx([600 / 500, 0.8])


def test_variants_of_ours_are_no_others() -> None:
    rows = [*ROWS, {**ROWS[0], "contender": "fa4-deterministic", "tflops": 900.0}]
    table = records.comparison(rows, "tflops")
    assert list(table.columns)[:3] == ["fa4", "fa4-deterministic", "other"]
    assert table["fa4 / best other"].tolist() == pytest.approx([600 / 550, 0.8])


def test_a_comparison_without_others_or_without_ours_has_no_ratio() -> None:
    assert list(records.comparison(ROWS[1:2], "tflops").columns) == ["fa4"]
    assert list(records.comparison(ROWS[:1], "tflops").columns) == ["other"]

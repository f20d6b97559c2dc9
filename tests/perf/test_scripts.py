"""What single scripts work out: memory's growth, errors, first calls, figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
from fa4.reference import attention_reference  # noqa: E402
from perf import accuracy, cases, compile_time, io_model, memory, plot  # noqa: E402  they need pandas


def test_scores_of_the_32k_example_are_64_gib() -> None:
    (case,) = [case for case in memory.CASES if case.lengths_k[0] == 32768]
    assert memory.scores_bytes(case) == 64 * 2**30


def test_eager_attention_is_attention() -> None:
    inputs = cases.make_inputs(cases.dense(2, 32, 2, 2, 16), "cpu")
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    assert torch.allclose(memory.eager(q, k, v), attention_reference(q, k, v)[0])


def test_growth_is_told_apart() -> None:
    lengths = [1024, 2048, 4096]
    linear, quadratic = [3.0 * n + 64 for n in lengths], [3.0 * n * n for n in lengths]
    assert memory.worst_deviation_from_linear(lengths, linear) < 1e-12
    assert memory.worst_deviation_from_linear(lengths, quadratic) > 0.3
    assert memory.exponent(lengths, quadratic) == pytest.approx(2)
    assert memory.exponent(lengths, [3.0 * n for n in lengths]) == pytest.approx(1)


def test_errors_are_relative_to_the_output() -> None:
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    found = accuracy.errors(exact + torch.tensor([0.0, 1.0]), exact)
    scale = (25 / 2) ** 0.5
    assert found["max_error"] == pytest.approx(1 / scale)
    assert found["rms_error"] == pytest.approx(0.5**0.5 / scale)


def test_hard_inputs_are_the_same_for_every_contender() -> None:
    plain = cases.make_inputs(cases.dense(1, 256, 2, 2, 64), "cpu")
    first, again = (accuracy.with_values(plain, "outliers") for _ in range(2))
    assert torch.equal(first.q, again.q)
    changed = (first.k != plain.k).float().mean().item()
    assert 0 < changed < 3e-3
    assert first.k.abs().max() > 10
    assert torch.equal(accuracy.with_values(plain, "large").q, 8 * plain.q)
    assert accuracy.with_values(plain, "plain") is plain


PROGRAM = """
import os, pathlib, time
mark = pathlib.Path(os.environ["FA4_CACHE_DIR"], "built")
print("import=0.25")
print("first call=" + ("0.5" if mark.exists() else "4.0"))
mark.touch()
"""


def test_first_calls_are_told_apart_by_the_cache() -> None:
    rows = {row["case"]: row for row in compile_time.measure("name", PROGRAM, repeats=2)}
    assert rows["import"]["seconds"] == 0.25
    assert rows["first call, empty disk cache"]["seconds"] == 4.0
    assert rows["first call, warm disk cache"]["seconds"] == 0.5
    assert rows["first call, warm disk cache"]["processes"] == 2


def test_a_failing_process_is_an_error_with_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="no flash_attn"):
        compile_time.run_process("raise SystemExit('no flash_attn')", "/nowhere")


RATES = pd.DataFrame(
    {
        "case": ["a", "a", "b", "b"],
        "contender": ["peer", "fa4", "peer", "fa4"],
        "tflops": [500.0, 600.0, None, 650.0],
        "device": "NVIDIA H200",
        "date": "2026-11-30 08:00",
        "commit": "0123456789",
    }
)
MEMORY = pd.DataFrame(
    {
        "case": ["1k", "2k", "1k", "2k"],
        "contender": ["fa4", "fa4", "eager", "eager"],
        "seqlen_k": [1024, 2048, 1024, 2048],
        "peak_gib": [0.01, 0.02, 0.5, 2.0],
        "note": ["measured", "measured", "measured", "computed: two score tensors"],
    }
)


def test_rates_become_bars_with_ours_first() -> None:
    figure = plot.figure_of(RATES, "forward")
    (axes,) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["fa4", "peer"]
    assert [bar.get_height() for bar in handles[0]] == [600.0, 650.0]
    assert [bar.get_height() for bar in handles[1]] == [500.0, 0.0]  # refused b
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]
    assert figure.get_suptitle() == "forward\nNVIDIA H200, 2026-11-30 08:00, 0123456789"
    assert axes.get_ylabel() == "TFLOP/s"


def test_many_cases_are_drawn_in_rows() -> None:
    cases_of = [RATES.assign(case=f"case {i}") for i in range(plot.CASES_A_ROW + 1)]
    first, second = plot.figure_of(pd.concat(cases_of), "forward").axes
    assert len(first.get_xticklabels()) == plot.CASES_A_ROW
    assert [tick.get_text() for tick in second.get_xticklabels()] == ["case 8"]


def test_memory_becomes_lines_and_marks_what_was_not_measured() -> None:
    (axes,) = plot.figure_of(MEMORY, "memory").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["eager"].get_ydata().tolist() == [0.5, 2.0]
    open_circles = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata().tolist() for line in open_circles] == [[], [2048]]


def test_words_of_algorithms_become_a_panel_for_each_head_dim() -> None:
    rows = pd.DataFrame(io_model.algorithm_rows([1024, 4096], [64, 128], [50_000, 116_736]))
    figure = plot.figure_of(rows, "io model")
    assert [axes.get_title() for axes in figure.axes] == [
        "d = 64, M = 116736", "d = 128, M = 116736"
    ]  # fmt: skip
    lines = {line.get_label(): line for line in figure.axes[1].get_lines()}
    assert lines["FA2"].get_xdata().tolist() == [1024, 4096]
    assert lines["FA2"].get_ydata()[1] == io_model.fa2_words(4096, 128, 116_736)


def test_drawing_twice_gives_the_same_file(tmp_path: Path) -> None:
    csv = tmp_path / "forward.csv"
    RATES.to_csv(csv, index=False)
    first = plot.draw(csv, tmp_path / "figures", "svg").read_bytes()
    assert plot.draw(csv, tmp_path / "figures", "svg").read_bytes() == first
    assert b"<svg" in first
    with pytest.raises(ValueError, match="no figure is made of the columns"):
        plot.figure_of(pd.DataFrame({"case": ["a"], "contender": ["fa4"]}), "nothing")

"""The scripts' command lines, and a whole comparison with fakes in place of the GPU."""

from __future__ import annotations

import importlib
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
from fa4.reference import attention_reference  # noqa: E402
from perf import cases, command, contenders, records  # noqa: E402  they need pandas
from perf.device_state import Reading, Sampler  # noqa: E402

COMPARING = ("forward", "backward", "varlen", "decode", "smoke")
MEASURING = (*COMPARING, "host_overhead", "memory", "accuracy", "model_step")
SCRIPTS = (*MEASURING, "compile_time", "plot", "page", "roofline", "io_model", "tune")


def run_main(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"perf/{script}.py", *arguments])
    importlib.import_module(f"perf.{script}").main()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_begins_with_the_question(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_main(script, "--help", monkeypatch=monkeypatch)
    assert end.value.code == 0
    text = capsys.readouterr().out
    question = importlib.import_module(f"perf.{script}").__doc__.splitlines()[0]
    assert "?" in question
    assert question in text
    if script in (*MEASURING, "compile_time"):
        for option in ("--cases", "--contenders", "--rounds", "--csv", "--out"):
            assert option in text


@pytest.mark.parametrize("script", MEASURING)
def test_without_a_gpu_a_benchmark_says_so(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run_main(script, monkeypatch=monkeypatch)


def test_cases_are_chosen_by_regular_expression() -> None:
    chosen = command.selected(cases.FORWARD, "^d128-4k.*causal")
    assert [case.name for case in chosen] == ["d128-4k-b4-h16-causal", "d128-4k-b4-h32k8-causal"]
    assert command.selected(cases.FORWARD, "") == list(cases.FORWARD)
    with pytest.raises(SystemExit, match="d128-4k-b4-h16-full"):
        command.selected(cases.FORWARD, "d999")


def test_progress_counts_and_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(command.progress(["a", "b"])) == ["a", "b"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "[1/2] a"
    assert second.startswith("[2/2, about ")


def test_shares_are_of_the_clock_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    columns = command.rates({"ms": 2.0, "sm_mhz": 1500.0}, 1.4e12, "tflops")
    assert columns["tflops"] == 700.0
    assert columns["tensor_share"] == pytest.approx(700e12 / (132 * 4096 * 1.5e9))
    assert command.rates({"ms": 2.0, "sm_mhz": None}, 1e9, "tflops")["tensor_share"] is None
    assert command.rates({"ms": 2.0, "sm_mhz": None}, 9e9, "tbytes") == {"tbytes": 4.5}


def test_outputs_are_compared_with_the_first() -> None:
    first = torch.tensor([[1.0, -4.0]])
    outputs = {"fa4": first, "same": first.view(2), "off": first + 0.4, "other": torch.ones(3)}
    differences = command.differences_from_first(outputs)
    assert differences == {"fa4": 0.0, "same": 0.0, "off": pytest.approx(0.1)}
    assert command.differences_from_first({}) == {}


# -- a whole comparison ----------------------------------------------------------------------------


class Reference:
    """A contender on the CPU that adds ``offset`` to the right answer."""

    def __init__(self, name: str, offset: float = 0.0):
        self.name, self.version, self.offset = name, "1.0", offset

    def forward(self, case, inputs):
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: attention_reference(q, k, v, causal=case.causal)[0] + self.offset


class Refusing(Reference):
    def forward(self, case, inputs):
        raise ValueError("head_dim=16 is too small\nand more")


class Timer:
    """fa4 takes 1 ms, whoever comes next 1.25 ms."""

    def __init__(self):
        self.known = {}

    def estimate(self, call):
        self.known.setdefault(call, 1.0 + 0.25 * len(self.known))
        return 10.0

    def batch(self, call, calls):
        time.sleep(0.003)  # long enough for a reading of the clock
        return self.known[call]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def read(self) -> Reading:
            return Reading(1500.0, 690.0, is_capped=True)

    device = SimpleNamespace(major=9, multi_processor_count=132, L2_cache_size=1, uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(command, "DEVICE", "cpu")
    monkeypatch.setattr(command, "DeviceTimer", Timer)
    monkeypatch.setattr(command, "need_gpu", lambda: None)
    monkeypatch.setattr(command, "device_sampler", lambda: Sampler(Reader(), period_s=1e-4))
    found = [Reference("fa4"), Reference("peer", offset=0.5), Refusing("small")]
    monkeypatch.setattr(
        contenders, "available", lambda operation, wanted: (found, {"gone": "No module named gone"})
    )


@pytest.mark.usefixtures("no_gpu")
def test_a_comparison_from_command_line_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = cases.both_masks((cases.dense(1, 64, 2, 2, 16),))
    csv = tmp_path / "rows.csv"
    arguments = command.make_parser("?").parse_args(
        ["--rounds", "5", "--csv", str(csv), "--out", str(tmp_path / "out")]
    )
    command.compare("forward", chosen, arguments, lambda case: case.forward_flops, "tflops")
    text = capsys.readouterr().out
    assert "not available: gone: No module named gone" in text
    assert "small refused: head_dim=16 is too small" in text
    assert "| 1.250 of peer" in text
    assert "peer output differs by" in text
    assert "1500 MHz 690 W" in text

    table = pd.read_csv(csv)
    assert len(table) == 2 * 3
    columns = [
        "operation", "case", "batch", "seqlen_q", "seqlen_k", "tokens_k", "heads_q", "heads_kv",
        "head_dim", "head_dim_v", "causal", "page_size", "contender", "version", "ms", "ms_fastest",
        "ms_slowest", "spread", "rounds", "ours_faster", "difference", "sm_mhz", "sm_mhz_lowest",
        "power_w", "capped_share", "note", "tflops", "tensor_share",
    ]  # fmt: skip
    assert list(table) == [*columns, *records.SURROUNDINGS]
    ours, peer, small = table.iloc[:3].to_dict("records")
    assert (ours["ms"], peer["ms"], peer["ours_faster"]) == (1.0, 1.25, 1.25)
    assert ours["tflops"] == pytest.approx(2 * 2 * 64 * 64 * 32 / 1e9)
    assert ours["difference"] == 0.0
    assert peer["difference"] > 0.1
    assert (ours["sm_mhz"], ours["power_w"], ours["capped_share"]) == (1500.0, 690.0, 1.0)
    assert small["note"] == "refused: head_dim=16 is too small"
    assert pd.isna(small["ms"])
    written = pd.read_csv(tmp_path / "out" / "forward.csv")
    assert written["ms"].equals(table["ms"])
    page = (tmp_path / "out" / "forward.md").read_text()
    assert page.startswith("| case | fa4 | peer | fa4 / best other |")
    assert page.count("1.250") == 2


def test_nvml_that_is_missing_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with command.device_sampler() as sampler:
        assert sampler is None
    assert "clock and power are not recorded" in capsys.readouterr().out


def test_the_page_about_benchmarks_names_every_script_and_no_other() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `perf\.(\w+)` \|", page, re.M))
    assert listed == set(SCRIPTS)
    for name in contenders.CONTENDERS:
        assert f"`{name}`" in page
    for used in re.findall(r"python -m perf\.(\w+)", page):
        assert used in SCRIPTS
    for path in (root / "perf").glob("*.py"):
        is_script = "def main()" in path.read_text(encoding="utf-8")
        assert is_script == (path.stem in SCRIPTS)

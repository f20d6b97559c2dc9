"""A tiny Llama's steps, timed by a fake clock on the CPU, where no kernel runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl

pd = pytest.importorskip("pandas")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from fa4.integrations import transformers as fa4_transformers  # noqa: E402
from perf import model_step, records  # noqa: E402  they need pandas
from perf.command import make_parser  # noqa: E402
from perf.device_state import Reading, Sampler  # noqa: E402
from perf.model_step import Attention, Step  # noqa: E402

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
OURS = "fa4_reference_of_a_test"


@contextlib.contextmanager
def broken() -> Iterator[None]:
    raise RuntimeError("no such backend here\nand more")
    yield


@pytest.fixture
def found() -> Iterator[list[Attention]]:
    """sdpa, ours by its reference, one with wrong answers, one that refuses."""
    fa4_transformers.register(OURS, backend="reference")

    def zeros(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return 0 * query.transpose(1, 2) + 0 * (key.sum() + value.sum()), None

    transformers.AttentionInterface.register("zeros_of_a_test", zeros)
    yield [
        Attention("sdpa", "sdpa", "torch"),
        Attention("fa4-transformers", OURS, "fa4"),
        Attention("zeros", "zeros_of_a_test", "1"),
        Attention("broken", "sdpa", "2", broken),
    ]
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        for name in (OURS, "zeros_of_a_test"):
            interface._global_mapping.pop(name, None)


class Timer:
    """Each contender takes a millisecond less than the one before; notes what stood around it."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self.implementations: list[str] = []

    def estimate(self, call: Any) -> float:
        raise AssertionError("steps are estimated by a batch of one")

    def batch(self, call: Any, calls: int) -> float:
        call()
        self.implementations.append(call.model.config._attn_implementation)
        return self.known.setdefault(id(call), 10.0 - len(self.known))


class Reader:
    def read(self) -> Reading:
        return Reading(1500.0, 690.0, is_capped=True)


@pytest.mark.parametrize("phase", ["prefill", "training"])
def test_a_row_for_each_contender_on_the_cpu_where_no_kernel_runs(
    phase: str, found: list[Attention]
) -> None:
    model = model_step.make_model("cpu", 2, TINY)
    step = Step(phase, 2, 32)
    timer = Timer()
    with Sampler(Reader(), period_s=1e-4) as sampler:
        rows = model_step.measure(model, step, found, 3, timer, sampler)
    sdpa, ours, zeros, refused = rows
    assert [row["contender"] for row in rows] == [each.name for each in found]
    assert [row["ms"] for row in rows] == [10.0, 9.0, 8.0, None]
    assert sdpa["tokens"] == 64
    assert sdpa["tokens_per_s"] == pytest.approx(6400)
    assert sdpa["faster_than_sdpa"] == 1.0
    assert ours["faster_than_sdpa"] == pytest.approx(10 / 9)
    assert sdpa["sm_mhz"] == 1500.0
    # The answers are those of the attention that the row names.
    assert sdpa["difference"] == 0.0
    assert 0.0 <= ours["difference"] < 0.05
    assert zeros["difference"] > 0.05
    assert "result differs by" in model_step.line(zeros)
    assert refused["note"] == "refused: no such backend here"
    assert model_step.line(refused).endswith("refused: no such backend here")
    # An estimate, then three rounds, which another contender begins each time.
    order = ["sdpa", OURS, "zeros_of_a_test"]
    turns = [order, order[1:] + order[:1], order[2:] + order[:2]]
    assert timer.implementations == [*order, *(name for turn in turns for name in turn)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_training_step_has_gradients_of_every_weight(found: list[Attention]) -> None:
    model = model_step.make_model("cpu", 1, TINY)
    ids = torch.arange(24)[None]
    run = model_step.Run(model, Step("training", 1, 24), found[0], ids)
    with run.in_place():
        run()
        first = [parameter.grad.clone() for parameter in model.parameters()]
        run()  # gradients do not add up from step to step
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert gradient.abs().sum() > 0


def test_a_prefill_gives_the_last_tokens_logits_without_a_graph(found: list[Attention]) -> None:
    model = model_step.make_model("cpu", 1, TINY)
    ids = torch.arange(48).view(2, 24)
    logits = model_step.Run(model, Step("prefill", 2, 24), found[0], ids).prefill()
    assert not logits.requires_grad
    assert torch.equal(logits, model(input_ids=ids).logits[:, -1:])


def test_contenders_are_torchs_attentions_and_ours() -> None:
    try:
        found = {each.name: each for each in model_step.attentions()}
        assert list(found) == ["sdpa", "sdpa-cudnn", "sdpa-flash", "fa4-sdpa", "fa4-transformers"]
        assert [each.name for each in model_step.attentions("^fa4")] == list(found)[3:]
        with pytest.raises(SystemExit, match="matches none of sdpa, sdpa-cudnn"):
            model_step.attentions("^nobody$")
        with found["sdpa-cudnn"].context():
            backends = torch.nn.attention._cur_sdpa_kernel_backends()
            assert backends == [SDPBackend.CUDNN_ATTENTION]
        before = current_flash_attention_impl()
        with found["fa4-sdpa"].context():
            assert current_flash_attention_impl() == "fa4_kernels"
            backends = torch.nn.attention._cur_sdpa_kernel_backends()
            assert backends == [SDPBackend.FLASH_ATTENTION]
        assert current_flash_attention_impl() == before
        implementation = found["fa4-transformers"].implementation
        assert transformers.AttentionInterface().get(implementation) is not None
    finally:
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            interface._global_mapping.pop(fa4_transformers.NAME, None)


def test_files_have_times_and_ratios(
    tmp_path: Path, found: list[Attention], capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_step.make_model("cpu", 1, TINY)
    steps = (Step("prefill", 1, 16), Step("training", 1, 16))
    rows = [
        row for step in steps for row in model_step.measure(model, step, found, 1, Timer(), None)
    ]
    model_step.finish(rows, make_parser("?").parse_args(["--out", str(tmp_path)]))
    written = pd.read_csv(tmp_path / "model_step.csv")
    assert len(written) == 2 * len(found)
    assert list(written)[-len(records.SURROUNDINGS) :] == list(records.SURROUNDINGS)
    assert written["note"][3] == "refused: no such backend here"
    head, _, prefill, training = (tmp_path / "model_step.md").read_text().splitlines()
    assert head == (
        "| case | sdpa, ms | fa4-transformers, ms | zeros, ms | fa4-transformers, times sdpa "
        "| zeros, times sdpa |"
    )
    assert prefill == "| prefill-16-b1 | 10.000 | 9.000 | 8.000 | 1.111 | 1.250 |"
    assert training.startswith("| training-16-b1 | 10.000 |")
    assert re.search(r"prefill-16-b1 +10\.0 +9\.0", capsys.readouterr().out)


def test_without_torchs_choice_there_are_no_ratios(found: list[Attention]) -> None:
    model = model_step.make_model("cpu", 1, TINY)
    rows = model_step.measure(model, Step("prefill", 1, 16), found[1:2], 1, Timer(), None)
    assert rows[0]["faster_than_sdpa"] is None
    assert list(model_step.table(rows)) == ["fa4-transformers, ms"]
    assert "of sdpa" not in model_step.line(rows[0])


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or later: pip install"):
        model_step.make_model("cpu", 1, TINY)


def test_the_measured_steps_are_two_of_8k_and_16k_tokens() -> None:
    assert [(step.name, step.tokens) for step in model_step.STEPS] == [
        ("prefill-4k-b2", 8192),
        ("training-4k-b2", 8192),
        ("prefill-16k-b1", 16384),
        ("training-16k-b1", 16384),
    ]

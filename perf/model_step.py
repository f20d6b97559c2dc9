"""How long do a model's prefill and training step take, with torch's attentions and with ours?

A Llama-shaped model of transformers with random weights, in bf16. A prefill is the forward pass
that fills a cache and gives the last token's logits; a training step is forward and backward of
the language model's loss, without an optimizer. Everything but attention is the same for all, so
the ratios are of whole steps, and say how much of attention's advantage a model sees.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa4.integrations import torch as fa4_torch
from fa4.versions import fa4_version, installed_version
from perf import contenders, records
from perf.cases import SEED, short
from perf.command import (
    REFUSALS,
    device_sampler,
    differences_from_first,
    make_parser,
    need_gpu,
    progress,
    selected,
    state_columns,
    time_columns,
)
from perf.device_state import Sampler
from perf.timing import Call, DeviceTimer, Timer, interleave, ratio

DEFAULT = "sdpa"  # what ratios are to
LAYERS = 4
LLAMA: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
}


@dataclass(frozen=True)
class Step:
    """phase: "prefill" or "training"; seqlen: tokens of each of ``batch`` sequences."""

    phase: str
    batch: int
    seqlen: int

    @property
    def name(self) -> str:
        return f"{self.phase}-{short(self.seqlen)}-b{self.batch}"

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen


STEPS = tuple(
    Step(phase, batch, seqlen)
    for batch, seqlen in ((2, 4096), (1, 16_384))
    for phase in ("prefill", "training")
)


@dataclass(frozen=True)
class Attention:
    """A contender: transformers' name of an attention, and the context in which a step uses it."""

    name: str
    implementation: str
    version: str
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def held_to(backend: SDPBackend) -> Callable[[], AbstractContextManager[Any]]:
    return functools.partial(sdpa_kernel, backend)


@contextlib.contextmanager
def fa4_as_torchs_flash() -> Iterator[None]:
    """SDPA held to its flash backend, with fa4 in torch's registry of flash attentions."""
    fa4_torch.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        fa4_torch.restore()


def attentions(pattern: str = "") -> list[Attention]:
    """The contenders whose name has the regular expression, torch's own choice first.

    Registers fa4 with transformers. SystemExit where none is left.
    """
    from fa4.integrations import transformers as fa4_transformers

    fa4_transformers.register()
    torchs, ours = f"torch {torch.__version__}", f"fa4 {fa4_version()}"
    known = [
        Attention(DEFAULT, "sdpa", torchs),
        Attention("sdpa-cudnn", "sdpa", torchs, held_to(SDPBackend.CUDNN_ATTENTION)),
        Attention("sdpa-flash", "sdpa", torchs, held_to(SDPBackend.FLASH_ATTENTION)),
        Attention("fa4-sdpa", "sdpa", ours, fa4_as_torchs_flash),
        Attention("fa4-transformers", fa4_transformers.NAME, ours),
    ]
    chosen = [attention for attention in known if re.search(pattern, attention.name)]
    if not chosen:
        names = ", ".join(attention.name for attention in known)
        sys.exit(f"--contenders {pattern!r} matches none of {names}")
    return chosen


def make_model(device: str, layers: int, sizes: Mapping[str, Any] = LLAMA) -> Any:
    """A Llama of random weights. Without transformers, an ImportError says what to install."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as reason:
        raise ImportError(
            "this benchmark needs transformers 5.17 or later: pip install "
            f"'fa4-kernels[transformers]' ({contenders.first_line(reason)})"
        ) from reason
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    with torch.device(device):  # random numbers of a CPU take a minute
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Run:
    """A call that makes one step of a model by one attention, once that is put in place."""

    def __init__(self, model: Any, step: Step, attention: Attention, ids: Tensor):
        self.model = model
        self.step = step
        self.attention = attention
        self.ids = ids

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """What has to stand around calls, and costs time that is not a step's."""
        self.model.set_attn_implementation(self.attention.implementation)
        with self.attention.context():
            yield

    def __call__(self) -> None:
        if self.step.phase == "prefill":
            self.prefill()
        else:
            self.train()

    def prefill(self) -> Tensor:
        """(batch, 1, vocabulary): the last tokens' logits."""
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1).logits
        return logits

    def train(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

    def result(self) -> Tensor:
        """What contenders are compared by: logits, or the gradient of the first layer's queries."""
        if self.step.phase == "prefill":
            return self.prefill()
        self.train()
        gradient: Tensor = self.model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        return gradient


class InPlace:
    """A timer that puts each run's attention in place first, outside the clock."""

    def __init__(self, timer: Timer):
        self.timer = timer

    def estimate(self, call: Call) -> float:
        """Of one step: they are long, and warm by the one that gave the result."""
        assert isinstance(call, Run)
        with call.in_place():
            return self.timer.batch(call, 1)

    def batch(self, call: Call, calls: int) -> float:
        assert isinstance(call, Run)
        with call.in_place():
            return self.timer.batch(call, calls)


def measure(
    model: Any,
    step: Step,
    found: Sequence[Attention],
    rounds: int,
    timer: Timer,
    sampler: Sampler | None,
) -> list[dict[str, Any]]:
    """A row for each contender: times, ratio to torch's own choice; or why it refused."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (step.batch, step.seqlen), generator=generator)
    ids = ids.to(model.device)
    runs: dict[str, Call] = {}
    results: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    for attention in found:
        run = Run(model, step, attention, ids)
        try:
            with run.in_place():
                results[attention.name] = run.result()
        except REFUSALS as refusal:
            notes[attention.name] = f"refused: {contenders.first_line(refusal)}"
        else:
            runs[attention.name] = run
        if model.device.type == "cuda":
            torch.cuda.synchronize()  # an error of the device itself ends the run here
    differences = differences_from_first(results)
    results.clear()
    times = interleave(runs, InPlace(timer), rounds) if runs else {}
    model.zero_grad(set_to_none=True)
    rows = []
    for attention in found:
        name = attention.name
        row = {
            "case": step.name,
            "phase": step.phase,
            "batch": step.batch,
            "seqlen": step.seqlen,
            "tokens": step.tokens,
            "layers": model.config.num_hidden_layers,
            "contender": name,
            "version": attention.version,
            "transformers": installed_version("transformers"),
            "ms": None,
        }
        if name in times:
            row |= time_columns(times[name])
            row["tokens_per_s"] = step.tokens / times[name].median * 1e3
            default = times.get(DEFAULT)
            row["faster_than_sdpa"] = None if default is None else ratio(times[name], default)
            row["difference"] = differences[name]
            row |= state_columns(sampler.over(times[name].intervals) if sampler else None)
        rows.append(row | {"note": notes.get(name, "")})
    return rows


def line(row: Mapping[str, Any]) -> str:
    start = f"{row['case']:18} {row['contender']:17}"
    if row["ms"] is None:
        return f"{start} {row['note']}"
    parts = [f"{row['ms']:8.2f} ms", f"{row['tokens_per_s']:9.0f} tokens/s"]
    if row["faster_than_sdpa"] is not None:
        parts.append(f"{row['faster_than_sdpa']:.3f} of {DEFAULT}")
    if row["sm_mhz"]:
        parts.append(f"{row['sm_mhz']:.0f} MHz {row['power_w']:.0f} W")
    if row["difference"] > 0.05:
        parts.append(f"result differs by {row['difference']:.3f}")
    return f"{start} {'  '.join(parts)}"


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A line for each step: milliseconds by contender, and how much faster than torch's choice."""
    wide = records.comparison(rows, "ms").add_suffix(", ms")
    if all(row["faster_than_sdpa"] is None for row in rows):
        return wide
    speedups = records.comparison(rows, "faster_than_sdpa")
    return wide.join(speedups.drop(columns=DEFAULT).add_suffix(f", times {DEFAULT}"))


def finish(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table, and write the files that were asked for."""
    measured = [row for row in rows if row["ms"] is not None]
    wide = table(measured) if measured else None
    if wide is not None:
        print(f"\n{wide.round(3).to_string()}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        records.write_csv(arguments.out / "model_step.csv", rows)
        if wide is not None:
            (arguments.out / "model_step.md").write_text(records.markdown(wide, 3))
    if arguments.csv:
        records.write_csv(arguments.csv, rows)


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="(default %(default)s)")
    arguments = parser.parse_args()
    need_gpu()
    chosen = selected(STEPS, arguments.cases)
    try:
        model = make_model("cuda", arguments.layers)
    except ImportError as reason:
        sys.exit(str(reason))
    found = attentions(arguments.contenders)
    rows: list[dict[str, Any]] = []
    with device_sampler() as sampler:
        for step in progress(chosen, lambda step: step.name):
            for row in measure(model, step, found, arguments.rounds, DeviceTimer(), sampler):
                print(line(row), flush=True)
                rows.append(row)
    finish(rows, arguments)


if __name__ == "__main__":
    main()

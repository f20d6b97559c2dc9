"""`python -m fa4 demo`: attention on a real text, by everything this machine offers, checked.

The text is the source of fa4 itself. Its words become vectors, and fixed random projections make
q, k and v of them, as the first layer of a language model would. Every result is compared with
attention computed in float64 on the CPU by the few lines in `exact_attention`, which share no code
with what they check.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fa4.attention import flash_attn_func
from fa4.compiler import KernelCompileError
from fa4.explanation import explain
from fa4.online_softmax import tiled_attention
from fa4.versions import DependencyError

HEADS_Q, HEADS_KV, HEAD_DIM = 8, 2, 128
MODEL_DIM = 256  # of the word vectors
CPU_TOKENS, GPU_TOKENS = 512, 4096
LSE_BUDGET = 1e-3
EMULATED = ("sm_90a", "sm_100a")  # architectures whose kernels run where there is no GPU


class TextTooShortError(ValueError):
    """More words are asked for than the text has."""


class Inputs(NamedTuple):
    """Words, their q (1, tokens, HEADS_Q, HEAD_DIM), k and v (1, tokens, HEADS_KV, HEAD_DIM)."""

    tokens: list[str]
    q: Tensor
    k: Tensor
    v: Tensor


Call = Callable[[], tuple[Tensor, Tensor]]  # computes (out, lse)


def words_of_this_package(count: int) -> list[str]:
    """The first `count` words, numbers and signs of the package's own source text."""
    folder = Path(__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    tokens = re.findall(r"\w+|[^\w\s]", text)
    if len(tokens) < count:
        raise TextTooShortError(f"the text has {len(tokens)} words, and {count} are asked for.")
    return tokens[:count]


def make_inputs(count: int, dtype: torch.dtype) -> Inputs:
    """q, k and v of `count` words, on the CPU; the same in every run.

    A word's vector is a fixed random one plus sinusoids of its position. Half of a key's projection
    is that of the first query head in its group, so that a word attends most to its own repeats.
    """
    tokens = words_of_this_package(count)
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(tokens))}
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32)

    frequency = torch.exp(torch.arange(MODEL_DIM // 2) * (-2 * math.log(10_000.0) / MODEL_DIM))
    angle = torch.arange(count)[:, None] * frequency
    position = torch.cat([angle.sin(), angle.cos()], dim=-1)
    x = normal(len(vocabulary), MODEL_DIM)[[vocabulary[word] for word in tokens]] + 0.5 * position

    scale = MODEL_DIM**-0.5
    w_q = normal(MODEL_DIM, HEADS_Q, HEAD_DIM) * scale
    w_k = 0.5 * w_q[:, :: HEADS_Q // HEADS_KV] + 0.5 * normal(MODEL_DIM, HEADS_KV, HEAD_DIM) * scale
    w_v = normal(MODEL_DIM, HEADS_KV, HEAD_DIM) * scale
    q, k, v = (torch.einsum("nc,chd->nhd", x, w)[None].to(dtype) for w in (w_q, w_k, w_v))
    return Inputs(tokens, q, k, v)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of the inputs as they are, in float64 with whole score matrices.

    Returns out (1, tokens, heads_q, head_dim), lse (1, heads_q, tokens) and the probabilities
    (heads_q, tokens, tokens).
    """
    q, k, v = (x[0].transpose(0, 1).double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
    is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores.masked_fill_(is_hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse[..., None])
    return (probabilities @ v).transpose(0, 1)[None], lse[None], probabilities


def error_budget(inputs: Inputs, exact: Tensor, probabilities: Tensor) -> float:
    """Largest error allowed in an output of the inputs' dtype.

    1.5 times the error of plain attention in that dtype (probabilities and output rounded to it),
    plus one rounding of the largest output.
    """
    dtype = inputs.q.dtype
    v = inputs.v[0].transpose(0, 1).float().repeat_interleave(HEADS_Q // HEADS_KV, dim=0)
    plain = (probabilities.to(dtype).float() @ v).to(dtype).double().transpose(0, 1)[None]
    plain_error = (plain - exact).abs().max().item()
    return 1.5 * plain_error + exact.abs().max().item() * torch.finfo(dtype).eps / 2


def computations(inputs: Inputs) -> Iterator[tuple[str, Call]]:
    """Everything on this machine that computes attention: a name that says where, and a call."""
    q, k, v = inputs.q, inputs.k, inputs.v

    def by(backend: str, device: str, arch: str | None = None) -> Call:
        def call() -> tuple[Tensor, Tensor]:
            tensors = [x.to(device) for x in (q, k, v)]
            result = flash_attn_func(
                *tensors, causal=True, return_lse=True, backend=backend, arch=arch
            )
            assert isinstance(result, tuple)
            return result

        return call

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        decision = explain(q.cuda(), k.cuda(), v.cuda(), causal=True)
        if decision.kernel is not None:
            yield f"kernel {decision.kernel_name} on {device}", by("fa4", "cuda")
        yield f"reference (PyTorch) on {device}", by("reference", "cuda")
    elif importlib.util.find_spec("numpy") is None:
        print(
            'fa4\'s kernels are not run: the emulator needs pip install "fa4-kernels[emulator]".\n'
        )
    else:
        for arch in EMULATED:
            decision = explain(q, k, v, causal=True, backend="emulator", arch=arch)
            name = f"kernel {decision.kernel_name} emulated on the CPU"
            yield name, by("emulator", "cpu", arch=arch)
    yield "reference (PyTorch) on the CPU", by("reference", "cpu")
    tiled = functools.partial(tiled_attention, q, k, v, tile_m=128, tile_n=128, causal=True)
    yield "tiled online softmax (PyTorch) on the CPU", tiled


def check(inputs: Inputs) -> bool:
    """Run every computation and print its errors beside what is allowed; whether all fit."""
    exact_out, exact_lse, probabilities = exact_attention(inputs.q, inputs.k, inputs.v)
    budget = error_budget(inputs, exact_out, probabilities)
    all_fit = True
    calls = list(computations(inputs))
    width = max(len(name) for name, _ in calls)
    print(f"{'':{width}} {'max error':>10} {'allowed':>9} {'lse error':>10} {'allowed':>9}")
    for name, call in calls:
        try:
            out, lse = call()
        except (DependencyError, KernelCompileError) as error:
            print(f"{name:{width}} FAILED: {error}")
            all_fit = False
            continue
        out_error = (out.double().cpu() - exact_out).abs().max().item()
        lse_error = (lse.double().cpu() - exact_lse).abs().max().item()
        # Written so that a NaN fails.
        fits = out_error <= budget and lse_error <= LSE_BUDGET
        all_fit = all_fit and fits
        print(
            f"{name:{width}} {out_error:10.2e} {budget:9.2e} {lse_error:10.2e} {LSE_BUDGET:9.0e}"
            f"  {'ok' if fits else 'WRONG'}"
        )
    print(f"\n{most_attended(inputs.tokens, probabilities)}")
    return all_fit


def most_attended(tokens: list[str], probabilities: Tensor) -> str:
    """A sentence on where the last repeated word looks, by the first query head."""
    first_seen: dict[str, int] = {}
    repeated = [
        place
        for place, word in enumerate(tokens)
        if first_seen.setdefault(word, place) != place and word.isidentifier()
    ]
    place = repeated[-1]
    weights, places = probabilities[0, place].topk(3)
    seen = ", ".join(
        f"{tokens[j]!r} at {j} ({weight:.0%})"
        for weight, j in zip(weights.tolist(), places.tolist(), strict=True)
    )
    return f"Word {place}, {tokens[place]!r}, attends most to: {seen}."


def run(num_tokens: int | None = None) -> int:
    """The whole demo; returns the exit code, 0 if everything was within its budget.

    num_tokens  length of the text; by default what the fastest device here does in a moment
    """
    start = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    count = num_tokens or (GPU_TOKENS if has_gpu else CPU_TOKENS)
    inputs = make_inputs(count, torch.bfloat16)
    device = torch.cuda.get_device_name() if has_gpu else "none, the CPU does it"
    print(
        f"GPU: {device}\n"
        f"Text: the first {count} words of fa4's own source ({len(set(inputs.tokens))} different)\n"
        f"Attention: causal, {HEADS_Q} query heads on {HEADS_KV} key/value heads of {HEAD_DIM}, "
        f"bf16; errors are against float64\n"
    )
    passed = check(inputs)
    print(f"\n{'PASS' if passed else 'FAIL'} ({time.perf_counter() - start:.1f} s)")
    return 0 if passed else 1

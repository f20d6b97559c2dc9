"""Tiny random transformers models whose attention is our Hopper kernels.

The bar is that of every numerical test: an error against the float32 model of at most 1.5 times
that of transformers' eager attention in the same half type, and one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4.integrations import transformers as fa4_transformers
from tests.gpu.kernel_names import assert_ours, kernels_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.integrations.tiny_models import (  # noqa: E402  it imports transformers
    DECODERS,
    ENCODERS,
    make_model,
    padding,
    tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

DEVICE = "cuda"
BACKEND = "fa4"
NAME = "fa4_hopper"
PAGED_NAME = f"paged|{NAME}"
BATCH, LENGTH = 4, 150  # more than a tile of keys
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fa4_transformers.register(NAME, backend=BACKEND)
    yield
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(NAME)
    transformers.AttentionInterface._global_mapping.pop(PAGED_NAME)


def models(name: str) -> tuple[Any, Any]:
    """The same model in bf16 and, with the values that bf16 left of its weights, in float32."""
    half = make_model(name, BF16, DEVICE)
    wide = make_model(name, torch.float32, DEVICE)
    wide.load_state_dict(half.state_dict())
    wide.set_attn_implementation("eager")
    return half, wide


def assert_as_good_as_eager(found: Tensor, eager: Tensor, right: Tensor) -> None:
    scale = float(right.abs().max())
    budget = 1.5 * float((eager - right).abs().max()) + torch.finfo(BF16).eps / 2 * scale
    error = float((found - right).abs().max())
    assert error <= budget, f"error {error:.3e}, allowed {budget:.3e}, largest value {scale:.3e}"


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_are_as_good_as_eager_attention(name: str, kind: str) -> None:
    half, wide = models(name)
    # Layers amplify differences of rounding: gpt_oss may even choose other experts.
    ids, mask = tokens(BATCH, LENGTH // 2, DEVICE), padding(kind, BATCH, LENGTH // 2, DEVICE)
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        right = wide(**inputs).logits[mask.bool()]
        results = []
        for implementation in (NAME, "eager"):
            half.set_attn_implementation(implementation)
            results.append(half(**inputs).logits[mask.bool()])
    if name != "gpt_oss":
        assert_as_good_as_eager(*results, right)
        return
    typical = [(result - right).abs().quantile(0.5) for result in results]
    assert typical[0] <= 1.5 * typical[1]


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "bert", "modernbert"])
def test_gradients_of_a_loss_are_as_good_as_with_eager_attention(name: str, kind: str) -> None:
    half, wide = models(name)
    ids, mask = tokens(BATCH, LENGTH, DEVICE), padding(kind, BATCH, LENGTH, DEVICE)
    labels = ids.masked_fill(mask == 0, -100)
    if name in DECODERS:
        labels = labels.masked_fill(mask.cumsum(-1) == 1, -100)  # foretold by padding

    def gradients(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}

    right = gradients(wide)
    results = []
    for implementation in (NAME, "eager"):
        half.set_attn_implementation(implementation)
        results.append(gradients(half))
    found, eager = results
    assert found.keys() == eager.keys() == right.keys()

    def distance(one: dict[str, Tensor]) -> float:
        return sum(float((one[n] - g).square().sum()) for n, g in right.items()) ** 0.5

    size = sum(float(g.square().sum()) for g in right.values()) ** 0.5
    assert distance(found) <= 1.5 * distance(eager) + torch.finfo(BF16).eps / 2 * size


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_writes_what_the_float32_model_finds_likeliest(
    name: str, kind: str, cache: str | None
) -> None:
    """Each token chosen is as likely to the float32 model as its own choice, but for rounding."""
    half, wide = models(name)
    half.set_attn_implementation(NAME)
    ids, mask = tokens(BATCH, 40, DEVICE), padding(kind, BATCH, 40, DEVICE)
    ids = ids.masked_fill(mask == 0, 0)
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    written = half.generate(ids, attention_mask=mask, **options)
    half.set_attn_implementation("eager")
    eager = half.generate(ids, attention_mask=mask, **options)
    shortfalls = []
    for sequence in (written, eager):
        whole_mask = torch.nn.functional.pad(mask, (0, 9), value=1)
        positions = (whole_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = wide(sequence, attention_mask=whole_mask, position_ids=positions).logits
        chosen = sequence[:, 40:, None]
        logits = logits[:, 39:-1]
        shortfall = logits.amax(-1) - logits.gather(-1, chosen)[..., 0]
        shortfalls.append(float(shortfall.max()) / float(logits.abs().max()))
    assert shortfalls[0] <= max(1.5 * shortfalls[1], 0.05)


takes_paged_names = pytest.mark.skipif(
    "paged|sdpa" not in transformers.AttentionInterface(),
    reason=f"transformers {transformers.__version__} admits no implementation but its own",
)


def generate_batch(model: Any, prompts: list[list[int]], uses_graphs: bool) -> list[list[int]]:
    """9 tokens after each prompt by continuous batching, 64 tokens a step in blocks of 16."""
    results = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=16, num_blocks=64, max_batch_tokens=64, use_cuda_graph=uses_graphs
        ),
        progress_bar=False,
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    by_request = sorted(results.items(), key=lambda item: int(item[0].split("_")[-1]))
    return [result.generated_tokens for _, result in by_request]


def some_prompts() -> list[list[int]]:
    return [tokens(1, length)[0].tolist() for length in (5, 70, 2, 101, 30)]


@takes_paged_names
@pytest.mark.parametrize("uses_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", DECODERS)
def test_continuous_batching_writes_what_the_float32_model_finds_likeliest(
    name: str, uses_graphs: bool
) -> None:
    half, wide = models(name)
    prompts = some_prompts()
    half.set_attn_implementation(PAGED_NAME)
    written = generate_batch(half, prompts, uses_graphs)
    half.set_attn_implementation("eager")
    shortfalls: dict[str, list[float]] = {"ours": [], "eager": []}
    for prompt, ours in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        eager = half.generate(ids, max_new_tokens=9, do_sample=False)[0, len(prompt) :].tolist()
        for whose, answer in (("ours", ours), ("eager", eager)):
            with torch.no_grad():
                logits = wide(torch.tensor([prompt + answer], device=DEVICE)).logits[0]
            logits = logits[len(prompt) - 1 : -1]
            chosen = logits.gather(-1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
            shortfall = (logits.amax(-1) - chosen).max() / logits.abs().max()
            shortfalls[whose].append(float(shortfall))
    assert max(shortfalls["ours"]) <= max(1.5 * max(shortfalls["eager"]), 0.05)


@takes_paged_names
def test_continuous_batching_runs_our_kernels_and_no_other_attention() -> None:
    half, _ = models("llama")
    half.set_attn_implementation(PAGED_NAME)
    prompts = some_prompts()
    names = kernels_of(lambda: generate_batch(half, prompts, uses_graphs=False))
    assert_ours(names, "forward", "decode")


def test_packed_documents_do_not_see_each_other() -> None:
    half, _ = models("llama")
    half.set_attn_implementation(NAME)
    lengths = [60, 1, 89]
    ids = tokens(1, 150, DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    with torch.no_grad():
        found = half(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        alone = [half(input_ids=part[None]).logits[0] for part in ids[0].split(lengths)]
    expected = torch.cat(alone)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_training_step_runs_our_kernels_and_no_other_attention() -> None:
    half, _ = models("llama")
    half.set_attn_implementation(NAME)
    ids = tokens(BATCH, LENGTH, DEVICE)

    def step() -> None:
        half(input_ids=ids).logits.float().square().mean().backward()

    assert_ours(kernels_of(step), "forward", "backward")


def test_a_step_of_generation_decodes_with_our_kernel() -> None:
    half, _ = models("llama")
    half.set_attn_implementation(NAME)
    ids, mask = tokens(BATCH, 40, DEVICE), padding("left", BATCH, 40, DEVICE)
    cache = transformers.DynamicCache(config=half.config)
    with torch.no_grad():
        half(input_ids=ids[:, :39], attention_mask=mask[:, :39], past_key_values=cache)

        def step() -> None:
            half(input_ids=ids[:, 39:], attention_mask=mask, past_key_values=cache)
            cache.crop(-1)

        assert_ours(kernels_of(step), "decode")


def test_a_compiled_model_gives_logits_as_good_as_the_eager_ones() -> None:
    torch._dynamo.reset()
    half, wide = models("llama")
    half.set_attn_implementation(NAME)
    ids, mask = tokens(BATCH, LENGTH, DEVICE), padding("left", BATCH, LENGTH, DEVICE)

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        return half(input_ids=ids, attention_mask=mask, use_cache=False).logits

    with torch.no_grad():
        right = wide(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        eager = forward(ids, mask)[mask.bool()]
        found = torch.compile(forward, fullgraph=True)(ids, mask)[mask.bool()]
    assert_as_good_as_eager(found, eager, right)

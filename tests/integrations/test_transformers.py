"""fa4.integrations.transformers: tiny random models give what transformers' own attention gives.

No kernel runs here: the same functions are registered with the reference behind them. With kernels:
tests/gpu/test_transformers.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import fa4
from fa4.integrations import transformers as fa4_transformers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.integrations.tiny_models import (  # noqa: E402  it imports transformers
    DECODERS,
    ENCODERS,
    VOCABULARY,
    make_model,
    padding,
    tokens,
)

NAME = "fa4_reference"
PAGED_NAME = f"paged|{NAME}"
BATCH, LENGTH = 4, 13
MODELS = [*DECODERS, *ENCODERS]
WINDOWED = ("gemma2", "gpt_oss", "modernbert")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The name is known to transformers during a test."""
    fa4_transformers.register(NAME, backend="reference")
    yield
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(NAME)
    transformers.AttentionInterface._global_mapping.pop(PAGED_NAME)


def logits(model: Any, implementation: str, **inputs: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model(**inputs).logits


def both(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Logits by fa4 and by transformers' eager attention."""
    return logits(model, NAME, **inputs), logits(model, "eager", **inputs)


def assert_close(one: Tensor, other: Tensor) -> None:
    """Of float32 results that were computed in another order."""
    assert (one - other).abs().max() < 2e-5 * max(1.0, float(other.abs().max()))


# -- logits, gradients, generation ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_eager_attention_no_kernel_ran(name: str, kind: str) -> None:
    model, ids = make_model(name), tokens(BATCH, LENGTH)
    mask = padding(kind, BATCH, LENGTH)
    if kind == "holes" and name in WINDOWED:
        with pytest.raises(NotImplementedError, match="attention_mask has zeros between ones"):
            logits(model, NAME, input_ids=ids, attention_mask=mask)
        return
    with torch.no_grad():
        found, expected = both(model, input_ids=ids, attention_mask=mask)
        unmasked = logits(model, NAME, input_ids=ids)
    assert_close(found[mask.bool()], expected[mask.bool()])
    # The mask matters, and is needed only where something is padded.
    differs = (unmasked - found)[mask.bool()].abs().max() > 1e-2
    assert bool(differs) == (kind in ("left", "holes") or (kind == "right" and name in ENCODERS))


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_loss_equal_eager_attention_no_kernel_ran(name: str, kind: str) -> None:
    model, ids = make_model(name), tokens(BATCH, LENGTH)
    mask = padding(kind, BATCH, LENGTH)
    labels = ids.masked_fill(mask == 0, -100)
    if name in DECODERS:
        # The first token would be foretold by a row of padding, which means nothing.
        labels = labels.masked_fill(mask.cumsum(-1) == 1, -100)
    gradients = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert (found[parameter] - gradient).abs().max() < 2e-4 * scale, parameter
    sinks = [n for n in expected if n.endswith("sinks")]
    assert (len(sinks) > 0) == (name == "gpt_oss")
    assert all(expected[n].abs().max() > 0 for n in sinks)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_equals_eager_attention_no_kernel_ran(
    name: str, kind: str, cache: str | None
) -> None:
    """Longer than the windows, so that sliding caches roll over."""
    model, ids = make_model(name), tokens(BATCH, LENGTH)
    mask = padding(kind, BATCH, LENGTH)
    ids = ids.masked_fill(mask == 0, 0)
    written = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        written.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=9,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
        )
    assert written[0].shape == (BATCH, LENGTH + 9)
    assert torch.equal(*written)


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_pieces_equals_the_whole_no_kernel_ran(name: str) -> None:
    """Several queries with a cache before them, padded on the left."""
    model, ids = make_model(name), tokens(BATCH, LENGTH)
    mask = padding("left", BATCH, LENGTH)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        cache = transformers.DynamicCache(config=model.config)
        pieces = [
            model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            ).logits
            for start, end in ((0, 5), (5, 12), (12, 13))
        ]
    assert_close(torch.cat(pieces, dim=1)[mask.bool()], whole[mask.bool()])


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_queries_before_many_keys_are_decoded_no_kernel_ran(
    monkeypatch: pytest.MonkeyPatch, rows: int, kind: str
) -> None:
    calls = 0

    def decode(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return fa4.flash_attn_with_kvcache(*arguments, **options)

    monkeypatch.setattr(fa4_transformers, "flash_attn_with_kvcache", decode)
    module = attention_module(torch.float32)
    q, k, v = torch.randn(3, 4, rows, 16), torch.randn(3, 2, 20, 16), torch.randn(3, 2, 20, 16)
    mask = padding(kind, 3, 20).bool()
    sink = torch.randn(4)
    visible = torch.ones(rows, 20, dtype=torch.bool).tril(20 - rows) & mask[:, None, None]
    scores = q @ k.repeat_interleave(2, dim=1).mT / 4
    scores = torch.cat(
        [scores.masked_fill(~visible, -torch.inf), sink.expand(3, rows, 4).mT[..., None]], -1
    )
    expected = (scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, dim=1)).transpose(1, 2)
    used = mask[:, -rows:]
    out = call(module, q, k, v, attention_mask=mask, s_aux=sink)
    assert_close(out[used], expected[used])
    is_decoded = rows <= 8 and kind in ("none", "left")
    assert calls == is_decoded
    # Gradients are not for decoding.
    call(module, q.requires_grad_(), k, v, attention_mask=mask, s_aux=sink).sum().backward()
    assert calls == is_decoded
    assert q.grad is not None


def test_where_decoding_has_no_kernel_the_other_kernels_are_asked_no_kernel_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise fa4.UnsupportedProblemError("no kernel")

    monkeypatch.setattr(fa4_transformers, "flash_attn_with_kvcache", refuse)
    module = attention_module(torch.float32)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(call(module, q, k, v), expected.transpose(1, 2))


# -- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_documents_in_a_row_do_not_see_each_other_no_kernel_ran(name: str, rows: int) -> None:
    """Packed by position_ids; each document alone is the answer."""
    model = make_model(name)
    model.set_attn_implementation(NAME)
    lengths = [[5, 8, 1, 3], [9, 8]][:rows]
    ids = tokens(rows, 17)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [
            torch.cat([model(input_ids=part[None]).logits[0] for part in row.split(split)])
            for row, split in zip(ids, lengths, strict=True)
        ]
    assert_close(found, torch.stack(alone))
    if name == "gpt_oss":
        return  # transformers makes its masks without positions: eager attention mixes documents
    eager = logits(model, "eager", input_ids=ids, position_ids=positions, use_cache=False)
    assert_close(found, eager.detach())


@pytest.mark.parametrize("name", DECODERS)
def test_documents_may_be_told_by_cu_seq_lens_no_kernel_ran(name: str) -> None:
    model, lengths = make_model(name), [5, 8, 1, 3]
    model.set_attn_implementation(NAME)
    ids = tokens(1, 17)
    cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        found = model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=cu_seq_lens,
            cu_seq_lens_k=cu_seq_lens,
            max_length_q=8,
            max_length_k=8,
        ).logits
        alone = [model(input_ids=part[None]).logits[0] for part in ids[0].split(lengths)]
    assert_close(found[0], torch.cat(alone))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_and_masks_that_are_written_to_are_looked_at_again_no_kernel_ran(
    mode: Any,
) -> None:
    model = make_model("llama")
    model.set_attn_implementation(NAME)
    ids = tokens(1, 8)
    with mode():
        positions, mask = torch.arange(8)[None], torch.ones(1, 8, dtype=torch.bool)
        plain = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        masked = model(input_ids=ids, attention_mask=mask).logits
        assert_close(masked, plain)
        positions[:, 4:] -= 4
        mask[:, :4] = False
        for changed in (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits,
            model(input_ids=ids, attention_mask=mask, position_ids=positions).logits,
        ):
            alone = model(input_ids=ids[:, 4:]).logits
            assert_close(changed[:, 4:], alone)
            assert (changed - plain)[:, 4:].abs().max() > 1e-2


# -- dtypes --------------------------------------------------------------------------------------


def attention_module(dtype: torch.dtype) -> torch.nn.Module:
    module = torch.nn.Module()
    module.projection = torch.nn.Linear(4, 4).to(dtype)
    module.is_causal = True
    return module


def call(module: torch.nn.Module, *tensors: Tensor, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", None)
    out, weights = fa4_transformers.attention("reference", module, *tensors, mask, **options)
    assert weights is None
    return out


def heads_first(dtype: torch.dtype = torch.float32, dim_v: int = 16) -> list[Tensor]:
    """(batch 2, heads, 6, dim)."""
    sizes = ((4, 16), (2, 16), (2, dim_v))
    return [torch.randn(2, heads, 6, dim).to(dtype) for heads, dim in sizes]


def test_float32_inputs_of_half_models_are_cast_no_kernel_ran() -> None:
    tensors = heads_first()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert call(attention_module(dtype), *tensors).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(attention_module(torch.float32), *tensors).dtype == torch.bfloat16
    quantized = attention_module(torch.float32)
    quantized.config = transformers.LlamaConfig(dtype=torch.bfloat16)
    quantized.config._is_quantized = True
    assert call(quantized, *tensors).dtype == torch.bfloat16


def test_values_may_have_a_head_dim_of_their_own_no_kernel_ran() -> None:
    tensors = heads_first(dim_v=24)
    out = call(attention_module(torch.float32), *tensors, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *tensors, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert out.shape == (2, 6, 4, 24)
    assert out.is_contiguous()
    assert_close(out, expected.transpose(1, 2))


def test_cross_attention_masks_keys_alone_no_kernel_ran() -> None:
    module = attention_module(torch.float32)
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    mask = padding("holes", 2, 6).bool()
    out = call(module, q, k, v, attention_mask=mask, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask[:, None, None], enable_gqa=True
    )
    assert_close(out, expected.transpose(1, 2))


# -- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "none", "left", "right"])
def test_a_compiled_model_gives_the_eager_logits_no_kernel_ran(kind: str | None) -> None:
    torch._dynamo.reset()
    model, ids = make_model("llama"), tokens(BATCH, LENGTH)
    model.set_attn_implementation(NAME)
    mask = None if kind is None else padding(kind, BATCH, LENGTH)

    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    with torch.no_grad():
        expected = forward(ids)
        found = torch.compile(forward, fullgraph=True, backend="aot_eager")(ids)
    used = torch.ones_like(ids) if mask is None else mask
    assert_close(found[used.bool()], expected[used.bool()])


def test_packing_by_positions_is_refused_where_it_cannot_be_seen_no_kernel_ran() -> None:
    torch._dynamo.reset()
    model, ids = make_model("llama"), tokens(1, 8)
    model.set_attn_implementation(NAME)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(positions: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    with torch.no_grad():
        assert forward(torch.arange(8)[None]).shape == (1, 8, VOCABULARY)
        with pytest.raises(RuntimeError, match="position_ids start again"):
            forward(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))


@pytest.mark.parametrize("kind", ["left", "holes"])
def test_holes_and_windows_are_refused_in_a_compiled_model_no_kernel_ran(kind: str) -> None:
    torch._dynamo.reset()
    module, tensors = attention_module(torch.float32), heads_first()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(mask: Tensor) -> Tensor:
        return call(module, *tensors, attention_mask=mask, sliding_window=3)

    mask = padding(kind, 2, 6).bool()
    if kind == "left":
        assert_close(forward(mask), call(module, *tensors, attention_mask=mask, sliding_window=3))
    else:
        with pytest.raises(RuntimeError, match="attention_mask has zeros between ones"):
            forward(mask)


# -- continuous batching -------------------------------------------------------------------------

takes_paged_names = pytest.mark.skipif(
    "paged|sdpa" not in transformers.AttentionInterface(),
    reason=f"transformers {transformers.__version__} admits no implementation but its own",
)


@pytest.fixture
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never written in a paged cache is NaN; and a CPU has memory, psutil or not."""
    module = transformers.generation.continuous_batching.cache
    create = module.PagedAttentionCache.__init__

    def poisoned(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        if hasattr(self, "cache_tensor"):  # bytes, in transformers 5.18
            self.cache_tensor.fill_(255)
        else:
            for rows in (*self.key_cache, *self.value_cache):
                rows.fill_(torch.nan)

    monkeypatch.setattr(module.PagedAttentionCache, "__init__", poisoned)
    for handler in vars(module).values():
        if hasattr(handler, "get_available_memory"):
            monkeypatch.setattr(handler, "get_available_memory", lambda self: 1 << 30)


def generate_batch(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """16 tokens a step, in blocks of 4: long prompts go in pieces, beside requests that write."""
    results = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=4, num_blocks=64, max_batch_tokens=16
        ),
        progress_bar=False,
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    by_request = sorted(results.items(), key=lambda item: int(item[0].split("_")[-1]))
    return [result.generated_tokens for _, result in by_request]


def prompts_and_answers(model: Any, new_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of several lengths, and what eager attention writes after each alone."""
    prompts = [tokens(1, length)[0].tolist() for length in (5, 13, 2, 21, 8)]
    model.set_attn_implementation("eager")
    written = [
        model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        for prompt in prompts
    ]
    return prompts, [ids[0, -new_tokens:].tolist() for ids in written]


@takes_paged_names
@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("name", DECODERS)
def test_continuous_batching_writes_what_each_request_gets_alone_no_kernel_ran(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(name)
    prompts, expected = prompts_and_answers(model, 9)
    calls = {"paged": 0, "copied": 0}
    paged, copied = fa4_transformers.flash_attn_with_kvcache, fa4_transformers._varlen

    def count(kind: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls[kind] += 1
            return function(*args, **options)

        return counted

    monkeypatch.setattr(fa4_transformers, "flash_attn_with_kvcache", count("paged", paged))
    monkeypatch.setattr(fa4_transformers, "_varlen", count("copied", copied))
    model.set_attn_implementation(PAGED_NAME)
    assert generate_batch(model, prompts, 9) == expected
    assert model.config._attn_implementation == PAGED_NAME
    # Two layers; the first step has nothing cached, and windows need copies.
    if name in WINDOWED:
        assert calls["copied"] == calls["paged"] + 2 > 10
    else:
        assert calls["paged"] > 10
        assert calls["copied"] == 2


@takes_paged_names
@pytest.mark.usefixtures("unwritten_is_nan")
def test_where_pages_have_no_kernel_a_copy_is_attended_to_no_kernel_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    prompts, expected = prompts_and_answers(model, 4)

    def refuse(*args: Any, **options: Any) -> None:
        raise fa4.UnsupportedProblemError("no kernel")

    monkeypatch.setattr(fa4_transformers, "flash_attn_with_kvcache", refuse)
    model.set_attn_implementation(PAGED_NAME)
    assert generate_batch(model, prompts, 4) == expected


def test_paged_attention_without_a_paged_cache_is_refused_no_kernel_ran() -> None:
    module, (q, k, v) = attention_module(torch.float32), heads_first()
    paged_attention = fa4_transformers.paged_attention
    with pytest.raises(ValueError, match="for continuous batching, which gives a cache"):
        paged_attention("reference", module, q, k, v, None)
    with pytest.raises(NotImplementedError, match="block_table is given"):
        paged_attention("reference", module, q, k, v, None, cache=1, block_table=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="values have head_dim 8 and keys 16"):
        paged_attention("reference", module, q, k, v[..., :8], None, cache=1)

    def traced(q: Tensor) -> Tensor:
        return paged_attention("reference", module, q, k, v, None, cache=1)[0]

    with pytest.raises(Exception, match=r"continuous batching inside torch\.compile"):
        torch.compile(traced, backend="eager", fullgraph=True)(q)


# -- what is refused -----------------------------------------------------------------------------


def test_what_attention_cannot_do_is_refused_by_name_no_kernel_ran() -> None:
    module, tensors = attention_module(torch.float32), heads_first()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask has 4 dimensions"),
        ({"output_attentions": True}, "output_attentions is given"),
        ({"position_bias": torch.zeros(1)}, "position_bias is given"),
        ({"cache": object()}, "cache is given"),
        ({"block_table": torch.zeros(1)}, "block_table is given"),
    ]
    for options, words in refused:
        with pytest.raises(NotImplementedError, match=words):
            call(module, *tensors, **options)
    assert call(module, *tensors, output_attentions=False, position_bias=None).shape[1] == 6
    with pytest.raises(ValueError, match="attention_mask has 7 entries, and there are 6 keys"):
        call(module, *tensors, attention_mask=padding("left", 2, 7).bool())
    with pytest.raises(ValueError, match="attention_mask has 5 entries, and there are 6 queries"):
        call(module, *tensors, attention_mask=padding("left", 2, 5).bool())


def test_a_model_with_attention_dropout_trains_only_without_it_no_kernel_ran() -> None:
    model = make_model("bert").train()
    model.set_attn_implementation(NAME)
    model(input_ids=tokens(2, 5))
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), torch.nn.Dropout):
            module.dropout.p = 0.1
    with pytest.raises(NotImplementedError, match="set the model's attention_dropout to 0"):
        model(input_ids=tokens(2, 5))


def test_mask_patterns_that_attention_cannot_follow_are_refused_no_kernel_ran() -> None:
    masking = transformers.masking_utils
    sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    for pattern, words in (
        (masking.chunked_causal_mask_function(4, torch.zeros(1)), "chunked_overlay"),
        (
            masking.or_masks(
                masking.causal_mask_function,
                masking.blockwise_overlay(torch.zeros(1, 8, dtype=torch.long)),
            ),
            "blockwise_overlay, or_masks",
        ),
        (lambda b, h, q, k: q == k, "test_mask_patterns"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            fa4_transformers.padding_mask(**sizes, mask_function=pattern)
    with pytest.raises(NotImplementedError, match="a function of its own"):
        fa4_transformers.padding_mask(
            **sizes, mask_function=masking.causal_mask_function, use_vmap=True
        )
    for pattern in (
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        masking.sliding_window_causal_mask_function(3),
        masking.sliding_window_bidirectional_mask_function(3),
    ):
        assert fa4_transformers.padding_mask(**sizes, mask_function=pattern) is None


def test_a_custom_four_dimensional_mask_is_refused_by_the_model_no_kernel_ran() -> None:
    model = make_model("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="attention_mask has 4 dimensions"):
        model(input_ids=tokens(1, 4), attention_mask=torch.zeros(1, 1, 4, 4))


# -- masks ---------------------------------------------------------------------------------------


def test_masks_are_cut_to_the_keys_that_are_there_no_kernel_ran() -> None:
    """A static cache of 10 with 4 keys, under a mask as long as the cache."""
    ones = torch.ones(2, 10, dtype=torch.long)
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 10, "q_offset": torch.tensor(3)}
    for mask in (None, ones, ones[:, :4]):
        found = fa4_transformers.padding_mask(**sizes, attention_mask=mask)
        assert found is not None
        assert found.shape == (2, 4)
        assert found.all()
    # A window's cache holds the last keys only.
    mask = padding("left", 2, 10)
    found = fa4_transformers.padding_mask(
        batch_size=2, q_length=1, kv_length=6, q_offset=9, kv_offset=4, attention_mask=mask
    )
    expected = mask[:, 4:].bool()
    assert found is None if expected.all() else torch.equal(found, expected)


def test_a_static_cache_without_a_mask_shows_no_empty_slots_no_kernel_ran() -> None:
    model, ids = make_model("llama"), tokens(2, 9)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        pieces = [
            model(input_ids=ids[:, rows], past_key_values=cache).logits
            for rows in (slice(0, 6), slice(6, 8), slice(8, 9))
        ]
    assert_close(torch.cat(pieces, dim=1), whole)


# -- registering ---------------------------------------------------------------------------------


def test_importing_registers_nothing_and_needs_no_transformers() -> None:
    code = (
        "import sys, fa4.integrations.transformers as t; assert 'transformers' not in sys.modules; "
        "import transformers; assert t.NAME not in transformers.AttentionInterface(); "
        "t.register(); t.register(); assert t.NAME in transformers.AttentionInterface(); "
        "assert t.NAME in transformers.AttentionMaskInterface()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_taken_names_and_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="name='sdpa' is an attention implementation"):
        fa4_transformers.register("sdpa")
    with pytest.raises(ValueError, match="backend='fast' is not one of"):
        fa4_transformers.register("new", backend="fast")
    assert "new" not in transformers.AttentionInterface()
    assert "flash" not in fa4_transformers.NAME


def test_by_default_what_no_kernel_answers_is_an_error_no_kernel_ran() -> None:
    fa4_transformers.register(NAME)
    model = make_model("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(fa4.UnsupportedProblemError, match="a cpu device has no kernels"):
        model(input_ids=tokens(1, 4))

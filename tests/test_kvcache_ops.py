"""Attention over a cache as operators: what torch demands of them, and what tracers make of calls.

No kernel runs here: tensors are on the CPU, and the reference answers behind the same operators.
"""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.library import opcheck

import fa4
from tests.kvcache_cases import CacheCase, CacheInputs, make_cache_inputs

pytestmark = pytest.mark.filterwarnings("ignore::fa4.FallbackWarning")

CASES = [
    CacheCase((30, 1, 7)),
    CacheCase((30, 7), page_size=4, causal=True, seqlens_q=(3, 3)),
    CacheCase((30, 7), window_size=(4, 0), sink=torch.float32, softcap=3.0, head_dim_v=32),
    CacheCase((30, 7), leftpad=(11, 2), shuffled=True, num_splits=3),
    CacheCase((30, 4, 7), seqlens_q=(2, 0, 5), packed_q=True, tail_q=3, causal=True),
    CacheCase((30, 7), new=(2, 2), rotary="interleaved", causal=True, page_size=4),
    CacheCase((30, 7), new=(0, 5), packed_new=True, rotary="half", rotary_base=(2, 50)),
]
APPENDED = ("k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_k_new", "rotary_seqlens")


def arguments(case: CacheCase) -> tuple[CacheInputs, list[Tensor], dict[str, Any]]:
    """The inputs, and an operator's tensors and keywords; no NaN, which torch would not compare."""
    inputs = make_cache_inputs(case)
    given = dict(inputs.arguments)
    for tensor in given.values():
        if tensor.is_floating_point():
            tensor.nan_to_num_(0.5)
    keywords = {**given, **inputs.options}
    left, right = keywords.pop("window_size")
    keywords |= {"window_left": left, "window_right": right}
    keywords.pop("return_lse", None)
    names = ["q", "k_cache", "v_cache"] + (["k", "v"] if case.new else [])
    tensors = [keywords.pop(name) for name in names]
    if not case.new:
        keywords.pop("rotary_interleaved", None)
    return inputs, tensors, {k: v for k, v in keywords.items() if v is not None}


def operator_of(case: CacheCase, has_out: bool) -> Any:
    name = f"kvcache_{'append_' if case.new else ''}attention{'_out' if has_out else ''}"
    return getattr(torch.ops.fa4, name).default


@pytest.mark.parametrize("has_out", [False, True], ids=["new output", "given output"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_no_kernel_ran(case: CacheCase, has_out: bool) -> None:
    _, tensors, keywords = arguments(case)
    if case.page_size is not None:
        # opcheck lays a copy of every input out in its own way.
        keywords["page_table"] = keywords["page_table"].clamp(0, tensors[1].shape[0] - 1)
    q, v_cache = tensors[0], tensors[2]
    out = [q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))] if has_out else []
    opcheck(operator_of(case, has_out), (*out, *tensors), keywords)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_compiled_call_is_the_operator_and_gives_the_eager_answer_no_kernel_ran(
    case: CacheCase,
) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    def attend(named: dict[str, Any]) -> Any:
        return fa4.flash_attn_with_kvcache(**named, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    inputs, _, _ = arguments(case)
    results = []
    for function in (attend, compiled):
        # The caches are written to: each function has its own.
        named = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.arguments.items()}
        named |= {k: v for k, v in inputs.options.items() if k != "return_lse"}
        results.append((*function(named), named["k_cache"], named["v_cache"]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert "torch.ops.fa4.kvcache_" in graphs[-1].code
    assert ("kvcache_append_attention" in graphs[-1].code) == (case.new is not None)


def test_a_given_output_is_written_and_its_tail_left_alone_no_kernel_ran() -> None:
    torch._dynamo.reset()
    inputs, _, _ = arguments(CASES[4])

    def attend(out: Tensor) -> Any:
        return fa4.flash_attn_with_kvcache(**inputs.arguments, causal=True, out=out)

    expected = fa4.flash_attn_with_kvcache(**inputs.arguments, causal=True)
    out = torch.full_like(expected, 7.0)
    returned = torch.compile(attend, fullgraph=True, backend="aot_eager")(out)
    assert torch.equal(out[:-3], expected[:-3])
    assert (out[-3:] == 7).all()
    assert torch.equal(returned, out)


def test_one_length_for_all_may_change_without_compiling_again_no_kernel_ran() -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 3, 4, 32)
    k_cache, v_cache = (torch.randn(2, 24, 2, 32) for _ in range(2))
    graphs = 0

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        nonlocal graphs
        graphs += any(node.op == "call_function" for node in graph.graph.nodes)
        return graph

    def attend(length: int) -> Any:
        return fa4.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 17, 24):
        assert torch.equal(compiled(length), attend(length))
    assert graphs == 1


def test_what_makes_no_sense_is_refused_no_kernel_ran() -> None:
    q = torch.randn(2, 3, 4, 32)
    cache = torch.randn(2, 24, 2, 32)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_length=4 and cache_seqlens are both given"):
        torch.ops.fa4.kvcache_attention(q, cache, cache, cache_seqlens=lengths, cache_length=4)
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="k and v must both be given"):
        compiled(q, cache, cache, k=cache[:, :3], cache_seqlens=lengths)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="has no gradients"):
        compiled(q.requires_grad_(), cache, cache, cache_seqlens=lengths)


def test_explain_knows_calls_over_a_cache_no_kernel_ran() -> None:
    q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 24, 2, 64)
    by_function = fa4.explain(fa4.flash_attn_with_kvcache, q, cache, cache, causal=True)
    assert by_function == fa4.explain_kvcache(q, cache, cache, causal=True)

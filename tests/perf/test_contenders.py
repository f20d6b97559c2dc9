"""Every contender is called so that it computes the case, whatever its own interface looks like.

The peers are stood in for by modules with their signatures that compute by the reference: what is
tested is the adapters. fa4 itself is called through its emulator-free reference likewise.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fa4
from fa4.reference import attention_reference
from perf import contenders
from perf.cases import Case, Inputs, make_inputs

DENSE = Case((24, 24), (24, 24), 4, 2, 32, 16, causal=True)
PACKED = Case((7, 19), (7, 19), 4, 2, 32, 16, causal=True, label="mix")
CACHE = Case((1, 1, 1), (24, 24, 24), 4, 2, 32, 16)
PAGES = Case((1, 1, 1), (5, 24, 8), 4, 2, 32, 16, page_size=8, label="ragged")


def expected(case: Case, inputs: Inputs) -> torch.Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.cu_seqlens is not None:
        cu = inputs.cu_seqlens
        return attention_reference(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=case.causal)[0]
    if inputs.cache_seqlens is not None:
        return with_cache(q, k, v, inputs.cache_seqlens, inputs.page_table)
    return attention_reference(q, k, v, causal=case.causal)[0]


def with_cache(q, k, v, cache_seqlens, page_table):
    """(batch, 1, heads, dim) over a contiguous or paged cache."""
    if page_table is not None:
        k, v = (t[page_table.long()].flatten(1, 2) for t in (k, v))
    return attention_reference(q, k, v, seqused_k=cache_seqlens)[0]


def assert_computes(call, case: Case, inputs: Inputs) -> None:
    out = contenders.output_of(call())
    exact = expected(case, inputs)
    assert out.shape == exact.shape
    assert torch.allclose(out.float(), exact.float(), atol=0.02)


# -- stand-ins -----------------------------------------------------------------------------------


def flash_attention(lse: bool) -> ModuleType:
    """flash_attn.cute and flash_attn_interface, as far as the adapters use them."""
    module = ModuleType("stand_in")

    def result(out, lse_value):
        return (out, lse_value) if lse else out

    def flash_attn_func(q, k, v, *, causal=False):
        return result(*attention_reference(q, k, v, causal=causal))

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        seqused_k=None,
        page_table=None,
        causal=False,
        num_splits=1,
    ):
        if seqused_k is not None:
            assert max_seqlen_q == 1
            assert causal
            return result(with_cache(q, k, v, seqused_k, page_table), None)
        lengths = cu_seqlens_q.diff()
        assert max_seqlen_q == max_seqlen_k == lengths.max().item()
        out, lse_value = attention_reference(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=causal
        )
        return result(out, lse_value)

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, causal):
        assert causal
        return with_cache(q, k_cache, v_cache, cache_seqlens, page_table)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


class Fa3Operator:
    """torch.ops._vllm_fa3_C.fwd: positional names of its schema, packed queries only."""

    NAMES = (
        "q", "k", "v", "k_new", "v_new", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
        "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale", "is_causal",
        "window_size_left", "window_size_right", "softcap", "is_rotary_interleaved", "num_splits",
        "pack_gqa", "sm_margin",
    )  # fmt: skip

    def __init__(self) -> None:
        arguments = [
            SimpleNamespace(
                name=name, default_value=-1, has_default_value=lambda name=name: "window" in name
            )
            for name in self.NAMES
        ]
        self.default = SimpleNamespace(_schema=SimpleNamespace(arguments=arguments))

    def __call__(self, **given):
        assert tuple(given) == self.NAMES
        assert given["softmax_scale"] == pytest.approx(32**-0.5)
        assert given["window_size_left"] == given["window_size_right"] == -1
        q, k, v = given["q"], given["k"], given["v"]
        if given["page_table"] is not None:
            assert given["cu_seqlens_q"].tolist() == list(range(len(given["seqused_k"]) + 1))
            out = with_cache(q[:, None], k, v, given["seqused_k"], given["page_table"])[:, 0]
            return [out, None]
        return list(
            attention_reference(
                q,
                k,
                v,
                cu_seqlens_q=given["cu_seqlens_q"],
                cu_seqlens_k=given["cu_seqlens_k"],
                causal=given["is_causal"],
            )
        )


class RaggedWrapper:
    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, heads_q, heads_kv, head_dim, **options):
        assert (heads_q, heads_kv, head_dim, options["head_dim_vo"]) == (4, 2, 32, 16)
        self.indptr, self.causal = (qo_indptr, kv_indptr), options["causal"]

    def run(self, q, k, v):
        cu_q, cu_k = self.indptr
        return attention_reference(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=self.causal
        )[0]


class DecodeWrapper:
    def __init__(self, workspace, layout, use_tensor_cores):
        assert use_tensor_cores

    def plan(self, indptr, indices, last_page_len, heads_q, heads_kv, head_dim, page, **options):
        starts = indptr.tolist()
        self.pages = [indices[a:b].long() for a, b in itertools.pairwise(starts)]
        self.lengths = [
            (len(pages) - 1) * page + last
            for pages, last in zip(self.pages, last_page_len.tolist(), strict=True)
        ]

    def run(self, q, cache):
        rows = []
        for b, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            k, v = (t[pages].flatten(0, 1)[None, :length] for t in cache)
            rows.append(attention_reference(q[b][None, None], k, v)[0][0])
        return torch.cat(rows)


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The contender of that name, over a stand-in for what it imports."""
    if name == "flash-attn-4":
        package = ModuleType("flash_attn")
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", flash_attention(lse=True))
        return contenders.FlashAttention4()
    if name == "flash-attn-3":
        monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention(lse=False))
        return contenders.CONTENDERS[name]()
    if name == "flash-attn-3 library":
        monkeypatch.setenv("FA4_FA3_LIBRARY", "/somewhere/fa3.so")
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        operators = SimpleNamespace(fwd=Fa3Operator())
        monkeypatch.setattr(torch.ops, "_vllm_fa3_C", operators, raising=False)
        return contenders.FlashAttention3Library()
    if name == "flashinfer":
        module = ModuleType("flashinfer")
        module.__version__ = "0"
        module.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
        module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        monkeypatch.setattr(contenders, "WORKSPACE_BYTES", 16)
        return contenders.FlashInfer()
    assert name == "sdpa"
    return contenders.Sdpa("sdpa", None)


NAMES = ("flash-attn-4", "flash-attn-3", "flash-attn-3 library", "flashinfer", "sdpa")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("operation", "case"),
    [("forward", DENSE), ("varlen", PACKED), ("decode", CACHE), ("decode", PAGES)],
    ids=["forward", "varlen", "decode", "paged"],
)
def test_a_contender_computes_the_case(
    name: str, operation: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = stand_in(name, monkeypatch)
    inputs = make_inputs(case, "cpu")
    if name == "sdpa" and operation == "varlen":
        assert not hasattr(contender, "varlen")
    elif name == "sdpa" and case is PAGES:
        with pytest.raises(NotImplementedError, match="neither pages nor lengths"):
            contender.decode(case, inputs)
    else:
        assert_computes(getattr(contender, operation)(case, inputs), case, inputs)


@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn-3", "sdpa"])
def test_backward_gives_the_gradients_of_the_same_output_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(DENSE, "cpu")
    call = stand_in(name, monkeypatch).backward(DENSE, inputs)
    first, again = call(), call()  # the graph is kept
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = attention_reference(*leaves, causal=True)[0]
    generator = torch.Generator().manual_seed(contenders.SEED)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.bfloat16).double()
    for mine, twin, exact in zip(
        first, again, torch.autograd.grad(out, leaves, gradient), strict=True
    ):
        assert torch.equal(mine, twin)
        assert torch.allclose(mine.double(), exact, atol=0.05 * exact.abs().max().item())


def test_deterministic_gradients_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def attention(q, k, v, **options):
        given.update(options)
        return attention_reference(q, k, v)[0]

    monkeypatch.setattr(fa4, "flash_attn_func", attention)
    contenders.Fa4Deterministic().backward(DENSE, make_inputs(DENSE, "cpu"))()
    assert given == {"causal": True, "deterministic": True, "backend": "fa4"}
    found, _ = contenders.available("forward", "^fa4")
    assert [each.name for each in found] == ["fa4"]


def test_fa4_is_called_on_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kernels: backend="fa4" refuses instead of falling back."""
    ours = contenders.Fa4()
    for operation, case in (("forward", DENSE), ("varlen", PACKED)):
        call = getattr(ours, operation)(case, make_inputs(case, "cpu"))
        with pytest.raises(fa4.UnsupportedProblemError):
            call()

    def by_reference(q, k_cache, v_cache, *, cache_seqlens, page_table, causal, backend):
        assert causal
        assert backend == "fa4"
        return with_cache(q, k_cache, v_cache, cache_seqlens, page_table)

    monkeypatch.setattr(fa4, "flash_attn_with_kvcache", by_reference, raising=False)
    for case in (CACHE, PAGES):
        inputs = make_inputs(case, "cpu")
        assert_computes(ours.decode(case, inputs), case, inputs)


def test_decode_without_the_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fa4, "flash_attn_with_kvcache", raising=False)
    with pytest.raises(NotImplementedError, match="no flash_attn_with_kvcache"):
        contenders.Fa4().decode(CACHE, make_inputs(CACHE, "cpu"))


# -- who is there --------------------------------------------------------------------------------


def test_what_is_not_installed_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flashinfer", "flash_mla", "cudnn"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delenv("FA4_FA3_LIBRARY", raising=False)
    found, absent = contenders.available("forward", "^(fa4|cudnn|flash)")
    assert found[0].name == "fa4"
    assert {"cudnn-sdpa", "flash-sdpa"} <= {c.name for c in found}
    assert "FA4_FA3_LIBRARY is not set" in absent["flash-attn-3"]
    assert "flashinfer" in absent["flashinfer"]
    assert "flex-attention" not in absent  # was not asked for
    if importlib.util.find_spec("flash_attn") is None:
        assert "flash_attn" in absent["flash-attn-4"]


def test_a_contender_without_the_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, absent = contenders.available("varlen", "sdpa")
    assert found == []
    assert absent == {
        "cudnn-sdpa": "has no varlen here", "flash-sdpa": "has no varlen here"
    }  # fmt: skip
    with pytest.raises(ValueError, match="operation='sideways'"):
        contenders.available("sideways")


def test_a_library_that_cannot_be_loaded_is_not_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setenv("FA4_FA3_LIBRARY", str(tmp_path / "missing.so"))
    _, absent = contenders.available("forward", "flash-attn-3")
    assert "cannot be loaded" in absent["flash-attn-3"]


def test_an_argument_that_the_build_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = stand_in("flash-attn-3 library", monkeypatch)
    with pytest.raises(TypeError, match="no argument colour"):
        library._call(DENSE, colour="red")


def test_flash_mla_takes_latent_caches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_mla")
    module.get_mla_metadata = lambda lengths, rows, heads: (f"{rows} rows", None)
    module.flash_mla_with_kvcache = lambda *arguments, causal: (arguments, None)
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    contender = contenders.FlashMla()
    with pytest.raises(NotImplementedError, match="head_dim=576"):
        contender.decode(CACHE, make_inputs(CACHE, "cpu"))
    case = Case((1,), (64,), 16, 1, 576, 512, page_size=64, is_latent=True)
    inputs = make_inputs(case, "cpu")
    q, cache, table, lengths, dim_v, metadata, _ = contender.decode(case, inputs)()[0]
    assert q is inputs.q
    assert cache is inputs.k
    assert table is inputs.page_table
    assert lengths is inputs.cache_seqlens
    assert (dim_v, metadata) == (512, "16 rows")

"""fa4.integrations.torch: torch's flash attention operators, answered by fa4.

No kernel runs here: the same functions are put under the CPU dispatch key, where torch has no flash
kernels, with the reference behind them. With kernels: tests/gpu/test_torch_registry.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

import fa4
from fa4.integrations import torch as fa4_torch
from fa4.reference import attention_reference

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """fa4 answers torch's flash operators of CPU tensors."""
    installation = fa4_torch._install("CPU")
    yield
    installation.remove()


def inputs(
    seqlen_q: int = 7, seqlen_k: int = 7, heads_kv: int = 2, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """(batch 2, heads, seqlen, 16) of 4 query heads, in the memory order of a projection."""
    sizes = ((seqlen_q, 4), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return [
        torch.randn(2, rows, heads, 16).to(dtype).transpose(1, 2).requires_grad_()
        for rows, heads in sizes
    ]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 for (batch, heads, seqlen, dim)."""
    out, lse = attention_reference(*(t.double().transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2), lse


def packed_inputs(lengths: list[int], heads_kv: int = 2) -> tuple[list[Tensor], Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    total = sum(lengths)
    tensors = [
        torch.randn(total, heads, 16, requires_grad=True) for heads in (4, heads_kv, heads_kv)
    ]
    return tensors, cu_seqlens


# -- the registry --------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch's registry, left as it was found."""
    module = torch_attention._registry
    monkeypatch.setattr(module, "_FLASH_ATTENTION_IMPLS", dict(module._FLASH_ATTENTION_IMPLS))
    yield module
    if torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()


def test_importing_registers_nothing() -> None:
    code = (
        "import torch.nn.attention as a; before = a.list_flash_attention_impls(); "
        "import fa4.integrations.torch as t; assert a.list_flash_attention_impls() == before; "
        "assert a.current_flash_attention_impl() is None; "
        "t.register(); assert t.NAME in a.list_flash_attention_impls(); "
        "assert a.current_flash_attention_impl() is None; assert t.NAME not in before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", [fa4_torch.NAME, "FA3", "another name"])
def test_activate_and_restore_any_number_of_times_no_kernel_ran(
    registry: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the functions under the CPU key, so that their presence shows."""
    install = fa4_torch._install
    monkeypatch.setattr(fa4_torch, "_install", lambda: install("CPU"))
    q, k, v = (t.detach() for t in inputs())
    expected, _ = exact(q, k, v)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
            operator(q, k, v)
        fa4_torch.activate(name)
        assert torch_attention.current_flash_attention_impl() == name
        assert (operator(q, k, v)[0] - expected).abs().max() < 1e-5
        # Activating again replaces, and one restore is enough.
        torch_attention.activate_flash_attention_impl(name)
        assert (operator(q, k, v)[0] - expected).abs().max() < 1e-5
        fa4_torch.restore()
        assert torch_attention.current_flash_attention_impl() is None


def test_removing_twice_is_harmless_no_kernel_ran() -> None:
    first = fa4_torch._install("CPU")
    first.remove()
    second = fa4_torch._install("CPU")
    first.remove()
    q, k, v = inputs()
    assert torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0].shape == q.shape
    second.remove()


# Arguments of the operators as torch releases have them, read in their native_functions.yaml.
_TENSORS = "Tensor query, Tensor key, Tensor value"
_CUM = "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k"
_SWITCHES = "float dropout_p, bool is_causal, bool return_debug_mask"
_WINDOW = "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
_OPTIONS = f"*, {_WINDOW}, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
_PAGED = "Tensor? block_table=None, int? num_splits=None"
_OF_BACKWARD = (
    f"Tensor grad_out, {_TENSORS}, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal"
)
_SINCE_2_11 = {
    "_flash_attention_backward": (
        f"({_OF_BACKWARD}, Tensor rng_state, Tensor unused, *, {_WINDOW}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_flash_attention": (
        f"({_TENSORS}, float dropout_p=0.0, bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, "
        "Tensor)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        f"({_OF_BACKWARD}, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}
_FIVE = "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_SINCE_2_13 = _SINCE_2_11 | {
    "_flash_attention_forward": f"({_TENSORS}, {_CUM}, {_SWITCHES}, {_OPTIONS}, {_PAGED}) {_FIVE}",
    "_flash_attention_forward_no_dropout_inplace": (
        f"(Tensor(a!) out, {_TENSORS}, {_CUM}, {_SWITCHES}, {_OPTIONS}, {_PAGED}) -> Tensor"
    ),
}
SCHEMAS = {
    "2.11": _SINCE_2_11
    | {"_flash_attention_forward": f"({_TENSORS}, {_CUM}, {_SWITCHES}, {_OPTIONS}) {_FIVE}"},
    "2.13": _SINCE_2_13,
    "2.14": _SINCE_2_13,
}


@pytest.mark.parametrize("version", SCHEMAS)
def test_operators_of_every_supported_torch_are_known(version: str) -> None:
    missing = set(fa4_torch.IMPLEMENTATIONS) - set(SCHEMAS[version])
    assert missing <= set(fa4_torch.ABSENT_BEFORE_2_13)
    for name, signature in SCHEMAS[version].items():
        fa4_torch.check_schema(name, torch._C.parse_schema(f"aten::{name}{signature}"))


def test_operators_of_this_torch_are_known() -> None:
    for name in fa4_torch.IMPLEMENTATIONS:
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            assert name in fa4_torch.ABSENT_BEFORE_2_13
        else:
            fa4_torch.check_schema(name, operator.default._schema)


@pytest.mark.parametrize(
    ("found", "replacement"),
    [("bool is_causal,", "bool is_causal, bool sorted,"), ("float dropout_p, ", "")],
)
def test_operators_with_other_arguments_are_refused(found: str, replacement: str) -> None:
    signature = SCHEMAS["2.14"]["_flash_attention_forward"].replace(found, replacement)
    schema = torch._C.parse_schema(f"aten::_flash_attention_forward{signature}")
    with pytest.raises(RuntimeError, match=r"of torch .* has the arguments query, key, value"):
        fa4_torch.check_schema("_flash_attention_forward", schema)


def test_an_installation_that_fails_leaves_nothing_no_kernel_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fa4_torch.ARGUMENTS, "_scaled_dot_product_flash_attention_backward", ())
    with pytest.raises(RuntimeError, match="_scaled_dot_product_flash_attention_backward"):
        fa4_torch._install("CPU")
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(*inputs())


# -- SDPA's operators ----------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("storage", ["rows first", "heads first", "chunk", "shared head"])
@pytest.mark.parametrize(
    ("seqlen_k", "options"),
    [(7, {}), (7, {"is_causal": True}), (11, {"scale": 0.7}), (3, {})],
    ids=str,
)
def test_sdpa_operator_gives_attention_and_gradients_no_kernel_ran(
    seqlen_k: int, options: dict[str, Any], storage: str
) -> None:
    q, k, v = (t.detach() for t in inputs(7, seqlen_k))
    if storage == "heads first":
        q, k, v = (t.contiguous() for t in (q, k, v))
    elif storage == "chunk":
        q, k, v = (torch.cat([t, t], dim=2).chunk(2, dim=2)[1] for t in (q, k, v))
    elif storage == "shared head":
        k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, **options)
    out, lse, cum_q, cum_k, max_q, max_k, rng_state, unused, debug_mask = results
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = exact(
        *wide, causal=options.get("is_causal", False), softmax_scale=options.get("scale")
    )
    assert (out - expected).abs().max() < 1e-5
    assert (lse - expected_lse).abs().max() < 1e-5
    assert lse.is_contiguous()
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 7, seqlen_k)
    assert (rng_state.dtype, rng_state.shape) == (torch.uint64, (2,))
    assert (unused.dtype, unused.shape) == (torch.uint64, ())
    assert (debug_mask.dtype, debug_mask.numel()) == (q.dtype, 0)
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), incoming)
    wanted = torch.autograd.grad(expected, wide, incoming.double())
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).abs().max() < 1e-5
    # The strides that torch's meta kernels promise to compilers.
    metas = torch.ops.aten._scaled_dot_product_flash_attention(
        *(t.detach().to("meta") for t in (q, k, v)), **options
    )
    assert out.stride() == metas[0].stride() == torch.empty_like(q).stride()
    for gradient, leaf in zip(
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(incoming, q, k, v, out, lse, None, None, 7, seqlen_k, 0.0),
            options.get("is_causal", False),
            *(rng_state, unused),
            scale=options.get("scale"),
        ),
        (q, k, v),
        strict=True,
    ):
        assert gradient.stride() == torch.empty_like(leaf).stride()


@pytest.mark.usefixtures("on_cpu")
def test_sdpa_operator_shares_heads_no_kernel_ran() -> None:
    q, k, v = inputs(heads_kv=1)
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    expected, _ = exact(q, k, v)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.usefixtures("on_cpu")
def test_backward_uses_the_output_and_lse_that_it_is_given_no_kernel_ran() -> None:
    """As when parts of the keys were attended to elsewhere and merged by their LSE."""
    q, k, v = (t.detach() for t in inputs(7, 12))
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    parts = [operator(q, k[:, :, rows], v[:, :, rows]) for rows in (slice(0, 5), slice(5, 12))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(p[0] * (p[1] - lse).exp()[..., None] for p in parts)
    incoming = torch.randn_like(out)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(exact(*wide)[0], wide, incoming.double())
    dq = torch.zeros_like(q)
    for rows, part in ((slice(0, 5), parts[0]), (slice(5, 12), parts[1])):
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(incoming, q, k[:, :, rows], v[:, :, rows], out, lse, None, None),
            *(7, rows.stop - rows.start, 0.0, False, *part[6:8]),
        )
        dq += found[0]
        for gradient, whole in zip(found[1:], wanted[1:], strict=True):
            assert (gradient - whole[:, :, rows]).abs().max() < 1e-5
    assert (dq - wanted[0]).abs().max() < 1e-5


@pytest.mark.usefixtures("on_cpu")
def test_what_sdpa_operators_cannot_do_is_refused_by_name_no_kernel_ran() -> None:
    q, k, v = inputs(7, 9)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    for arguments, words in (
        ((0.1, False, False), "dropout_p is 0.1"),
        ((0.0, False, True), "return_debug_mask is True"),
        ((0.0, True, False), "is_causal with 7 queries and 9 keys"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            operator(q, k, v, *arguments)
    out, lse, _, _, _, _, seed, offset, _ = operator(q, k, v)
    for dropout_p, is_causal, words in (
        (0.1, False, "dropout_p is 0.1"),
        (0.0, True, "is_causal with 7 queries and 9 keys"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *(out, q, k, v, out, lse, None, None, 7, 9, dropout_p, is_causal, seed, offset)
            )


# -- flash attention's operators, and varlen_attn ------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn_gives_attention_and_gradients_no_kernel_ran(
    window_size: tuple[int, int],
) -> None:
    tensors, cu_seqlens = packed_inputs([4, 9, 2], heads_kv=4)
    out = varlen_attn(*tensors, cu_seqlens, cu_seqlens, 9, 9, window_size=window_size)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    expected, _ = attention_reference(*wide, **lengths, window_size=window_size)
    assert (out - expected).abs().max() < 1e-5
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, incoming)
    wanted = torch.autograd.grad(expected, wide, incoming.double())
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).abs().max() < 1e-5


@pytest.mark.usefixtures("on_cpu")
def test_compiled_varlen_attn_is_the_same_no_kernel_ran() -> None:
    torch._dynamo.reset()
    tensors, cu_seqlens = packed_inputs([4, 9, 2], heads_kv=4)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return 2 * varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 9, 9, window_size=(-1, 0))

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(*tensors, cu_seqlens)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("storage", ["contiguous", "fused"])
def test_packed_operator_leaves_rows_of_no_sequence_zero_no_kernel_ran(storage: str) -> None:
    tensors, cu_seqlens = packed_inputs([4, 9, 2])
    q, k, v = (t.detach() for t in tensors)
    if storage == "fused":
        q = torch.cat([q, q], dim=-1)[..., :16]
    cu_seqlens_q = cu_seqlens[:-1].contiguous()  # the last 2 rows of q belong to nothing
    cu_seqlens_k = cu_seqlens[[0, 1, 3]].contiguous()
    used = torch.tensor([3, 6], dtype=torch.int32)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, 9, 11, 0.0, True, False), seqused_k=used, scale=0.3
    )
    expected, expected_lse = attention_reference(
        *(t.double() for t in (q, k, v)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=used,
        softmax_scale=0.3,
        causal=True,
    )
    assert (out - expected).abs().max() < 1e-5
    assert (out[13:] == 0).all()
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert (lse - expected_lse).nan_to_num().abs().max() < 1e-5


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="torch has this operator since 2.13",
)
def test_the_operator_with_an_output_writes_into_it_no_kernel_ran() -> None:
    tensors, cu_seqlens = packed_inputs([4, 9, 2])
    q, k, v = (t.detach() for t in tensors)
    common = (q, k, v, cu_seqlens, cu_seqlens, 9, 9, 0.0, True, False)
    out = torch.full_like(q, 7.0)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, *common)
    expected, expected_lse, *_ = torch.ops.aten._flash_attention_forward(*common)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.usefixtures("on_cpu")
def test_what_flash_operators_cannot_do_is_refused_by_name_no_kernel_ran() -> None:
    tensors, cu_seqlens = packed_inputs([4, 9, 2])
    q, k, v = (t.detach() for t in tensors)
    lengths = (cu_seqlens, cu_seqlens, 9, 9)
    forward = torch.ops.aten._flash_attention_forward
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((0.5, False, False), {}, "dropout_p is 0.5"),
        ((0.0, False, True), {}, "return_debug_mask is True"),
        ((0.0, False, False), {"alibi_slopes": torch.ones(4)}, "alibi_slopes is a tensor"),
    ]
    if "block_table" in [a.name for a in forward.default._schema.arguments]:
        table = torch.zeros(3, 1, dtype=torch.int32)
        refused += [
            ((0.0, False, False), {"block_table": table}, "block_table is a tensor"),
            ((0.0, False, False), {"num_splits": 4}, "num_splits is 4"),
        ]
        assert forward(q, k, v, *lengths, 0.0, False, False, num_splits=1)[0].shape == q.shape
    for switches, options, words in refused:
        with pytest.raises(NotImplementedError, match=words):
            forward(q, k, v, *lengths, *switches, **options)


def test_on_cuda_nothing_falls_back_no_kernel_ran() -> None:
    """The functions under the CUDA key ask for kernels, and elsewhere say why there are none."""
    q, k, v = (t.detach().to(FP16) for t in inputs())
    with pytest.raises(fa4.UnsupportedProblemError, match="a cpu device has no kernels"):
        fa4_torch._scaled_dot_product_flash_attention("fa4", q, k, v)
    out, lse = exact(q, k, v)
    with pytest.raises(fa4.UnsupportedProblemError, match="a cpu device has no kernels"):
        fa4_torch._scaled_dot_product_flash_attention_backward(
            *("fa4", q, q, k, v, out.to(FP16), lse.float(), None, None, 7, 7, 0.0, False, q, q)
        )

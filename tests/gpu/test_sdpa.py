"""fa4.scaled_dot_product_attention and torch's flash attention registry, with Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    current_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

import fa4
from fa4.integrations import torch as fa4_torch
from tests.gpu.kernel_names import assert_ours, kernels_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

DEVICE = "cuda"
BF16 = torch.bfloat16


def inputs(
    rows: int = 200, keys: int = 200, heads_kv: int = 2, layout: str = "rows first"
) -> list[Tensor]:
    """(batch 2, heads, seqlen, 64), 4 query heads."""
    tensors = []
    for n, heads in ((rows, 4), (keys, heads_kv), (keys, heads_kv)):
        x = torch.randn(2, n, heads, 64, device=DEVICE).to(BF16).transpose(1, 2)
        if layout == "heads first":
            x = x.contiguous()
        elif layout == "chunk":
            x = torch.cat([x, x], dim=2).chunk(2, dim=2)[1]
        tensors.append(x.detach().requires_grad_())
    return tensors


def exact(tensors: list[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """float64 output and leaves, by torch's math."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*wide, enable_gqa=True, **options), wide


def assert_right(function: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> None:
    """Output and gradients of a function, against float64."""
    out = function(*tensors, **options)
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, incoming)
    right, wide = exact(tensors, **options)
    wanted = torch.autograd.grad(right, wide, incoming.double())
    assert (out - right).abs().max() < 1e-2 * right.abs().max()
    for gradient, expected, leaf in zip(found, wanted, tensors, strict=True):
        assert gradient.shape == leaf.shape
        assert (gradient - expected).abs().max() < 2e-2 * expected.abs().max()


# -- fa4.scaled_dot_product_attention ------------------------------------------------------------


def ours(*tensors: Tensor, **options: Any) -> Tensor:
    return fa4.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)


@pytest.mark.parametrize("layout", ["rows first", "heads first", "chunk"])
@pytest.mark.parametrize("lengths", [(200, 200), (200, 300), (300, 200)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_has_torchs_semantics(is_causal: bool, lengths: tuple[int, int], layout: str) -> None:
    assert_right(ours, inputs(*lengths, layout=layout), is_causal=is_causal)


def test_sdpa_runs_our_kernel_and_explain_names_it() -> None:
    tensors = [t.detach() for t in inputs()]
    names = kernels_of(lambda: ours(*tensors, is_causal=True))
    assert_ours(names, "forward")
    decision = fa4.explain(
        fa4.scaled_dot_product_attention, *tensors, is_causal=True, enable_gqa=True
    )
    assert decision.kernel_name is not None
    assert any(decision.kernel_name in name for name in names)


def test_sdpa_takes_torchs_lower_right_mask() -> None:
    tensors = [t.detach() for t in inputs(100, 180, heads_kv=4)]
    mask = causal_lower_right(100, 180)
    names = kernels_of(lambda: fa4.scaled_dot_product_attention(*tensors, mask))
    assert_ours(names, "forward")
    out = fa4.scaled_dot_product_attention(*tensors, mask)
    visible = torch.ones(100, 180, dtype=torch.bool, device=DEVICE).tril(80)
    right, _ = exact(tensors, attn_mask=visible)
    assert (out - right).abs().max() < 1e-2 * right.abs().max()


def test_sdpa_leaves_masks_and_float32_to_torch() -> None:
    tensors = [t.detach() for t in inputs(heads_kv=4)]
    mask = torch.rand(200, 200, device=DEVICE) < 0.8
    wide = [t.float() for t in tensors]
    for arguments, options in ((tensors, {"attn_mask": mask}), (wide, {})):
        out = fa4.scaled_dot_product_attention(*arguments, **options)
        assert torch.equal(out, F.scaled_dot_product_attention(*arguments, **options))
        decision = fa4.explain(fa4.scaled_dot_product_attention, *arguments, **options)
        assert decision.backend == "torch"


def test_compiled_sdpa_runs_our_kernel() -> None:
    torch._dynamo.reset()
    tensors = [t.detach() for t in inputs()]
    compiled = torch.compile(lambda q, k, v: ours(2 * q, k, v, is_causal=True), fullgraph=True)
    assert_ours(kernels_of(lambda: compiled(*tensors)), "forward")
    right, _ = exact([2 * tensors[0], *tensors[1:]], is_causal=True)
    assert (compiled(*tensors) - right).abs().max() < 1e-2 * right.abs().max()


# -- the registry --------------------------------------------------------------------------------


@pytest.fixture
def activated() -> Iterator[None]:
    fa4_torch.activate()
    yield
    if current_flash_attention_impl() is not None:
        fa4_torch.restore()


def torchs(*tensors: Tensor, **options: Any) -> Tensor:
    """What an unmodified model calls, with torch's flash backend chosen around it."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("layout", ["rows first", "heads first", "chunk"])
@pytest.mark.parametrize(
    ("lengths", "is_causal"), [((200, 200), True), ((200, 200), False), ((200, 300), False)]
)
def test_torchs_sdpa_gives_the_math_backends_answer(
    lengths: tuple[int, int], is_causal: bool, layout: str
) -> None:
    assert_right(torchs, inputs(*lengths, layout=layout), is_causal=is_causal)


@pytest.mark.usefixtures("activated")
def test_torchs_sdpa_runs_our_kernels_until_it_is_restored() -> None:
    tensors = inputs(heads_kv=4)

    def step() -> None:
        out = torchs(*tensors, is_causal=True)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    assert_ours(kernels_of(step), "forward", "backward")
    for _ in range(2):
        fa4_torch.restore()
        assert not any("fa4_sm" in name for name in kernels_of(step))
        fa4_torch.activate()
        assert_ours(kernels_of(step), "forward", "backward")


@pytest.mark.usefixtures("activated")
def test_a_compiled_model_with_torchs_sdpa_runs_our_kernels() -> None:
    torch._dynamo.reset()
    tensors = inputs(heads_kv=4)

    @torch.compile(fullgraph=True)
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def step() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = model(*tensors)
            return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    assert_ours(kernels_of(step), "forward", "backward")
    right, wide = exact(tensors, is_causal=True)
    wanted = torch.autograd.grad((2 * right).square().sum(), wide)
    for one, other in zip(step(), (2 * right, *wanted), strict=True):
        assert (one - other).abs().max() < 2e-2 * other.abs().max()


@pytest.mark.usefixtures("activated")
def test_varlen_attn_runs_our_kernels() -> None:
    lengths = [100, 3, 250]
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    tensors = [
        torch.randn(sum(lengths), 4, 64, device=DEVICE).to(BF16).requires_grad_() for _ in range(3)
    ]

    def run() -> tuple[Tensor, ...]:
        out = varlen_attn(*tensors, cu_seqlens, cu_seqlens, 250, 250, window_size=(-1, 0))
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    assert_ours(kernels_of(run), "forward", "backward")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    right = fa4.flash_attn_varlen_func(
        *wide, cu_seqlens, cu_seqlens, causal=True, backend="reference"
    )
    wanted = torch.autograd.grad(right.square().sum(), wide)
    for one, other in zip(run(), (right, *wanted), strict=True):
        assert (one - other).abs().max() < 2e-2 * other.abs().max()


@pytest.mark.usefixtures("activated")
def test_what_kernels_cannot_do_is_an_error_and_no_fallback() -> None:
    tensors = inputs(heads_kv=4)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
        torchs(*tensors, dropout_p=0.1)

"""The code of the guides runs, block after block, as a reader would type it."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fa4

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"


def blocks(guide: str) -> list[str]:
    text = (GUIDES / guide).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def run(guide: str) -> dict[str, Any]:
    """The names that a guide's code leaves behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(guide)):
        code = compile(block, f"{guide}, block {number}", "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fa4.FallbackWarning)
            exec(code, names)  # the guide is ours
    return names


def test_pytorch_guide(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("pytorch.md")
    q, k, v = names["q"], names["k"], names["v"]
    for leaf in (q, k, v):
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(names[name].double() for name in ("query", "key", "value")),
        is_causal=True,
        enable_gqa=True,
    )
    assert (names["out"] - expected).abs().max() < 2e-2
    printed = capsys.readouterr().out
    assert "answer    " in printed
    assert "torch.Size([2, 128, 8, 64])" in printed


def test_transformers_guide() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        names = run("transformers.md")
    finally:
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            interface._global_mapping.pop("fa4_kernels", None)
    model, logits, written = names["model"], names["logits"], names["written"]
    assert model.config._attn_implementation == "fa4_kernels"
    assert written.shape == (2, 32)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.set_attn_implementation("eager")
    expected = model(
        input_ids=names["input_ids"][:1], position_ids=names["position_ids"], use_cache=False
    ).logits
    assert logits.shape == (1, 24, 128)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()

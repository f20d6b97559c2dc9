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

"""Tiny random models of transformers, one of each kind of attention that fa4 answers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 16}


def _llama() -> Any:
    return transformers.LlamaConfig(**_SIZES, **_GQA, num_hidden_layers=2)


def _gemma2() -> Any:
    return transformers.Gemma2Config(
        **_SIZES,
        **_GQA,
        num_hidden_layers=2,
        sliding_window=6,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
    )


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **_SIZES,
        **_GQA,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )


def _qwen3() -> Any:
    return transformers.Qwen3Config(**_SIZES, **_GQA, num_hidden_layers=2)


def _bert() -> Any:
    return transformers.BertConfig(
        **_SIZES,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _modernbert() -> Any:
    """Windows to both sides in every layer but the first."""
    return transformers.ModernBertConfig(
        **(_SIZES | {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
        num_hidden_layers=2,
        local_attention=6,
        global_attn_every_n_layers=2,
    )


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "qwen3": _qwen3,
}
ENCODERS: dict[str, Callable[[], Any]] = {"bert": _bert, "modernbert": _modernbert}


def make_model(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.nn.Module:
    """A model in evaluation mode, whose attention has something to say."""
    torch.manual_seed(0)
    if name in DECODERS:
        model = transformers.AutoModelForCausalLM.from_config(DECODERS[name]())
    else:
        model = transformers.AutoModelForMaskedLM.from_config(ENCODERS[name]())
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Larger weights than at the start of a training: scores that differ from each other.
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0)
    return model.to(device=device, dtype=dtype).eval()


def tokens(batch: int, length: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), device=device)


def padding(kind: str, batch: int, length: int, device: str = "cpu") -> torch.Tensor:
    """(batch, length) of 0 and 1: another length for each row, the last one whole.

    kind  "none", "left", "right", or "holes" with zeros between ones
    """
    mask = torch.ones(batch, length, dtype=torch.long, device=device)
    for row in range(batch - 1):
        gap = 1 + (3 * row + 2) % (length - 2)
        if kind == "left":
            mask[row, :gap] = 0
        elif kind == "right":
            mask[row, length - gap :] = 0
        elif kind == "holes":
            mask[row, 1 : 1 + gap] = 0
    return mask

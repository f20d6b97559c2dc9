"""fa4: exact attention kernels for NVIDIA Hopper and Blackwell, written in CuTe-DSL.

    out = fa4.flash_attn_func(q, k, v, causal=True)

Importing needs no GPU, no driver and no compiler. See `flash_attn_func` for the semantics,
`explain` for which kernel answers a call, and ``python -m fa4`` for the command line.
"""

import fa4.kvcache_ops
import fa4.ops  # noqa: F401  both make torch.ops.fa4
from fa4.attention import flash_attn_func, flash_attn_varlen_func
from fa4.checked_mode import checked
from fa4.dispatch import Decision, FallbackWarning, UnsupportedProblemError
from fa4.explanation import explain
from fa4.kvcache import combine, explain_kvcache, flash_attn_with_kvcache
from fa4.kvcache_launch import KVCacheDecision
from fa4.problem import AttentionProblem
from fa4.sdpa import SdpaDecision, scaled_dot_product_attention
from fa4.versions import fa4_version

__version__ = fa4_version()

__all__ = [
    "AttentionProblem",
    "Decision",
    "FallbackWarning",
    "KVCacheDecision",
    "SdpaDecision",
    "UnsupportedProblemError",
    "checked",
    "combine",
    "explain",
    "explain_kvcache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]

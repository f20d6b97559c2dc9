"""Which kernels ran on the GPU: proof that ours did, and nobody else's attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call launches, as a profiler shows them."""
    run()  # what is compiled and loaded on the first call is not measured
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    names = [event.key for event in seen.key_averages() if event.device_type.name == "CUDA"]
    assert names, "the profiler saw no kernel at all: it needs CUPTI"
    return names


def assert_ours(names: list[str], *parts: str) -> None:
    """Each of ``parts`` is in the name of a kernel of fa4, and no other attention kernel ran."""
    ours = [name for name in names if "fa4_sm" in name]
    for part in parts:
        assert any(part in name for name in ours), f"no fa4 kernel with {part!r} among {names}"
    foreign = ("flash", "fmha", "cudnn", "softmax")
    # Inductor names pointwise kernels for the operators whose results they take, ours too.
    others = [n for n in names if n not in ours and not n.startswith("triton_poi_")]
    others = [n for n in others if any(word in n.lower() for word in foreign)]
    assert not others, f"attention of somebody else ran: {others}"

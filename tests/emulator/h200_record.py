"""What an H200 answered, for the test that the emulator gives the same bits.

    python -m tests.emulator.h200_record tests/emulator/h200_forward.npz      on the device

writes inputs, outputs and LSEs of `CASES`, with the card, the date and the command. Inputs are
stored too, so that the comparison does not hang on a random generator.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fa4

RECORD = Path(__file__).with_name("h200_forward.npz")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Shapes as `fa4.flash_attn_varlen_func` takes them: dense, or packed with cu_seqlens."""

    name: str
    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    head_dim_v: int
    options: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    has_sink: bool = False


CASES = (
    Case("d64 full, three warpgroups", "bf16", (1, 200, 2, 64), (1, 300, 1, 64), 64),
    Case("d128 causal", "bf16", (1, 260, 2, 128), (1, 260, 1, 128), 128, {"causal": True}),
    Case("d128 window", "fp16", (1, 150, 1, 128), (1, 280, 1, 128), 128, {"window_size": (70, 20)}),
    Case("d256 causal", "bf16", (1, 140, 1, 256), (1, 200, 1, 256), 256, {"causal": True}),
    Case("d192/128", "fp16", (1, 130, 1, 192), (1, 257, 1, 192), 128),
    Case(
        "packed, softcap, sink, used lengths",
        "bf16",
        (215, 2, 128),
        (240, 1, 128),
        128,
        {"causal": True, "softcap": 15.0},
        {
            "cu_seqlens_q": [0, 5, 135, 135, 212],
            "cu_seqlens_k": [0, 9, 149, 150, 240],
            "seqused_k": [9, 131, 1, 90],
        },
        has_sink=True,
    ),
)


def inputs_of(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """q, k, v and the sink: normal values, some of them large."""
    rng = np.random.default_rng(seed)

    def values(shape: tuple[int, ...], factor: float) -> torch.Tensor:
        return torch.from_numpy(factor * rng.standard_normal(shape)).to(DTYPES[case.dtype])

    tensors = {
        "q": values(case.q, 2.0),
        "k": values(case.k, 1.0),
        "v": values((*case.k[:-1], case.head_dim_v), 1.0),
    }
    if case.has_sink:
        tensors["sink"] = values((case.q[-2],), 1.0)
    return tensors


def attend(
    case: Case, inputs: dict[str, torch.Tensor], device: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) on the CPU."""
    lengths = {
        name: torch.tensor(entries, dtype=torch.int32, device=device)
        for name, entries in case.lengths.items()
    }
    tensors = {name: tensor.to(device) for name, tensor in inputs.items()}
    out, lse = fa4.flash_attn_varlen_func(
        **tensors, **lengths, **case.options, return_lse=True, backend=backend
    )
    return out.cpu(), lse.cpu()


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """16-bit floats as their bits, since NumPy has no bf16."""
    return tensor.contiguous().view(torch.int16).numpy()


def tensor_of(array: np.ndarray[Any, Any], case: Case) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(DTYPES[case.dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where the record goes")
    file = parser.parse_args().file
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for number, case in enumerate(CASES):
        inputs = inputs_of(case, seed=number)
        out, lse = attend(case, inputs, "cuda", "fa4")
        for name, tensor in {**inputs, "out": out}.items():
            arrays[f"{number} {name}"] = bits(tensor)
        arrays[f"{number} lse"] = lse.numpy()
    about = (
        f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, "
        "python -m tests.emulator.h200_record tests/emulator/h200_forward.npz"
    )
    arrays["about"] = np.array(about)
    np.savez_compressed(file, **arrays)
    print(f"{file}: {file.stat().st_size} bytes; {about}")


if __name__ == "__main__":
    main()

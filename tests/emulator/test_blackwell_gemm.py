"""Small matrix products on the tensor cores of sm_100, compiled by CuTe, are exact.

CuTe's layouts decide where operands and results lie, so these cases are what the emulator's reading
of descriptors, of tensor memory and of the registers of `tcgen05.ld` rests on.
"""

import functools
from typing import Any

import pytest
import torch

from fa4 import dsl_runtime
from fa4.emulator import DeviceModel, LaunchReport, run
from fa4.emulator.costs import cost_report

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
ACCUMULATORS = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}

CASES: list[dict[str, Any]] = [
    # types
    {},
    {"dtype": "fp16"},
    {"dtype": "tf32"},
    {"dtype": "e4m3"},
    {"dtype": "e5m2", "k": 128},
    {"dtype": "e5m2", "b_dtype": "e4m3"},
    {"dtype": "s8", "acc": "s32"},
    {"dtype": "u8", "acc": "s32", "n": 32},
    {"dtype": "fp16", "acc": "f16"},
    {"dtype": "e4m3", "acc": "f16", "load": "16x64b"},
    {"dtype": "tf32", "rounds": True},
    # operands stored with k the slower dimension
    {"a_mn": True},
    {"b_mn": True, "n": 128},
    {"dtype": "e4m3", "a_mn": True, "b_mn": True},
    {"dtype": "tf32", "a_mn": True, "b_mn": True, "k": 32},
    {"dtype": "s8", "acc": "s32", "a_mn": True, "b_mn": True},
    # shapes, and instructions that read tensor memory
    {"n": 256, "repeat": 32},
    {"n": 16, "k": 16, "repeat": 1},
    {"load": "16x64b"},
    {"load": "16x128b", "repeat": 2},
    {"load": "16x256b"},
    {"m": 64, "load": "16x64b", "repeat": 4},
    {"m": 64, "load": "16x128b", "repeat": 2},
    {"m": 64, "load": "16x256b", "repeat": 1},
    # pairs of CTAs
    {"ctas": 2, "m": 256},
    {"ctas": 2, "m": 256, "n": 256, "k": 128, "a_mn": True, "b_mn": True, "repeat": 16},
    {"ctas": 2, "m": 128},  # 64 rows each, on all lanes
    {"ctas": 2, "m": 256, "dtype": "e4m3"},
    # clusters in which every CTA loads its share of B for all of them
    {"tiles": 2},
    {"tiles": 4, "b_mn": True, "n": 256, "repeat": 32},
    {"ctas": 2, "m": 256, "tiles": 2},
]


@functools.cache
def compiled(case: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """(tile, kernel)."""
    dsl_runtime.import_dsl("sm_100a")
    from tests.emulator.blackwell_gemm import TileShape, compile_gemm

    tile = TileShape(**dict(case))
    return tile, compile_gemm(tile)


def multiply(case: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel stored, what is right), exact in float32."""
    d, right, _ = multiply_and_report(case, **options)
    return d, right


def multiply_and_report(
    case: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, torch.Tensor, LaunchReport]:
    tile, kernel = compiled(tuple(case.items()))
    generator = torch.Generator().manual_seed(0)

    def operand(rows: int, name: str, is_mn: bool) -> torch.Tensor:
        low = 0 if name == "u8" else -4
        values = torch.randint(low, 5, (rows, tile.k), generator=generator).float()
        matrix = values.to(DTYPES[name])
        return matrix.T.contiguous().T if is_mn else matrix

    rows = tile.tiles * tile.m
    a = operand(rows, tile.dtype, tile.a_mn)
    b = operand(tile.n, tile.b_dtype or tile.dtype, tile.b_mn)
    d = torch.full((rows, tile.n), 99, dtype=ACCUMULATORS[tile.acc])
    (report,) = run(kernel, a, b, d, device=DeviceModel("sm_100a"), **options)
    return d, (a.float() @ b.float().T).to(d.dtype), report


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_is_exact(case: dict[str, Any]) -> None:
    found, right = multiply(case)
    assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("case", "clocks"),
    [
        ({}, 2 * 128 * 64 * 64 / 8192),
        ({"dtype": "e4m3"}, 2 * 128 * 64 * 64 / 16384),
        # 64 rows take as long as 128; those of a pair's other CTA are charged to the first.
        ({"m": 64, "load": "16x64b", "repeat": 4}, 2 * 128 * 64 * 64 / 8192),
        ({"ctas": 2, "m": 256}, 2 * 256 * 64 * 64 / 8192),
    ],
    ids=str,
)
def test_products_are_charged_to_the_tensor_cores(case: dict[str, Any], clocks: float) -> None:
    _, _, report = multiply_and_report(case)
    costs = cost_report(report.launch, report.statistics)
    assert costs.total.clocks["tensor"] == costs.warps[0].clocks["tensor"] == clocks
    m, nbytes = case.get("m", 128), 1 if "dtype" in case else 2
    # Written by TMA once and read by the products once, and D is stored from registers.
    assert costs.total.clocks["shared"] >= 2 * (m + 64) * 64 * nbytes / 128


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@pytest.mark.parametrize("case", [{}, {"ctas": 2, "m": 256}, {"tiles": 2}], ids=str)
def test_product_does_not_depend_on_how_warps_take_turns(
    case: dict[str, Any], schedule: str
) -> None:
    for seed in range(3):
        found, right = multiply(case, schedule=schedule, seed=seed)
        assert torch.equal(found, right), seed

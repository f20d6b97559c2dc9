"""Block-scaled products on the tensor cores of sm_100, compiled by CuTe, are exact.

CuTe's layouts decide where elements and scale factors lie in shared and in tensor memory.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from fa4 import dsl_runtime
from fa4.emulator import DeviceModel, run
from fa4.emulator.float_formats import E2M1, E4M3, E5M2, UE4M3, UE8M0, nibbles

CASES: list[dict[str, Any]] = [
    {},
    {"a": "e5m2"},
    {"n": 256, "k": 256},
    {"n": 64},
    {"a": "e2m1", "b": "e2m1", "k": 256},
    {"a": "e2m1", "b": "e2m1", "k": 256, "n": 256},
    {"a": "e2m1", "b": "e2m1", "scale": "ue4m3", "block": 16, "k": 256},
    {"a": "e2m1", "b": "e2m1", "scale": "ue8m0", "block": 16, "k": 64},
    {"ctas": 2, "m": 256},
    {"ctas": 2, "m": 256, "a": "e2m1", "b": "e2m1", "scale": "ue4m3", "block": 16, "k": 256},
    {"ctas": 2, "m": 256, "n": 256, "a": "e2m1", "b": "e2m1", "k": 256},
]


@functools.cache
def compiled(case: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """(tile, kernel)."""
    dsl_runtime.import_dsl("sm_100a")
    from tests.emulator.blackwell_scaled_gemm import ScaledTileShape, compile_scaled_gemm

    tile = ScaledTileShape(**dict(case))
    return tile, compile_scaled_gemm(tile)


def operand(rng: np.random.Generator, name: str, rows: int, k: int) -> tuple[Any, Any]:
    """(bytes, values) of elements of few significant bits."""
    if name == "e2m1":
        raw = rng.integers(0, 256, (rows, k // 2), np.uint8)
        return raw, E2M1[nibbles(raw)]
    exponent_shift, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[name]
    raw = (rng.integers(bias - 1, bias + 3, (rows, k)) << exponent_shift).astype(np.uint8)
    raw |= rng.integers(0, 2, (rows, k), np.uint8) << 7
    return raw, {"e4m3": E4M3, "e5m2": E5M2}[name][raw]


def blocked(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Codes (rows, blocks) in chunks of 128 rows and 4 blocks: row r's for block b is byte
    16 (r mod 32) + 4 (r div 32) + b of 512. Rows are filled up with codes that would be seen."""
    rows, blocks = scales.shape
    whole = np.full((-(-rows // 128) * 128, -(-blocks // 4) * 4), 0xFF, np.uint8)
    whole[:rows, :blocks] = scales
    chunks = whole.reshape(-1, 4, 32, whole.shape[1] // 4, 4)
    return np.ascontiguousarray(chunks.transpose(0, 3, 2, 1, 4)).reshape(-1)


def multiply(case: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """(what the kernel stored, what is right), exact in float32."""
    tile, kernel = compiled(tuple(case.items()))
    rng = np.random.default_rng(0)
    a, a_values = operand(rng, tile.a, tile.m, tile.k)
    b, b_values = operand(rng, tile.b, tile.n, tile.k)
    low = 126 if tile.scale == "ue8m0" else 7 << 3
    step = 1 if tile.scale == "ue8m0" else 1 << 3
    table = {"ue8m0": UE8M0, "ue4m3": UE4M3}[tile.scale]
    codes = [
        (low + step * rng.integers(0, 3, (rows, tile.k // tile.block))).astype(np.uint8)
        for rows in (tile.m, tile.n)
    ]
    scaled = [
        values * np.repeat(table[code], tile.block, axis=1)
        for values, code in zip((a_values, b_values), codes, strict=True)
    ]
    d = torch.full((tile.m, tile.n), float("nan"))
    arguments = [a, b, *map(blocked, codes)]
    run(kernel, *map(torch.from_numpy, arguments), d, device=DeviceModel("sm_100a"), **options)
    return d.numpy(), scaled[0] @ scaled[1].T


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scaled_product_is_exact(case: dict[str, Any]) -> None:
    found, right = multiply(case)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_scaled_product_does_not_depend_on_how_warps_take_turns(
    case: dict[str, Any], schedule: str
) -> None:
    for seed in range(2):
        found, right = multiply(case, schedule=schedule, seed=seed, check_races=True)
        assert np.array_equal(found, right), seed

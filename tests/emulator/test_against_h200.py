"""The emulated Hopper kernels give the bits that an H200 gave (h200_record.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.emulator.h200_record import CASES, RECORD, Case, attend, bits, tensor_of

# Hardware's ex2, and what its matrix units drop before they add, are not modelled. They show where
# they turn a rounding: of P now and then, and of the output; in fp16, with three mantissa bits
# more, more often.
EQUAL_SHARE = {"bf16": 0.9995, "fp16": 0.99}
FARTHER_SHARE = {"bf16": 2e-4, "fp16": 2e-3}  # more than a rounding of the output itself away


def one_rounding(values: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring values of a 16-bit type around each element."""
    mantissa_bits = 7 if values.dtype == torch.bfloat16 else 10
    _, exponent = torch.frexp(values.float())
    return torch.ldexp(torch.ones(values.shape), exponent - 1 - mantissa_bits)


@pytest.fixture(scope="module")
def answers() -> list[tuple[Case, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each case: (case, out and LSE of the H200, out and LSE of the emulator)."""
    found = []
    with np.load(RECORD) as record:
        for number, case in enumerate(CASES):
            stored = {
                name: tensor_of(record[f"{number} {name}"], case)
                for name in ("q", "k", "v", "out", *(["sink"] if case.has_sink else []))
            }
            expected = stored.pop("out"), torch.from_numpy(record[f"{number} lse"])
            found.append((case, *expected, *attend(case, stored, "cpu", "emulator")))
    return found


def test_nearly_all_outputs_are_the_bits_of_an_h200(answers) -> None:
    for case, expected, _, out, _ in answers:
        same = bits(out) == bits(expected)
        assert same.mean() >= EQUAL_SHARE[case.dtype], case.name


def test_the_other_outputs_are_a_rounding_away(answers) -> None:
    """Of their row's largest output, as a rounding of P is; nearly all of their own."""
    for case, expected, _, out, _ in answers:
        distance = (out.float() - expected.float()).abs()
        largest = torch.maximum(out.abs(), expected.abs())
        row_rounding = one_rounding(largest.amax(-1, keepdim=True))
        assert (distance <= row_rounding).all(), case.name
        farther = (distance > one_rounding(largest)).float().mean()
        assert farther < FARTHER_SHARE[case.dtype], case.name


def test_lses_agree_to_fp32_rounding(answers) -> None:
    for case, _, expected, _, lse in answers:
        assert torch.equal(lse.isneginf(), expected.isneginf()), case.name
        seen = ~expected.isneginf()
        assert (lse[seen] - expected[seen]).abs().max() < 2e-6, case.name


def test_the_record_says_where_it_comes_from() -> None:
    with np.load(RECORD) as record:
        about = str(record["about"])
    assert about.startswith("NVIDIA H200, 20")
    assert "python -m tests.emulator.h200_record" in about

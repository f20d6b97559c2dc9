"""Sums of tensor cores: exact products, one truncation to float32 an instruction."""

import numpy as np
import pytest

from fa4.emulator.tensor_core_sums import add_steps, step_products


def test_products_of_a_chain_are_those_of_its_instructions() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (64, 48)).astype(np.float32)
    b = rng.integers(-4, 5, (256, 48)).astype(np.float32)
    products = step_products(a, b, 16)
    assert products.shape == (3, 64, 256)
    for step, product in enumerate(products):
        part = slice(16 * step, 16 * step + 16)
        assert np.array_equal(product, a[:, part] @ b[:, part].T)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_is_truncated_towards_zero_and_not_rounded(sign: int) -> None:
    just_below_two = np.full((1, 1, 1), sign * (2.0 - 2.0**-30))
    assert add_steps(None, just_below_two) == np.float32(sign * (2.0 - 2.0**-23))
    start = np.full((1, 1), sign, np.float32)
    assert add_steps(start, just_below_two - sign) == np.float32(sign * (2.0 - 2.0**-23))


def test_each_instruction_truncates() -> None:
    """What is too small for the sum is lost in every step, however many steps there are."""
    small = np.full((8, 1, 1), 2.0**-25)
    assert add_steps(np.ones((1, 1), np.float32), small) == 1
    assert add_steps(np.ones((1, 1), np.float32), small.sum(0, keepdims=True)) == 1 + 2.0**-22


def test_products_within_an_instruction_are_not_rounded_one_by_one() -> None:
    a = np.array([[2.0**12, 1.0, -(2.0**12)]], np.float32)
    b = np.array([[2.0**12, 2.0**-20, 2.0**12]], np.float32)
    assert add_steps(None, step_products(a, b, 3)) == 2.0**-20


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([np.inf, 1], np.inf),
        ([np.inf, -np.inf], np.nan),
        ([np.nan, 1], np.nan),
        ([2.0**128, 1], np.inf),
    ],
)
def test_infinities_and_nan_pass(values: list[float], expected: float) -> None:
    found = add_steps(None, np.array(values).reshape(2, 1, 1))
    np.testing.assert_equal(found.item(), expected)

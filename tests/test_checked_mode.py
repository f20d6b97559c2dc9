"""Checked mode: when it is on, and which contents of length tensors it refuses, in which words.

Runs on CPU tensors. Cases C88, C104 and C108; the structure of these tensors (rank, dtype, length,
device) is checked in either mode, by `fa4.problem`.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4
from fa4.checked_mode import check_varlen, checked, is_checked

HEADS, HEAD_DIM = 2, 64


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA4_CHECKED", raising=False)


def packed(rows: int) -> Tensor:
    return torch.zeros(rows, HEADS, HEAD_DIM)


def dense(batch: int, rows: int) -> Tensor:
    return torch.zeros(batch, rows, HEADS, HEAD_DIM)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- when it is on -------------------------------------------------------------------------------


def test_mode_is_off_by_default_and_on_inside_the_context() -> None:
    assert not is_checked()
    with checked():
        assert is_checked()
    assert not is_checked()


def test_innermost_context_counts() -> None:
    with checked():
        with checked(False):
            assert not is_checked()
            with checked():
                assert is_checked()
            assert not is_checked()
        assert is_checked()


def test_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), checked():
        raise KeyError("from the block")
    assert not is_checked()


def test_context_is_a_decorator_too() -> None:
    @checked()
    def call() -> bool:
        return is_checked()

    assert call()
    assert call()
    assert not is_checked()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_environment_decides_where_no_context_does(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4_CHECKED", value)
    assert is_checked() is expected
    for enabled in (True, False):
        with checked(enabled):
            assert is_checked() is enabled


def test_other_values_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4_CHECKED", "yes")
    with pytest.raises(ValueError, match="FA4_CHECKED is 'yes'; it must be 0 or 1"):
        is_checked()


def test_context_is_of_its_own_thread() -> None:
    seen = []
    with checked():
        thread = threading.Thread(target=lambda: seen.append(is_checked()))
        thread.start()
        thread.join()
    assert seen == [False]


# -- what it refuses -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Arguments that must be refused, and the whole message."""

    name: str
    message: str
    q: Tensor = field(default_factory=lambda: packed(300))
    k: Tensor = field(default_factory=lambda: packed(300))
    lengths: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def both(*values: int) -> dict[str, Any]:
    return {"cu_seqlens_q": ints(*values), "cu_seqlens_k": ints(*values)}


REFUSED = [
    Refused(
        "C88: end beyond the rows",
        "cu_seqlens_q[2] is 512, but q has 256 rows; no entry may be above that.",
        q=packed(256),
        k=packed(256),
        lengths=both(0, 256, 512, 768),
    ),
    Refused(
        "C104: longest above max_seqlen",
        "max_seqlen_q is 128, but sequence 1 has length 200; it must be at least the longest, 200.",
        lengths={**both(0, 100, 300), "max_seqlen_q": 128, "max_seqlen_k": 128},
    ),
    Refused(
        "C108: decreasing",
        "cu_seqlens_k[2] is 90, below cu_seqlens_k[1], which is 100; "
        "cumulative lengths must never decrease.",
        lengths={"cu_seqlens_q": ints(0, 100, 200, 300), "cu_seqlens_k": ints(0, 100, 90, 80)},
    ),
    Refused(
        "C108: not starting at 0",
        "cu_seqlens_q[0] is 5; the first sequence must start at 0.",
        lengths=both(5, 100, 300),
    ),
    Refused(
        "negative start",
        "cu_seqlens_q[0] is -1; the first sequence must start at 0.",
        lengths=both(-1, 300),
    ),
    Refused(
        "first offending entry: beyond before decreasing",
        "cu_seqlens_q[1] is 301, but q has 300 rows; no entry may be above that.",
        lengths=both(0, 301, 200),
    ),
    Refused(
        "first offending entry: decreasing before beyond",
        "cu_seqlens_q[2] is 100, below cu_seqlens_q[1], which is 200; "
        "cumulative lengths must never decrease.",
        lengths=both(0, 200, 100, 400),
    ),
    Refused(
        "one row too many of keys",
        "cu_seqlens_k[1] is 301, but k has 300 rows; no entry may be above that.",
        lengths={"cu_seqlens_q": ints(0, 300), "cu_seqlens_k": ints(0, 301)},
    ),
    Refused(
        "used rows beyond a packed sequence",
        "seqused_k[1] is 201; sequence 1 of k has 200 rows, so it must be from 0 to 200.",
        lengths={**both(0, 100, 300), "seqused_k": ints(100, 201)},
    ),
    Refused(
        "used rows beyond a dense sequence",
        "seqused_k[2] is 129; sequence 2 of k has 128 rows, so it must be from 0 to 128.",
        q=dense(3, 64),
        k=dense(3, 128),
        lengths={"seqused_k": ints(128, 0, 129)},
    ),
    Refused(
        "negative used rows",
        "seqused_q[0] is -1; sequence 0 of q has 64 rows, so it must be from 0 to 64.",
        q=dense(3, 64),
        k=dense(3, 128),
        lengths={"seqused_q": ints(-1, 64, 64)},
    ),
    Refused(
        "max_seqlen below the used rows",
        "max_seqlen_k is 49, but sequence 1 has length 50; it must be at least the longest, 60.",
        lengths={**both(0, 100, 200, 300), "seqused_k": ints(10, 50, 60), "max_seqlen_k": 49},
    ),
    Refused(
        "max_seqlen below the rows of a dense tensor",
        "max_seqlen_k is 127, but sequence 0 has length 128; it must be at least the longest, 128.",
        k=dense(1, 128),
        lengths={"cu_seqlens_q": ints(0, 300), "max_seqlen_k": 127},
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refuses(case: Refused) -> None:
    with pytest.raises(ValueError) as refusal:
        check_varlen(q=case.q, k=case.k, **case.lengths)
    assert str(refusal.value) == case.message


# -- what it accepts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "lengths"),
    [
        (packed(300), packed(300), both(0, 100, 300)),
        (packed(300), packed(300), both(0, 0, 300, 300)),  # empty sequences
        (packed(300), packed(300), both(0, 100)),  # rows behind the last sequence are padding
        (packed(0), packed(0), both(0)),  # no sequence at all
        (packed(0), packed(0), both(0, 0)),
        (packed(300), dense(2, 0), {"cu_seqlens_q": ints(0, 1, 2)}),
        (dense(2, 8), dense(2, 9), {"seqused_q": ints(0, 8), "seqused_k": ints(9, 0)}),
        (dense(2, 8), dense(2, 9), {"max_seqlen_q": 8, "max_seqlen_k": 9}),
        (packed(300), packed(300), {**both(0, 100, 300), "max_seqlen_q": 200}),
        # the bound is on the lengths in use
        (packed(300), packed(300), {**both(0, 300), "seqused_q": ints(5), "max_seqlen_q": 5}),
        (dense(0, 8), dense(0, 8), {"seqused_q": ints(), "max_seqlen_q": 1}),
    ],
)
def test_accepts(q: Tensor, k: Tensor, lengths: dict[str, Any]) -> None:
    check_varlen(q=q, k=k, **lengths)


def test_decrease_of_more_than_int32_holds_is_found() -> None:
    """Taken in 32 bits, the length of the second sequence would be 1."""
    q = torch.zeros(1, 1, 1).expand(2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] is -2147483648, below"):
        check_varlen(q=q, k=q, **both(0, 2**31 - 1, -(2**31)))


@pytest.mark.parametrize(
    "lengths",
    [
        {"cu_seqlens_q": ints(5, 4), "cu_seqlens_k": ints(5, 4, 3)},  # two batch sizes
        {"cu_seqlens_q": torch.tensor([5.0, 4.0]), "cu_seqlens_k": ints(5, 4)},
        {"cu_seqlens_q": ints(5, 4)[:, None], "cu_seqlens_k": ints(5, 4)},
        {"cu_seqlens_q": ints(5, 4), "cu_seqlens_k": ints(5, 4), "seqused_q": ints(9, 9, 9)},
        {"cu_seqlens_q": ints(5, 4).to("meta"), "cu_seqlens_k": ints(5, 4)},
        {"cu_seqlens_q": ints(), "cu_seqlens_k": ints()},
        {"cu_seqlens_q": ints(5, 4)},  # packed keys without their lengths
    ],
    ids=["batch", "dtype", "rank", "seqused length", "device", "empty", "missing"],
)
def test_malformed_tensors_are_left_to_the_check_of_structure(lengths: dict[str, Any]) -> None:
    """Their contents are wrong as well; but the message must be about what is wrong first."""
    check_varlen(q=packed(4), k=packed(4), **lengths)
    q = packed(4)
    with checked(), pytest.raises((TypeError, ValueError)) as refusal:
        fa4.flash_attn_varlen_func(q, q, q, **lengths, backend="reference")
    assert "[0] is 5" not in str(refusal.value)


# -- in a call -----------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    result = fa4.flash_attn_varlen_func(q, k, k, backend="reference", **options)
    assert isinstance(result, Tensor)
    return result


def test_public_function_checks_only_in_checked_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """C104: with bounds that are too small the result is right; checked mode refuses them."""
    options = {**both(0, 100, 300), "max_seqlen_q": 128, "max_seqlen_k": 128}
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(300, HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    expected = attend(q, k, **both(0, 100, 300))
    assert torch.equal(attend(q, k, **options), expected)
    with fa4.checked(), pytest.raises(ValueError, match="max_seqlen_q is 128"):
        attend(q, k, **options)
    monkeypatch.setenv("FA4_CHECKED", "1")
    with pytest.raises(ValueError, match="max_seqlen_q is 128"):
        attend(q, k, **options)
    with fa4.checked(False):
        assert torch.equal(attend(q, k, **options), expected)


def test_valid_call_has_the_same_result_in_checked_mode() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(300, HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    options = {**both(0, 100, 300), "seqused_k": ints(7, 0), "causal": True}
    expected = attend(q, k, **options)
    with fa4.checked():
        assert torch.equal(attend(q, k, **options), expected)


def test_lengths_are_read_with_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    original = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        transfers.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    check_varlen(
        q=packed(300),
        k=packed(300),
        **both(0, 100, 300),
        seqused_q=ints(1, 2),
        seqused_k=ints(3, 4),
        max_seqlen_q=2,
        max_seqlen_k=4,
    )
    assert transfers == [(3 + 3 + 2 + 2,)]


def test_capture_is_not_checked_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaTensor(Tensor):
        is_cuda = True

    q = packed(4).as_subclass(CudaTensor)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="captured calls are not checked"):
        check_varlen(q=q, k=packed(4), **both(0, 9))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] is 9"):
        check_varlen(q=q, k=packed(4), **both(0, 9))

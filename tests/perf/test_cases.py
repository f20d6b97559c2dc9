"""The case tables are those that results are compared by, and their tensors are what they say."""

from __future__ import annotations

import pytest
import torch

from perf import cases
from perf.cases import Case

TABLES = {
    "forward": cases.FORWARD,
    "backward": cases.BACKWARD,
    "varlen": cases.VARLEN,
    "decode": cases.DECODE,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_names_are_unique(table: tuple[Case, ...]) -> None:
    names = [case.name for case in table]
    assert len(set(names)) == len(names)


def test_forward_table_has_both_masks_of_every_size() -> None:
    names = {case.name for case in cases.FORWARD}
    assert len(names) == 22
    for size in (
        "d64-1k-b32-h32",
        "d64-4k-b4-h32",
        "d64-16k-b1-h32",
        "d128-1k-b32-h16",
        "d128-4k-b4-h16",
        "d128-16k-b1-h16",
        "d256-1k-b32-h8",
        "d256-4k-b4-h8",
        "d256-16k-b1-h8",
        "d192v128-4k-b4-h16",
        "d128-4k-b4-h32k8",
    ):
        assert {f"{size}-full", f"{size}-causal"} <= names
    # 16k tokens in all, twice as many at the shortest length.
    assert {sum(case.lengths_k) for case in cases.FORWARD} == {16384, 32768}


def test_flops_are_counted_as_usual() -> None:
    full, causal = cases.FORWARD[8:10]
    assert full.name == "d128-4k-b4-h16-full"
    assert full.forward_flops == 4 * 4 * 16 * 4096**2 * 128  # 4 M N d
    assert full.backward_flops == 2.5 * full.forward_flops
    assert causal.forward_flops == full.forward_flops / 2


def test_mixed_lengths_are_drawn_once_for_all() -> None:
    """A changed draw would make results incomparable with older ones."""
    assert cases.drawn_lengths("uniform", 4, 8192, 128) == (6377, 5900, 5015, 2744)
    for case in cases.VARLEN:
        assert min(case.lengths_k) >= 128
        assert max(case.lengths_k) <= 8192
        assert len(set(case.lengths_k)) > 1
    log = cases.drawn_lengths("log", 1000, 8192, 128)
    assert 0.4 < sum(length < 1024 for length in log) / 1000 < 0.6  # half below the middle octave
    assert 1 <= min(cases.RAGGED) < 64
    assert 8192 < max(cases.RAGGED) <= 32768


def test_packed_inputs_have_the_lengths_of_the_case() -> None:
    case = Case((5, 0, 3), (5, 0, 3), 4, 2, 64, 32, label="mix")
    inputs = cases.make_inputs(case, "cpu")
    assert inputs.q.shape == (8, 4, 64)
    assert inputs.v.shape == (8, 2, 32)
    assert inputs.cu_seqlens.tolist() == [0, 5, 5, 8]


def test_pages_of_a_cache_are_all_in_use_once() -> None:
    case = Case((1, 1, 1), (5, 16, 1), 4, 2, 64, 64, page_size=4, label="ragged")
    inputs = cases.make_inputs(case, "cpu")
    assert inputs.k.shape == (2 + 4 + 1, 4, 2, 64)
    assert inputs.q.shape == (3, 1, 4, 64)
    assert inputs.cache_seqlens.tolist() == [5, 16, 1]
    used = torch.cat([inputs.page_table[b, :n] for b, n in enumerate((2, 4, 1))])
    assert sorted(used.tolist()) == list(range(7))
    assert case.kv_bytes == 2 * 22 * 2 * 128


def test_a_latent_cache_is_read_once_for_keys_and_values() -> None:
    case = Case((1,), (64,), 16, 1, 576, 512, page_size=64, is_latent=True)
    inputs = cases.make_inputs(case, "cpu")
    assert inputs.v.data_ptr() == inputs.k.data_ptr()
    assert inputs.v.shape[-1] == 512
    assert case.kv_bytes == 2 * 64 * 576


def test_copies_differ_and_repeat() -> None:
    case = cases.dense(1, 8, 1, 1, 64)
    first, again, second = (cases.make_inputs(case, "cpu", copy).q for copy in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)

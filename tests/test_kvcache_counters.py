"""Who gets which counters. That kernels leave them at 0: tests/gpu/test_kvcache.py."""

from typing import Any

import pytest
import torch

from fa4 import kvcache_counters
from fa4.kvcache_counters import LEAST, POOL, arrival_counters

GPU = torch.device("cuda", 0)


class Cuda:
    """A CPU that passes for a GPU with streams."""

    stream = 7
    is_capturing = False
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()

    def zeros(count: int, device: Any) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(kvcache_counters, "_zeros", zeros)
    monkeypatch.setattr(kvcache_counters, "_of_streams", {})
    monkeypatch.setattr(kvcache_counters, "_pools", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.stream, raising=False
    )
    return cuda


def addresses(counters: torch.Tensor) -> range:
    return range(counters.data_ptr(), counters.data_ptr() + 4 * counters.numel(), 4)


def test_a_stream_keeps_its_counters_and_shares_them_with_no_other(cuda: Cuda) -> None:
    mine = arrival_counters(GPU, 5)
    assert mine.numel() >= 5
    assert arrival_counters(GPU, LEAST) is mine
    cuda.stream = 8
    others = arrival_counters(GPU, 5)
    assert not set(addresses(mine)) & set(addresses(others))
    cuda.stream = 7
    assert arrival_counters(GPU, 3) is mine
    assert arrival_counters(GPU, LEAST + 1).numel() > LEAST
    assert cuda.waits == 1


def test_captured_launches_share_counters_with_nobody(cuda: Cuda) -> None:
    eager = arrival_counters(GPU, 5)
    cuda.is_capturing = True
    given = [arrival_counters(GPU, count) for count in (5, 264, 1)]
    assert [counters.numel() for counters in given] == [5, 264, 1]
    used = [set(addresses(counters)) for counters in (eager, *given)]
    assert len(set.union(*used)) == sum(map(len, used))


@pytest.mark.parametrize("warm", [False, True])
def test_a_capture_that_finds_too_few_gets_new_ones(cuda: Cuda, warm: bool) -> None:
    if warm:
        arrival_counters(GPU, 5)
    cuda.is_capturing = True
    a, b = (arrival_counters(GPU, POOL + 1) for _ in range(2))
    assert not a.any()
    assert a.data_ptr() != b.data_ptr()


def test_without_a_gpu_counters_are_new_zeros() -> None:
    a, b = (arrival_counters(torch.device("cpu"), 9) for _ in range(2))
    assert a.tolist() == [0] * 9
    assert a.dtype == torch.int32
    assert a.data_ptr() != b.data_ptr()

"""Who gets which counters. That kernels leave them at 0: tests/gpu/test_kvcache.py and
test_forward.py."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fa4 import device_counters as module
from fa4.device_counters import POOL, device_counters

GPU = torch.device("cuda", 0)


class Cuda:
    """A CPU that passes for a GPU with streams."""

    SIDE = 99  # of the module's own

    def __init__(self) -> None:
        self.stream = 7
        self.is_capturing = False
        self.fills: list[tuple[int, int]] = []  # stream, counters
        self.waits: list[int] = []  # for a stream

    def synchronize(self) -> None:
        self.waits.append(self.SIDE)

    @contextlib.contextmanager
    def on(self, side: Any) -> Iterator[None]:
        assert side is self
        before, self.stream = self.stream, self.SIDE
        yield
        self.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()

    def zeros(count: int, device: Any) -> torch.Tensor:
        assert device == GPU
        cuda.fills.append((cuda.stream, count))
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(module, "_zeros", zeros)
    monkeypatch.setattr(module, "_pools", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.stream, raising=False
    )
    module._of_stream.cache_clear()
    yield cuda
    module._of_stream.cache_clear()


def addresses(counters: torch.Tensor) -> set[int]:
    first = counters.data_ptr()
    return set(range(first, first + 4 * counters.numel(), 4))


def test_a_stream_keeps_its_counters_and_shares_them_with_no_other(cuda: Cuda) -> None:
    mine = device_counters(GPU, 5)
    assert mine.numel() >= 5
    assert device_counters(GPU, mine.numel()) is mine
    cuda.stream = 8
    others = device_counters(GPU, 5)
    assert not addresses(mine) & addresses(others)
    cuda.stream = 7
    assert device_counters(GPU, 5) is mine
    assert device_counters(GPU, 1025).numel() >= 1025


def test_one_counter_is_one_counter(cuda: Cuda) -> None:
    assert device_counters(GPU, 1).shape == (1,)
    cuda.is_capturing = True
    assert device_counters(GPU, 1).shape == (1,)


def test_sizes_that_keep_changing_fill_little_memory(cuda: Cuda) -> None:
    most = 3000
    for count in range(1, most):
        assert device_counters(GPU, count).numel() >= count
    assert sum(count for stream, count in cuda.fills if stream == 7) <= 4 * most


def test_only_a_fill_of_ones_own_is_waited_for_and_once(cuda: Cuda) -> None:
    for cuda.stream in (7, 8):
        for count in (5, 300):
            device_counters(GPU, count)
    assert [fill for fill in cuda.fills if fill[0] == Cuda.SIDE] == [(Cuda.SIDE, POOL)]
    assert cuda.waits == [Cuda.SIDE]


def test_captured_launches_share_counters_with_nobody_and_fill_nothing(cuda: Cuda) -> None:
    eager = device_counters(GPU, 5)
    cuda.is_capturing = True
    cuda.fills.clear()
    given = [device_counters(GPU, count) for count in (5, 264, 1)]
    assert [counters.numel() for counters in given] == [5, 264, 1]
    used = [addresses(counters) for counters in (eager, *given)]
    assert len(set.union(*used)) == sum(map(len, used))
    assert not cuda.fills


@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "used up"])
def test_a_capture_that_finds_too_few_fills_its_own_in_the_graph(cuda: Cuda, is_warm: bool) -> None:
    if is_warm:
        device_counters(GPU, 5)
    cuda.is_capturing = True
    cuda.fills.clear()
    a, b = (device_counters(GPU, POOL + 1) for _ in range(2))
    assert cuda.fills == [(7, POOL + 1)] * 2
    assert a.data_ptr() != b.data_ptr()
    assert cuda.waits == [Cuda.SIDE] * is_warm


def test_without_a_gpu_counters_are_new_zeros() -> None:
    a, b = (device_counters(torch.device("cpu"), 9) for _ in range(2))
    assert a.tolist() == [0] * 9
    assert a.dtype == torch.int32
    assert a.data_ptr() != b.data_ptr()

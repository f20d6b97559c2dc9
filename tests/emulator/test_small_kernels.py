"""Small CuTe-DSL kernels of ours (small_kernels.py), emulated, against NumPy."""

import numpy as np
import pytest
import torch

from fa4.emulator import run
from fa4.emulator.errors import UnwrittenRead

SCHEDULES = [("round_robin", 0), ("random", 1), ("adversarial", 2)]


@pytest.fixture(params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


def compiled(arch: str, name: str, *tensors: torch.Tensor, uses: tuple[str, ...] = (), **options):
    """A kernel for such tensors, whose text has all of these instructions."""
    import cutlass

    from tests.emulator import small_kernels

    types = {
        torch.float32: cutlass.Float32,
        torch.bfloat16: cutlass.BFloat16,
        torch.int32: cutlass.Int32,
    }
    function = getattr(small_kernels, name)(**options)
    kernel = small_kernels.compile_kernel(
        arch, function, *((types[tensor.dtype], tensor.shape) for tensor in tensors)
    )
    missing = [opcode for opcode in uses if opcode not in kernel.__ptx__]
    assert not missing, f"the kernel does not use {missing}"
    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_with_a_half_warp(arch: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 6, 1000).to(dtype)
    y = torch.full_like(x, float("nan"))
    run(compiled(arch, "Gelu", x, y, uses=("tanh.approx.f32",)), x, y)
    wide = x.double().numpy()
    exact = wide * (1 + np.tanh(0.8 * wide + 0.04 * wide**3)) / 2
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    assert np.abs(y.double().numpy() - exact).max() < tolerance * 6


def test_transpose_through_shared_memory(arch: str) -> None:
    x = torch.arange(70 * 45, dtype=torch.int32).view(70, 45)
    y = torch.full((45, 70), -1, dtype=torch.int32)
    kernel = compiled(arch, "Transpose", x, y, uses=("bar.sync",))
    for schedule, seed in SCHEDULES:
        y.fill_(-1)
        run(kernel, x, y, schedule=schedule, seed=seed, check_races=True)
        assert torch.equal(y, x.T), schedule


def test_transpose_without_its_barrier_is_caught(arch: str) -> None:
    x = torch.zeros(64, 64, dtype=torch.int32)
    with pytest.raises(UnwrittenRead, match=r"shared memory(.|\n)*small_kernels\.py"):
        run(compiled(arch, "Transpose", x, x, synchronises=False), x, torch.zeros_like(x))


def test_reductions_by_shuffles_redux_and_votes(arch: str) -> None:
    x = torch.randint(-1000, 1000, (5, 300), generator=torch.Generator().manual_seed(0)).float()
    total = torch.zeros(5)
    largest, positive = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    instructions = ("shfl.sync.bfly", "redux.sync.max", "vote.sync.ballot", "popc")
    kernel = compiled(arch, "RowSums", x, total, largest, positive, uses=instructions)
    for schedule, seed in SCHEDULES:
        run(kernel, x, total, largest, positive, schedule=schedule, seed=seed, check_races=True)
        assert torch.equal(total, x.sum(1))  # integers: exact in any order
        assert torch.equal(largest, x.amax(1).int())
        assert torch.equal(positive, (x > 0).sum(1).int())


def test_atomics_in_shared_and_global_memory(arch: str) -> None:
    x = torch.randint(0, 16, (1000,), generator=torch.Generator().manual_seed(0)).int()
    counts, tickets = torch.zeros(17, dtype=torch.int32), torch.zeros_like(x)
    kernel = compiled(arch, "Histogram", x, counts, tickets, uses=("atom.shared", "atom.global"))
    for schedule, seed in SCHEDULES:
        counts.zero_()
        run(kernel, x, counts, tickets, schedule=schedule, seed=seed, check_races=True)
        assert np.array_equal(counts[:16].numpy(), np.bincount(x.numpy(), minlength=16))
        assert counts[16] == len(x)
        assert torch.equal(tickets.sort().values, torch.arange(len(x), dtype=torch.int32))


def test_product_with_cp_async_ldmatrix_and_mma(arch: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (48, 8))
    c = torch.zeros(48, 8)
    instructions = ("cp.async.cg", "cp.async.wait_group", "ldmatrix", "mma.sync.aligned.m16n8k16")
    kernel = compiled(arch, "Product", a, b, c, uses=instructions)
    exact = a.double() @ b.double().T
    for schedule, seed in SCHEDULES:
        c.fill_(float("nan"))
        run(kernel, a, b, c, schedule=schedule, seed=seed, check_races=True)
        assert (c.double() - exact).abs().max() < 1e-5, schedule

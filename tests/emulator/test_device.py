"""`fa4.emulator.run` and `emulate_forward`: arguments, registered memory, reports."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fa4
from fa4 import launch as real_launch
from fa4.emulator import device, emulate_forward, run
from fa4.emulator.device import (
    PreparedRun,
    TensorUse,
    extent_bytes,
    host_function,
    prepare_forward,
)
from fa4.emulator.errors import EmulationError, OutOfBounds, UnwrittenRead
from fa4.emulator.memory import AddressSpace, GlobalMemory, Space
from fa4.launch import ForwardLaunch, Lengths
from tests.emulator.tiny_options_kernel import compile_cluster, compile_tiny, tiny_spec
from tests.oracle import Case, assert_matches, make_inputs

# -- running ---------------------------------------------------------------------------------------


def test_small_kernel_writes_its_output_in_place() -> None:
    x, y = torch.arange(300.0), torch.full((300,), -1.0)
    (report,) = run(tiny_spec(constant=2), x, y)
    assert torch.equal(y, x + 2)
    assert report.launch.grid == (3, 1, 1)
    assert report.statistics.instructions > 0


def test_compiled_function_runs_as_it_is(tmp_path: Path) -> None:
    spec = tiny_spec(constant=5, dtype="int32")
    options = f"--keep-ptx --dump-dir={tmp_path}"
    compiled = compile_tiny(spec.features, spec.schedule, spec.arch, options)
    x, y = torch.arange(7, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    run(compiled, x, y)
    assert torch.equal(y, x + 5)
    assert host_function(compiled) is host_function(compiled)


def test_ctas_of_a_cluster_know_their_rank() -> None:
    ranks = torch.full((6,), -1, dtype=torch.int32)
    run(compile_cluster(shared_bytes=0), ranks)
    assert ranks.tolist() == [0, 1, 0, 1, 0, 1]


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="check_race"):
        run(tiny_spec(), torch.zeros(1), torch.zeros(1), check_race=True)


def test_store_to_an_input_is_an_error_that_names_it() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    uses = {1: TensorUse("y", is_output=False)}
    with pytest.raises(OutOfBounds, match=r"y \(16 bytes .* read-only"):
        run(tiny_spec(), x, y, uses=uses)


def test_load_of_an_unwritten_output_is_an_error_unless_unchecked() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    uses = {0: TensorUse("x", has_content=False)}
    with pytest.raises(UnwrittenRead, match="x"):
        run(tiny_spec(), x, y, uses=uses)
    run(tiny_spec(), x, y, uses=uses, check_unwritten=False)
    assert torch.equal(y, torch.ones(4))


def test_output_that_is_not_written_whole_is_an_error() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    unused = torch.zeros(2)
    memory = GlobalMemory()
    uses = {2: TensorUse("unused", has_content=False)}
    (output,) = device._register_tensors(memory, (x, y, unused), uses, True)
    with pytest.raises(UnwrittenRead, match="left 8 bytes of unused"):
        device._require_whole(output)


# -- memory that kernels may touch -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3), 24),
        (torch.empty(2, 3)[:, :2], 20),  # up to the last element, not the end of the row
        (torch.empty(2, 3, dtype=torch.bfloat16).T, 12),
        (torch.empty(0, 3), 0),
        (torch.empty(3).expand(5, 3), 12),
    ],
)
def test_extent_ends_with_the_last_element(tensor: torch.Tensor, expected: int) -> None:
    assert extent_bytes(tensor) == expected


def load(memory: GlobalMemory, address: int) -> np.ndarray:
    return AddressSpace(memory).load(Space.GLOBAL, np.array([address], np.uint64), 4)


def test_only_the_arguments_can_be_touched() -> None:
    whole = torch.arange(10, dtype=torch.int32)
    memory = GlobalMemory()
    device._register_tensors(memory, (whole[2:5], None, 3), {}, True)
    assert load(memory, whole.data_ptr() + 16).view(np.int32) == 4
    for element in (1, 5):
        with pytest.raises(OutOfBounds, match="argument 0"):
            load(memory, whole.data_ptr() + 4 * element)


def test_tensors_that_share_memory_restrict_nothing() -> None:
    whole = torch.zeros(4, 2, dtype=torch.int32)
    first, second = whole[:, 0], whole[:, 1]
    uses = {0: TensorUse("q", is_output=False), 1: TensorUse("out", has_content=False)}
    memory = GlobalMemory()
    assert device._register_tensors(memory, (first, second), uses, True) == []
    assert all(a.writable and a.written is None for a in memory.allocations)


# -- the forward launch ----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gives_out", [False, True])
@pytest.mark.parametrize("wants_lse", [False, True])
def test_arguments_are_those_of_a_launch_on_a_device(
    packed: bool, gives_out: bool, wants_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.zeros(2, 24, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    lengths = Lengths(seqused_k=torch.tensor([3, 24], dtype=torch.int32))
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        cu_seqlens = torch.tensor([0, 24, 48], dtype=torch.int32)
        lengths = lengths._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    sink = torch.zeros(2)
    out = torch.zeros_like(q) if gives_out else None
    decision = fa4.explain(
        q, k, v, **lengths._asdict(), sink=sink, window_size=(5, 3), softcap=2.0, arch="sm_90a"
    )
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(real_launch, "get_kernel", lambda spec: lambda *args: calls.append(args))
    monkeypatch.setattr(real_launch, "multiprocessor_count", lambda device: 4)

    def prepare(spec: Any, *args: Any, **options: Any) -> PreparedRun:
        calls.append(args)
        return PreparedRun((), GlobalMemory(), args)

    monkeypatch.setattr(device, "prepare", prepare)
    assert decision.kernel is not None
    on_device = ForwardLaunch(decision.problem, decision.kernel, q)
    expected_out, expected_lse = on_device(q, k, v, lengths, sink, out, wants_lse)
    actual_out, actual_lse = emulate_forward(decision, q, k, v, lengths, sink, out, wants_lse)
    real, emulated = calls
    assert len(real) == len(emulated)
    for position, (a, b) in enumerate(zip(real, emulated, strict=True)):
        if position in (3, 4):  # buffers of the call's own
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        else:
            assert a is b or a == b
    assert (actual_out is out) == (expected_out is out) == gives_out
    assert actual_lse.shape == expected_lse.shape


def test_problem_without_a_kernel_is_refused_with_the_reasons() -> None:
    q = torch.zeros(1, 8, 1, 64)
    decision = fa4.explain(q, q, q, arch="sm_90a")
    with pytest.raises(ValueError, match="dtype fp32 is not one of"):
        emulate_forward(decision, q, q, q, None, None, None, False)


@pytest.mark.parametrize("tiles", [1, 3, 9])
def test_tiles_are_counted_in_a_counter_that_is_zero_again(tiles: int) -> None:
    """Fewer tiles than CTAs could be, more, and a multiple; run twice over the same counter."""
    inputs = make_inputs(Case((70,), (80,), tiles, tiles))
    decision = fa4.explain(inputs.q, inputs.k, inputs.v, arch="sm_90a")
    prepared, out, lse = prepare_forward(decision, inputs.q, inputs.k, inputs.v, multiprocessors=3)
    (counter,) = prepared.counters
    for _ in range(2):
        out.fill_(torch.nan)
        prepared.execute()
        assert counter.tolist() == [0]
        assert_matches(out, lse, inputs)


def test_a_counter_that_is_not_given_back_is_an_error() -> None:
    inputs = make_inputs(Case((70,), (80,), 2, 2))
    decision = fa4.explain(inputs.q, inputs.k, inputs.v, arch="sm_90a")
    prepared, _, _ = prepare_forward(decision, inputs.q, inputs.k, inputs.v, multiprocessors=1)
    wraps_later = prepared.launches[0].ptx.replace("gpu.inc.u32", "gpu.add.u32")
    launch = dataclasses.replace(prepared.launches[0], ptx=wraps_later)
    with pytest.raises(EmulationError, match=r"Counters are left at \[\d+\], not at 0"):
        dataclasses.replace(prepared, launches=(launch,)).execute()

"""A launch is caught whole: entry, text, shape and parameters, from the real host code."""

import ctypes
import dataclasses
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fa4.emulator
from fa4.compiler import KernelSpec
from fa4.emulator import host_library
from fa4.emulator.capture import DeviceModel, HostFunction, InvalidLaunch, check_launch
from fa4.emulator.cuda_tensors import as_cuda
from fa4.emulator.device import TensorUse
from fa4.emulator.errors import EmulationError
from fa4.emulator.host_library import HostLibraryError, library_of_compiled, library_of_spec
from fa4.emulator.launch_record import Launch
from fa4.emulator.ptx import Parameter, parse
from fa4.kernels.features import ForwardFeatures
from fa4.pipelines.sm90 import forward_schedule
from tests.emulator.tiny_options_kernel import (
    compile_cluster,
    compile_pair,
    compile_tiny,
    tiny_spec,
)


@pytest.fixture(scope="module")
def add_one() -> HostFunction:
    return HostFunction(library_of_spec(tiny_spec(constant=1)))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def vectors(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length).to(dtype), torch.empty(length, dtype=dtype)


def parameters(launch: Launch) -> list[Parameter]:
    return list(parse(launch.ptx).kernels[launch.entry].parameters.values())


def test_launch_has_entry_shape_and_pointers_of_the_host_code(add_one: HostFunction) -> None:
    x, y = vectors(300)
    (launch,) = add_one.capture(x, y)
    assert f".entry {launch.entry}(" in launch.ptx
    assert launch.grid == (3, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert launch.shared_bytes == 0
    assert launch.num_ctas == 3
    assert launch.threads == 128
    # A tensor parameter is its pointer, then its dynamic extent.
    first, second = parameters(launch)
    assert struct.unpack_from("<Qi", launch.params, first.offset) == (x.data_ptr(), 300)
    assert struct.unpack_from("<Qi", launch.params, second.offset) == (y.data_ptr(), 300)
    assert len(launch.params) == second.offset + second.size


def test_each_call_is_caught_anew(add_one: HostFunction) -> None:
    assert [add_one.capture(*vectors(n))[0].grid[0] for n in (1, 128, 129)] == [1, 1, 2]


def test_text_belongs_to_the_library_and_not_to_the_entry_name() -> None:
    functions = [HostFunction(library_of_spec(tiny_spec(constant=c))) for c in (1, 2)]
    one, two = (function.capture(*vectors(4))[0] for function in functions)
    assert one.entry == two.entry
    assert one.ptx != two.ptx


def test_checks_of_the_compiled_function_apply(add_one: HostFunction) -> None:
    x, y = vectors(4)
    with pytest.raises(TypeError, match="Expects 2 parameters"):
        add_one.capture(x)
    with pytest.raises(ValueError, match="dtype=float32"):
        add_one.capture(x.half(), y)
    assert len(add_one.capture(x, y)) == 1


def test_empty_grid_is_refused_and_later_calls_work(add_one: HostFunction) -> None:
    with pytest.raises(InvalidLaunch, match="empty dimension"):
        add_one.capture(*vectors(0))
    assert len(add_one.capture(*vectors(1))) == 1


def test_unmodelled_device_attribute_is_an_error_that_names_it() -> None:
    class Nothing(DeviceModel):
        def attribute(self, number: int) -> int | None:
            return None

    function = HostFunction(host_library._build(tiny_spec(constant=3)), Nothing())
    with pytest.raises(EmulationError, match="attribute 97"):
        function.capture(*vectors(1))


def test_device_model_answers_by_architecture() -> None:
    device = DeviceModel("sm_100a", multiprocessors=7)
    assert [device.attribute(n) for n in (16, 75, 76, 97)] == [7, 10, 0, 232_448]
    assert DeviceModel("sm_90a").compute_capability == (9, 0)
    assert device.attribute(12345) is None


def forward_launch(length: int = 300, multiprocessors: int = 4) -> tuple[Launch, torch.Tensor]:
    """The Hopper kernel over one head of `length` queries and keys, and its q."""
    features = ForwardFeatures("bf16", 64, 64)
    spec = KernelSpec(
        "fa4.kernels.sm90.forward:compile_forward", "sm_90a", features, forward_schedule(features)
    )
    q, k, v, o = (torch.zeros(1, length, 1, 64, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.zeros(1, 1, length)
    lengths = sink = (None,)
    counter = torch.zeros(1, dtype=torch.int32)
    (launch,) = HostFunction(library_of_spec(spec)).capture(
        q, k, v, o, lse, *4 * lengths, *sink, 0.125, 0.0, 0, 0, 1, multiprocessors, 1, 1, counter
    )
    return launch, q


def test_forward_kernel_packs_a_tensor_map_and_asks_for_shared_memory() -> None:
    launch, q = forward_launch()
    features = ForwardFeatures("bf16", 64, 64)
    schedule = forward_schedule(features)
    assert launch.block == (schedule.threads, 1, 1)
    assert launch.shared_bytes >= schedule.smem_bytes
    assert launch.grid == (-(-300 // schedule.tile_m), 1, 1)
    # The first parameter is q's descriptor; its first word is the address.
    assert parameters(launch)[0].size == 128
    assert struct.unpack_from("<Q", launch.params) == (q.data_ptr(),)


def test_persistent_grid_follows_the_number_of_multiprocessors() -> None:
    assert forward_launch(300, multiprocessors=1)[0].grid == (1, 1, 1)


def test_cluster_and_shared_memory_are_those_of_the_launch() -> None:
    function = HostFunction(library_of_compiled(compile_cluster(shared_bytes=4096)))
    (launch,) = function.capture(torch.zeros(6, dtype=torch.int32))
    assert (launch.grid, launch.cluster, launch.shared_bytes) == ((6, 1, 1), (2, 1, 1), 4096)
    with pytest.raises(InvalidLaunch, match="not whole clusters"):
        function.capture(torch.zeros(5, dtype=torch.int32))


GOOD = Launch("k", "", (4, 2, 1), (128, 1, 1), (2, 1, 1), 1000, b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "empty dimension"),
        ({"block": (1025, 1, 1)}, "more than 1024 threads"),
        ({"shared_bytes": 232_449}, "more shared memory than the 232448 bytes"),
        ({"cluster": (3, 1, 1)}, "not whole clusters"),
    ],
)
def test_launch_that_a_driver_would_refuse(change: dict[str, object], message: str) -> None:
    check_launch(GOOD, DeviceModel())
    with pytest.raises(InvalidLaunch, match=message):
        check_launch(dataclasses.replace(GOOD, **change), DeviceModel())  # type: ignore[arg-type]


# -- the library -----------------------------------------------------------------------------------


def test_library_is_built_once_and_found_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    path = library_of_spec(tiny_spec())
    assert isinstance(path, Path)
    assert path.parent == tmp_path
    assert "_emulated-sm_90a-" in path.name
    monkeypatch.setattr(host_library, "_build", lambda spec: pytest.fail("built again"))
    assert library_of_spec(tiny_spec()) == path


def test_library_that_cannot_be_stored_is_loaded_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setenv("FA4_CACHE_DIR", str(no_folder))
    with pytest.warns(match="cannot be written"):
        library = library_of_spec(tiny_spec())
    assert isinstance(library, bytes)
    assert len(HostFunction(library).capture(*vectors(5))) == 1


def test_cuda_calls_are_bound_inside_the_library_and_not_offered_to_others() -> None:
    path = library_of_spec(tiny_spec())
    assert isinstance(path, Path)
    image = ctypes.CDLL(str(path))
    assert image.fa4_emulator_connect
    for name in host_library._shim_functions():
        assert not hasattr(image, name)


def test_cuda_call_without_an_answer_is_an_error_that_names_it() -> None:
    with pytest.raises(HostLibraryError, match="calls _cudaMemcpyAsync, which"):
        host_library.link(b"\0_cudaGetDevice\0_cudaMemcpyAsync\0", "")


def test_shim_defines_the_calls_of_host_code() -> None:
    assert host_library._shim_functions() >= {
        "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData",
        "cuda_dialect_init_library_once",
    }


def test_compiled_function_without_its_text_is_refused() -> None:
    spec = tiny_spec()
    compiled = compile_tiny(spec.features, spec.schedule, spec.arch)  # type: ignore[arg-type]
    with pytest.raises(HostLibraryError, match="--keep-ptx"):
        library_of_compiled(compiled)


def test_entry_without_options_is_refused_with_its_name() -> None:
    from tests.tiny_kernel import tiny_spec as spec_without_options

    with pytest.raises(Exception, match=r"fp32_plus1 for the emulator .* positional arguments"):
        host_library._build(spec_without_options())


def test_missing_c_compiler_is_an_error_that_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(HostLibraryError, match="needs a C compiler"):
        host_library.link(b"", "")


# -- tensors ---------------------------------------------------------------------------------------


def test_relabelled_tensor_shares_memory_and_keeps_strides() -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    view = as_cuda(whole[:, ::2])
    assert str(view.device) == "cuda:0"
    assert tuple(view.shape) == (2, 2, 4)
    assert tuple(view.strides) == (12, 8, 1)
    # The label is the copy's, not the original's.
    assert whole.device.type == "cpu"
    assert whole.__dlpack_device__()[0] == 1


def test_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="on meta; the emulator takes CPU tensors"):
        as_cuda(torch.empty(2, device="meta"))


def test_tensors_may_come_in_a_tuple() -> None:
    function = HostFunction(library_of_compiled(compile_pair()))
    x, y = vectors(64)
    fa4.emulator.run(function, (x, y))
    assert torch.equal(y, x + 1)
    inputs = {0: TensorUse("both")}  # of arguments by position: says nothing of those in tuples
    fa4.emulator.run(function, (y, x), uses=inputs)
    assert torch.equal(x, y + 1)
    fa4.emulator.run(function, Pair(x, y))
    assert torch.equal(y, x + 1)

"""The compile cache: what is compiled when, what the disk key holds, and what a bad disk does.

Every test has its own empty cache folder and compiles `tests.tiny_kernel`. Nothing is launched: a
loaded function names its own signature when it refuses CPU tensors, which shows that it is there
and is the one that was asked for. Cases C70 to C79 as far as they need no GPU.
"""

import errno
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4 import compiler, disk_cache, dsl_runtime
from fa4.compiler import CacheWarning, KernelCompileError, KernelSpec
from tests.tiny_kernel import TinyFeatures, TinySchedule, tiny_spec

REPOSITORY = Path(__file__).parent.parent
WARM_LOAD_S = 0.15


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder and a process that has loaded nothing and warned about nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA4_CACHE_DIR", str(folder))
    monkeypatch.setattr(disk_cache, "_warned", set())
    monkeypatch.setattr(compiler, "_link_problem", None)
    memoised = (compiler._source_digest, dsl_runtime.toolchain)
    for function in memoised:
        function.cache_clear()
    compiler.forget_loaded_kernels()
    yield folder
    for function in memoised:
        function.cache_clear()
    compiler.forget_loaded_kernels()


class Counts:
    """Compiles and disk hits since the object was made."""

    def __init__(self) -> None:
        self.start = (compiler.compile_count(), compiler.disk_hits())

    @property
    def compiles(self) -> int:
        return compiler.compile_count() - self.start[0]

    @property
    def disk_hits(self) -> int:
        return compiler.disk_hits() - self.start[1]


def signature(function: Callable[..., Any]) -> str:
    """Argument list of a TVM-FFI function, out of its refusal of CPU tensors."""
    with pytest.raises((TypeError, ValueError), match="when calling") as refusal:
        function(torch.zeros(4), torch.zeros(4))
    return str(refusal.value).split("`")[1]


def recorded_warnings(call: Callable[[], Any]) -> list[str]:
    """Messages of the CacheWarnings that a call gives; any other warning is an error."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    assert all(issubclass(item.category, CacheWarning) for item in record), record
    return [str(item.message) for item in record]


def only_entry(cache: Path) -> Path:
    (path,) = (item.path for item in disk_cache.cache_entries())
    assert path.parent == cache
    return path


def start_python(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**inherited, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """What the script printed last, as JSON."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def run_python(script: str, *arguments: object, **environment: str) -> Any:
    return finish(start_python(script, *arguments, **environment))


# -- memory, disk, compiler ----------------------------------------------------------------------


def test_second_call_comes_from_memory_and_the_next_process_from_disk() -> None:
    counts = Counts()
    first = compiler.get_kernel(tiny_spec())
    assert (counts.compiles, counts.disk_hits) == (1, 0)
    assert compiler.get_kernel(tiny_spec()) is first
    assert (counts.compiles, counts.disk_hits) == (1, 0)
    compiler.forget_loaded_kernels()
    again = compiler.get_kernel(tiny_spec())
    assert (counts.compiles, counts.disk_hits) == (1, 1)
    assert (
        signature(again)
        == signature(first)
        == ("__call__(x: Tensor([n0], float32), y: Tensor([n0], float32))")
    )


def test_each_specialisation_gets_its_own_kernel() -> None:
    specs = {
        "float32": tiny_spec("fp32"),
        "float16": tiny_spec("fp16"),
        "int32": tiny_spec("int32", arch="sm_100a"),
    }
    for _ in ("compiled", "from disk"):
        loaded = {dtype: compiler.get_kernel(spec) for dtype, spec in specs.items()}
        for dtype, function in loaded.items():
            assert f"x: Tensor([n0], {dtype})" in signature(function)
        compiler.forget_loaded_kernels()
    assert len(disk_cache.cache_entries()) == 3


def test_values_baked_into_the_code_are_in_the_key(cache: Path) -> None:
    """C75: kernels that differ only in a captured constant; the profiler's name is the same."""
    counts = Counts()
    reports = [compiler.compile_kernel(tiny_spec(constant=c)) for c in (15, 50, 0, 15)]
    assert counts.compiles == 3
    assert [report.was_cached for report in reports] == [False, False, False, True]
    assert reports[0].path == reports[3].path
    assert len({report.path.read_bytes() for report in reports if report.path}) == 3


def test_warm_first_call_is_fast_and_does_not_import_the_dsl() -> None:
    compiler.compile_kernel(tiny_spec())
    script = """
import json, sys, time
import torch
from fa4 import compiler
from tests.tiny_kernel import tiny_spec
spec = tiny_spec()
start = time.perf_counter()
function = compiler.get_kernel(spec)
seconds = time.perf_counter() - start
try:  # apart from the timing: TVM-FFI's first error costs 0.6 s, for its backtrace
    function(torch.zeros(4), torch.zeros(4))
except ValueError as error:
    refusal = str(error)
print(json.dumps([seconds, "cutlass" in sys.modules, compiler.compile_count(), refusal]))
"""
    runs = [run_python(script) for _ in range(3)]
    for _, imported_dsl, compiles, refusal in runs:
        assert not imported_dsl
        assert compiles == 0
        assert "expected device_type=cuda" in refusal
    assert min(run[0] for run in runs) < WARM_LOAD_S  # the best of three: other tests run beside


def test_disk_hit_writes_nothing(cache: Path) -> None:
    """So that a filled cache works from a read-only folder."""
    compiler.compile_kernel(tiny_spec())
    for path in cache.glob("*.lock"):
        path.unlink()
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    counts = Counts()
    compiler.get_kernel(tiny_spec())
    assert (counts.compiles, counts.disk_hits) == (0, 1)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_dsl_can_compile_after_a_library_was_loaded_without_it() -> None:
    compiler.compile_kernel(tiny_spec())
    script = """
import json, sys
import torch
from fa4 import compiler
from tests.tiny_kernel import tiny_spec
def refusal(function):
    try:
        function(torch.zeros(4), torch.zeros(4))
    except ValueError as error:
        return str(error)
from_disk = compiler.get_kernel(tiny_spec())
assert "cutlass" not in sys.modules
compiled = compiler.get_kernel(tiny_spec("int32"))
assert "cutlass" in sys.modules
print(json.dumps([refusal(from_disk), refusal(compiled)]))
"""
    from_disk, compiled = run_python(script)
    assert "float32" in from_disk
    assert "int32" in compiled


# -- warm-up without a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_100f"])
def test_compile_kernel_stores_code_of_the_target_and_loads_nothing(arch: str) -> None:
    """C78: any target on any machine."""
    counts = Counts()
    report = compiler.compile_kernel(tiny_spec(arch=arch))
    assert (report.name, report.arch) == ("fa4_tests_tiny_kernel_fp32_plus1", arch)
    assert not report.was_cached
    assert report.seconds > 0
    assert report.path is not None
    assert report.path.name.startswith(f"{report.name}-{arch}-")
    assert f"-arch {arch}".encode() in report.path.read_bytes()
    assert compiler._loaded == {}
    assert counts.compiles == 1


def test_no_compile_after_warm_up() -> None:
    """C77: a list of configurations first, then the first real call of each."""
    specs = [tiny_spec(constant=constant) for constant in range(3)]
    for spec in specs:
        compiler.compile_kernel(spec)
    counts = Counts()
    for spec in specs:
        start = time.perf_counter()
        compiler.get_kernel(spec)
        assert time.perf_counter() - start < 0.05
    assert (counts.compiles, counts.disk_hits) == (0, 3)
    assert all(compiler.compile_kernel(spec).was_cached for spec in specs)


def test_target_of_the_dsl_is_the_kernels_and_is_not_left_in_the_environment() -> None:
    script = """
import json, os
from fa4 import compiler
from tests.tiny_kernel import tiny_spec
compiler.compile_kernel(tiny_spec(arch="sm_90a"))
from cutlass.cutlass_dsl import CuTeDSL
print(json.dumps([CuTeDSL._get_dsl().envar.arch, os.environ.get("CUTE_DSL_ARCH")]))
"""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the DSL asks for its architecture")
    assert run_python(script) == ["sm_90a", None]
    assert run_python(script, CUTE_DSL_ARCH="sm_100a") == ["sm_100a", "sm_100a"]


# -- the key -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that changes, by name, from what `tiny_spec()` and this machine have."""

    name: str
    spec: KernelSpec = field(default_factory=tiny_spec)
    toolchain: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cache_format: int = compiler.CACHE_FORMAT

    def __str__(self) -> str:
        return self.name


DIFFERENCES = [
    Difference("arch", tiny_spec(arch="sm_100a")),
    Difference("features", tiny_spec(dtype="fp16")),
    Difference("schedule", tiny_spec(threads=64)),
    Difference("entry", tiny_spec(entry="compile_slowly")),
    Difference("versions", toolchain={"versions": {"nvidia_cutlass_dsl": "4.8.0"}}),
    Difference("cuda build", toolchain={"cuda_major": 12}),
    Difference("machine", toolchain={"machine": "Linux aarch64"}),
    Difference("compiler setting", environment={"CUTE_DSL_LINEINFO": "1"}),
    Difference("cache format", cache_format=compiler.CACHE_FORMAT + 1),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=str)
def test_key_changes_with(difference: Difference, monkeypatch: pytest.MonkeyPatch) -> None:
    """C76. Whatever the code depends on."""
    stem = compiler.kernel_key(tiny_spec()).stem
    dsl_runtime.toolchain.cache_clear()
    for name, value in difference.environment.items():
        monkeypatch.setenv(name, value)
    changed = {**dsl_runtime.toolchain(), **difference.toolchain}
    monkeypatch.setattr(dsl_runtime, "toolchain", lambda: changed)
    monkeypatch.setattr(compiler, "CACHE_FORMAT", difference.cache_format)
    assert compiler.kernel_key(difference.spec).stem != stem


@pytest.mark.parametrize("name", ["CUTE_DSL_ARCH", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LOG_LEVEL"])
def test_key_stays_with_settings_that_do_not_change_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = compiler.kernel_key(tiny_spec()).stem
    dsl_runtime.toolchain.cache_clear()
    monkeypatch.setenv(name, "sm_100a")
    assert compiler.kernel_key(tiny_spec()).stem == stem


def sources(folder: Path, **texts: str) -> Path:
    (folder / "sm90").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / "sm90" / f"{name}.py").write_text(text)
    return folder


def test_source_digest_follows_texts_and_names_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: Path) -> str:
        monkeypatch.setattr(
            compiler, "_package_folders", lambda p: [str(folder)] if p == "fa4.kernels" else []
        )
        return compiler.hash_sources("fa4.kernels.sm90.forward")

    original = sources(tmp_path / "a", forward="x = 1\n", backward="y = 2\n")
    expected = digest(original)
    assert digest(sources(tmp_path / "b", forward="x = 1\n", backward="y = 2\n")) == expected
    os.utime(original / "sm90" / "forward.py", (0, 0))
    assert digest(original) == expected
    (original / "sm90" / "notes.txt").write_text("not code")
    assert digest(original) == expected
    variants = [
        sources(tmp_path / "edited", forward="x = 3\n", backward="y = 2\n"),
        sources(tmp_path / "renamed", forward="x = 1\n", reverse="y = 2\n"),
        sources(tmp_path / "moved", forward="x = 1\ny = 2\n", backward=""),
        sources(tmp_path / "more", forward="x = 1\n", backward="y = 2\n", decode=""),
    ]
    assert len({expected, *map(digest, variants)}) == 5


def test_sources_of_kernels_and_pipelines_are_found() -> None:
    for package, module in (("fa4.kernels", "features.py"), ("fa4.pipelines", "sm90.py")):
        (folder,) = compiler._package_folders(package)
        assert (Path(folder) / module).is_file()


def test_hashing_the_sources_is_cheap() -> None:
    """The best of several, because another process may have the core meanwhile."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        compiler.hash_sources("fa4.kernels.sm90.forward")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.01


def test_edited_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C76: in the next process, which is when the edit can reach its modules."""
    folder = sources(tmp_path / "kernels", forward="x = 1\n")
    monkeypatch.setattr(compiler, "_package_folders", lambda _: [str(folder)])
    counts = Counts()
    compiler.get_kernel(tiny_spec())
    sources(folder, forward="x = 2\n")
    compiler._source_digest.cache_clear()
    compiler.forget_loaded_kernels()
    compiler.get_kernel(tiny_spec())
    assert (counts.compiles, counts.disk_hits) == (2, 0)


def test_code_compiled_after_its_sources_were_edited_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may hold modules from before the edit, and trace texts from after it."""
    folder = sources(tmp_path / "kernels", forward="x = 1\n")
    monkeypatch.setattr(compiler, "_package_folders", lambda _: [str(folder)])
    compiler.compile_kernel(tiny_spec())
    sources(folder, forward="x = 2\n")
    (message,) = recorded_warnings(lambda: compiler.get_kernel(tiny_spec(constant=2)))
    assert "source files have changed" in message
    assert len(disk_cache.cache_entries()) == 1
    assert recorded_warnings(lambda: compiler.get_kernel(tiny_spec(constant=3))) == []


def test_toolchain_versions_are_those_of_the_metadata() -> None:
    """But for the CUDA builds that lie beside the one in use: machines that differ only in them
    make the same code, and should share it."""
    expected = {
        name.replace("-", "_"): importlib.metadata.version(name)
        for name in (item.metadata["Name"].lower() for item in importlib.metadata.distributions())
        if name.startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    }
    used = f"nvidia_cutlass_dsl_libs_cu{dsl_runtime.cuda_major()}"
    assert used in expected
    for name in list(expected):
        if name.startswith("nvidia_cutlass_dsl_libs_cu") and name != used:
            del expected[name]
    assert dsl_runtime.toolchain_versions() == expected
    assert {"nvidia_cutlass_dsl", "apache_tvm_ffi"} <= set(expected)


def test_cuda_build_and_runtime_library_are_those_that_the_dsl_chooses() -> None:
    script = """
import json, sys
from fa4 import dsl_runtime
before = [dsl_runtime.cuda_major(), dsl_runtime._runtime_libraries()]
assert "cutlass" not in sys.modules
import cutlass.runtime
chosen = cutlass.runtime.find_runtime_libraries(enable_tvm_ffi=False)
print(json.dumps([before, [dsl_runtime.cuda_major(), chosen]]))
"""
    before, after = run_python(script)
    assert before == after
    assert before[0] is not None


@dataclass(frozen=True)
class HidesField:
    constant: int = field(default=1, repr=False)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (test_hashing_the_sources_is_cheap, "features is <function .* shows an address"),
        (HidesField(), r"features\.constant is left out of the repr"),
    ],
    ids=["function", "hidden field"],
)
def test_features_that_the_key_cannot_state_are_refused(features: Any, message: str) -> None:
    """C75: two score functions may have the same text and other captured constants."""
    with pytest.raises(TypeError, match=message):
        compiler.get_kernel(replace(tiny_spec(), features=features))


def test_spec_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entry is 'fa4\.kernels\.forward'"):
        KernelSpec("fa4.kernels.forward", "sm_90a", TinyFeatures(), TinySchedule())
    with pytest.raises(ValueError, match=r"arch is '9\.0'"):
        tiny_spec(arch="9.0")


def test_name_is_made_of_the_kernel_and_its_features() -> None:
    spec = KernelSpec(
        "fa4.kernels.sm90.forward:compile_forward", "sm_90a", TinyFeatures(), TinySchedule()
    )
    assert spec.name == "fa4_sm90_forward_fp32_plus1"
    assert replace(spec, features="anything").name == "fa4_sm90_forward"


# -- bad files and folders -----------------------------------------------------------------------


def cut_in_half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip_one_bit_of_the_code(content: bytes) -> bytes:
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


DAMAGES = {
    "cut in half": cut_in_half,
    "last byte missing": lambda content: content[:-1],
    "a few bytes": lambda content: content[:10],
    "empty": lambda content: b"",
    "garbage": lambda content: b"\x7fELF" + os.urandom(20_000),
    "one bit flipped": flip_one_bit_of_the_code,
    "bytes appended": lambda content: content + b"\0",
    "description gone": lambda content: content[:1000] + content[-disk_cache._FOOTER.size :],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entry_is_built_again_with_one_warning(
    damage: Callable[[bytes], bytes], cache: Path
) -> None:
    """C74: found before the file reaches the loader, which would crash on some of these."""
    compiler.compile_kernel(tiny_spec())
    path = only_entry(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert [entry.problem is None for entry in disk_cache.cache_entries()] == [False]
    counts = Counts()
    (message,) = recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec())))
    assert str(path) in message
    assert "built again" in message
    assert counts.compiles == 1
    compiler.forget_loaded_kernels()
    assert recorded_warnings(lambda: compiler.get_kernel(tiny_spec())) == []
    assert (counts.compiles, counts.disk_hits) == (1, 1)


def test_entry_of_another_kernel_is_built_again_with_one_warning(cache: Path) -> None:
    compiler.compile_kernel(tiny_spec("fp32"))
    path = only_entry(cache)
    other = compiler.compile_kernel(tiny_spec("int32")).path
    assert other is not None
    path.write_bytes(other.read_bytes())
    function = None

    def call() -> None:
        nonlocal function
        function = compiler.get_kernel(tiny_spec("fp32"))

    (message,) = recorded_warnings(call)
    assert "belongs to another kernel" in message
    assert function is not None
    assert "float32" in signature(function)


def test_directory_in_the_place_of_an_entry_is_survived(cache: Path) -> None:
    compiler.compile_kernel(tiny_spec())
    path = only_entry(cache)
    path.unlink()
    path.mkdir()
    messages = recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec())))
    assert "cannot be read" in messages[0]
    assert "cannot be written" in messages[1]


def test_folder_that_cannot_be_made_is_survived_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")  # holds for root too, unlike permissions
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    counts = Counts()

    def call() -> None:
        for constant in (1, 2):
            signature(compiler.get_kernel(tiny_spec(constant=constant)))

    (message,) = recorded_warnings(call)
    assert str(tmp_path / "file" / "cache") in message
    assert "FA4_CACHE_DIR" in message
    assert counts.compiles == 2
    assert compiler.compile_kernel(tiny_spec()).path is None
    assert disk_cache.cache_entries() == []
    assert disk_cache.clear_cache() == 0


def test_full_disk_is_survived_with_one_warning_and_leaves_no_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    messages = recorded_warnings(
        lambda: [signature(compiler.get_kernel(tiny_spec(constant=c))) for c in (1, 2)]
    )
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert [path.suffix for path in cache.iterdir()] == [".lock", ".lock"]


def test_user_without_a_home_folder_is_served_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FA4_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    (message,) = recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec())))
    assert "home directory" in message


def test_folder_that_code_cannot_be_loaded_from_is_survived_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a file system that is mounted noexec."""

    def load_library(path: Path) -> None:
        raise RuntimeError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(compiler, "_load_library", load_library)
    counts = Counts()
    (message,) = recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec())))
    assert "noexec" in message
    assert counts.compiles == 1
    compiler.forget_loaded_kernels()
    assert recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec()))) == []
    assert (counts.compiles, counts.disk_hits) == (2, 0)


@pytest.mark.parametrize(
    ("linkers", "reason"),
    [([], "no linker"), (["/bin/false"], "/bin/false failed"), (["/no/ld"], "No such file")],
    ids=["none", "failing", "missing"],
)
def test_without_a_working_linker_objects_are_stored_and_loaded(
    linkers: list[str], reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_installed_linkers", lambda: linkers)
    counts = Counts()
    assert recorded_warnings(lambda: signature(compiler.get_kernel(tiny_spec()))) == []
    assert only_entry(cache).suffix == ".o"
    assert reason in compiler.loader_description()
    compiler.forget_loaded_kernels()
    assert "float32" in signature(compiler.get_kernel(tiny_spec()))
    assert (counts.compiles, counts.disk_hits) == (1, 1)


def test_every_linker_of_this_machine_makes_a_library_that_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linkers = compiler._installed_linkers()
    if not linkers:
        pytest.skip("this machine has no linker")
    assert linkers[0] in compiler.loader_description()
    for constant, linker in enumerate(linkers):
        monkeypatch.setattr(compiler, "_installed_linkers", lambda linker=linker: [linker])
        report = compiler.compile_kernel(tiny_spec(constant=constant))
        assert report.path is not None
        assert report.path.suffix == ".so", compiler._link_problem
        assert "float32" in signature(compiler.get_kernel(tiny_spec(constant=constant)))


# -- processes -----------------------------------------------------------------------------------

# argv: entry function, go file, ready file. Prints compiles, disk hits and the seconds it took.
ONE_OF_MANY = """
import json, pathlib, sys, time
import torch
from fa4 import compiler
from tests.tiny_kernel import tiny_spec
entry, go, ready = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
spec = tiny_spec(entry=entry)
ready.touch()
while not go.exists():
    time.sleep(0.01)
start = time.perf_counter()
compiler.get_kernel(spec)
seconds = time.perf_counter() - start
print(json.dumps([compiler.compile_count(), compiler.disk_hits(), seconds]))
"""


def test_eight_processes_with_an_empty_cache_compile_once(tmp_path: Path) -> None:
    """C73."""
    go, ready = tmp_path / "go", [tmp_path / f"ready{i}" for i in range(8)]
    processes = [start_python(ONE_OF_MANY, "compile_slowly", go, path) for path in ready]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in ready):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    go.touch()
    results = [finish(process) for process in processes]
    assert sorted(compiles for compiles, _, _ in results) == [0] * 7 + [1]
    assert sum(hits for _, hits, _ in results) == 7
    (one_compile,) = (seconds for compiles, _, seconds in results if compiles)
    assert max(seconds for _, _, seconds in results) < 1.5 * one_compile


def test_lock_of_a_killed_process_is_free() -> None:
    script = """
import os, signal
from fa4 import compiler, disk_cache
from tests.tiny_kernel import tiny_spec
with disk_cache.only_builder(compiler.kernel_key(tiny_spec())) as entry:
    assert entry is None
    print("holding", flush=True)
    signal.pause()
"""
    holder = start_python(script)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    waiter = threading.Thread(target=compiler.compile_kernel, args=(tiny_spec(),))
    waiter.start()
    time.sleep(0.3)
    assert waiter.is_alive()  # it does wait, so that the kill is what lets it go on
    assert disk_cache.cache_entries() == []
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    waiter.join(timeout=30)
    assert not waiter.is_alive()
    assert len(disk_cache.cache_entries()) == 1


def test_waiting_for_the_lock_ends_with_a_warning_and_an_own_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_cache, "LOCK_TIMEOUT_S", 0.1)
    counts = Counts()
    with disk_cache.only_builder(compiler.kernel_key(tiny_spec())):
        (message,) = recorded_warnings(lambda: compiler.compile_kernel(tiny_spec()))
    assert "Another process has been building fa4_tests_tiny_kernel_fp32_plus1" in message
    assert counts.compiles == 1


def test_waiting_ends_when_the_entry_appears(cache: Path) -> None:
    """The holder of the lock need not be done, as after a wait that timed out elsewhere."""
    compiler.compile_kernel(tiny_spec())
    path = only_entry(cache)
    content = path.read_bytes()
    path.unlink()
    counts = Counts()
    with disk_cache.only_builder(compiler.kernel_key(tiny_spec())):
        waiter = threading.Thread(target=compiler.get_kernel, args=(tiny_spec(),))
        waiter.start()
        time.sleep(0.2)
        assert waiter.is_alive()
        path.with_suffix(".new").write_bytes(content)
        os.replace(path.with_suffix(".new"), path)
        waiter.join(timeout=10)
        assert not waiter.is_alive()
    assert (counts.compiles, counts.disk_hits) == (0, 1)


def test_without_file_locks_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse flock."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk_cache.fcntl, "flock", flock)
    assert compiler.compile_kernel(tiny_spec()).path is not None
    monkeypatch.setattr(disk_cache, "fcntl", None)
    assert compiler.compile_kernel(tiny_spec(constant=2)).path is not None


# argv: seconds. Stores one key again and again, each time with other code of 2 MB.
WRITER = """
import os, sys, time
from fa4.disk_cache import KernelKey, store_entry
key = KernelKey("loop", "sm_90a", {"case": "C74"})
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    assert store_entry(key, os.urandom(2_000_000), is_library=True) is not None
print(0)
"""
# Likewise, by children that are killed after 5 to 30 ms. Prints how many.
DYING_WRITERS = """
import os, random, signal, sys, time
from fa4.disk_cache import KernelKey, store_entry
key = KernelKey("loop", "sm_90a", {"case": "C74"})
end = time.monotonic() + float(sys.argv[1])
kills = 0
while time.monotonic() < end:
    child = os.fork()
    while child == 0:
        store_entry(key, os.urandom(2_000_000), is_library=True)
    time.sleep(random.uniform(0.005, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
print(kills)
"""
READER = """
import json, sys, time
from fa4.disk_cache import KernelKey, read_entry
key = KernelKey("loop", "sm_90a", {"case": "C74"})
end = time.monotonic() + float(sys.argv[1])
problems, codes = [], set()
while time.monotonic() < end:
    entry, problem = read_entry(key)
    if problem is not None:
        problems.append(problem)
    if entry is not None:
        assert len(entry.code) == 2_000_000
        codes.add(entry.code[:16].hex())
print(json.dumps([problems, len(codes)]))
"""


def test_readers_never_see_a_partial_entry_while_writers_write_and_die(cache: Path) -> None:
    """C74, for 5 s."""
    writer, dying, *readers = (
        start_python(script, 5) for script in (WRITER, DYING_WRITERS, READER, READER)
    )
    for problems, versions in map(finish, readers):
        assert problems == []
        assert versions > 5  # they did read while it was being replaced
    assert finish(writer) == 0
    assert finish(dying) > 5
    assert list(cache.glob(".*.tmp"))  # some were killed in the middle of a write
    assert [entry.problem for entry in disk_cache.cache_entries()] == [None]


def test_what_killed_writers_left_is_removed_after_a_while(cache: Path) -> None:
    cache.mkdir()
    stem = compiler.kernel_key(tiny_spec()).stem
    recent, old = (cache / f".{stem}.so.{digit * 32}.tmp" for digit in "01")
    for path in (recent, old):
        path.write_bytes(b"part of an entry")
    os.utime(old, (time.time() - disk_cache.ABANDONED_S - 60,) * 2)
    compiler.compile_kernel(tiny_spec())
    assert recent.exists()  # its writer may be alive
    assert not old.exists()


def test_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    with compiler._turn_of(tiny_spec()), compiler.dsl_lock, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # fork of a threaded process, on purpose
        child = os.fork()
        if child == 0:
            is_free = compiler._turn_of(tiny_spec()).acquire(timeout=1)
            os._exit(0 if is_free else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# -- threads -------------------------------------------------------------------------------------


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls that start together, one thread each; their exceptions are raised here."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(i: int) -> None:
        barrier.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:  # noqa: BLE001  (raised below, in the test's own thread)
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_threads_with_different_first_calls_all_get_their_kernel() -> None:
    """C79. The DSL alone would abort the process here."""
    specs = [
        tiny_spec("fp32", arch="sm_90a"),
        tiny_spec("fp16", arch="sm_100a"),
        tiny_spec("int32", arch="sm_90a"),
        tiny_spec("int32", threads=64, arch="sm_100a"),
    ]
    counts = Counts()
    functions = in_threads([functools.partial(compiler.get_kernel, spec) for spec in specs])
    assert counts.compiles == 4
    for dtype, function in zip(["float32", "float16", "int32", "int32"], functions, strict=True):
        assert f"x: Tensor([n0], {dtype})" in signature(function)


def test_threads_with_the_same_first_call_compile_once() -> None:
    counts = Counts()
    functions = in_threads([lambda: compiler.get_kernel(tiny_spec())] * 4)
    assert counts.compiles == 1
    assert all(function is functions[0] for function in functions)


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("compile_badly", r"fa4_tests_tiny_kernel_fp32_plus1 for sm_90a failed: no such tile: 128"),
        ("compile_nothing", "fa4_tests_tiny_kernel_fp32_plus1 .* has no attribute"),
        ("compile_without_tvm_ffi", "fa4_tests_tiny_kernel_fp32_plus1 .* --enable-tvm-ffi"),
        ("compile_for_another_target", "asked for sm_90a and compiled for sm_100a"),
    ],
)
def test_failed_compile_names_the_kernel_and_stores_nothing(entry: str, message: str) -> None:
    for _ in range(2):  # a failure is not remembered as a result, and leaves no lock behind
        with pytest.raises(KernelCompileError, match=message):
            compiler.get_kernel(tiny_spec(entry=entry))
    assert disk_cache.cache_entries() == []


def test_missing_kernel_module_is_named() -> None:
    spec = replace(tiny_spec(), entry="tests.no_such_kernel:compile_it")
    with pytest.raises(KernelCompileError, match=r"tests\.no_such_kernel cannot be found"):
        compiler.get_kernel(spec)


def test_first_call_during_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C91: a clear message instead of a broken capture; loaded kernels pass."""
    ready, other = tiny_spec(), tiny_spec("int32")
    function = compiler.get_kernel(ready)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiler.get_kernel(ready) is function
    counts = Counts()
    with pytest.raises(RuntimeError, match="one such call before the capture begins"):
        compiler.get_kernel(other)
    assert counts.compiles == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiler.get_kernel(other)
    assert counts.compiles == 1


# -- the folder ----------------------------------------------------------------------------------


def test_listing_shows_what_is_there() -> None:
    assert disk_cache.cache_entries() == []
    reports = [compiler.compile_kernel(tiny_spec(dtype)) for dtype in ("fp32", "int32")]
    entries = disk_cache.cache_entries()
    assert [(entry.name, entry.arch, entry.path) for entry in entries] == [
        (report.name, "sm_90a", report.path) for report in reports
    ]
    for entry in entries:
        assert entry.size == entry.path.stat().st_size
        assert entry.problem is None


def test_clearing_removes_our_files_and_no_others(cache: Path) -> None:
    function = compiler.get_kernel(tiny_spec())
    stem = compiler.kernel_key(tiny_spec()).stem
    (cache / f".{stem}.so.{'0' * 32}.tmp").write_bytes(b"left by a killed writer")
    for name in ("notes.txt", "libother.so", "other.lock", "other.tmp"):
        (cache / name).write_text("somebody else's")
    assert disk_cache.clear_cache() == 1
    assert sorted(path.name for path in cache.iterdir()) == [
        "libother.so",
        "notes.txt",
        "other.lock",
        "other.tmp",
    ]
    assert "float32" in signature(function)
    assert disk_cache.clear_cache() == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FA4_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"FA4_CACHE_DIR": "~/b", "HOME": "/home/x"}, Path("/home/x/b")),
        ({"FA4_CACHE_DIR": "", "XDG_CACHE_HOME": "/c"}, Path("/c/fa4")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/x"}, Path("/home/x/.cache/fa4")),
        ({"HOME": "/home/x"}, Path("/home/x/.cache/fa4")),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FA4_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert disk_cache.cache_dir() == expected

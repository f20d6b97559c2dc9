"""Where a compiled kernel comes from: memory, then disk, then the compiler.

A `KernelSpec` names one specialisation. `get_kernel` returns its callable; `compile_kernel` only
sees to it that the disk holds it, for any target and without a GPU.

    memory    a dictionary of callables
    disk      `fa4.disk_cache`: shared libraries, loaded without importing the DSL (which would
              cost 0.8 s), keyed by everything that changes the code
    compiler  the kernel's entry function, at most one at a time in a process, and one process at a
              time for a kernel: the others wait and load what it stored
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from fa4 import disk_cache, dsl_runtime
from fa4.disk_cache import (
    CacheEntry,
    CacheWarning,
    KernelKey,
    cache_dir,
    cache_entries,
    clear_cache,
)

__all__ = [
    "CacheEntry",
    "CacheWarning",
    "CompileReport",
    "KernelCompileError",
    "KernelSpec",
    "cache_dir",
    "cache_entries",
    "clear_cache",
    "compile_count",
    "compile_kernel",
    "disk_hits",
    "forget_loaded_kernels",
    "get_kernel",
    "loader_description",
]

CACHE_FORMAT = 1  # to be raised when the export, the link or the layout of an entry changes

_EXPORT_NAME = "kernel"  # the function in every entry; entries are loaded apart, names never meet
_SOURCE_PACKAGES = ("fa4.kernels", "fa4.pipelines")
_LINKERS = ("ld", "ld.lld", "ld.gold", "cc", "gcc", "clang")


class KernelCompileError(RuntimeError):
    """A kernel could not be built. The message names it; the cause is chained."""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One specialisation of one kernel.

    entry     "package.module:function", called as function(features, schedule, arch); it returns
              what cute.compile(..., options=f"--enable-tvm-ffi --gpu-arch {arch}") returned.
              The call should say no_jit_engine=True, which saves 0.3 s of the forward kernel's
              2.8 s: code is loaded from the export, never from the compiler's own engine
    arch      target such as "sm_90a" or "sm_100a"
    features  what the kernel can do: dtype, head dim class, masks, ...
    schedule  how it does it: tiles, stages, warp roles, ...

    features and schedule are frozen dataclasses (or other hashables) whose repr states everything
    that the generated code depends on, and is the same in every process: it is in the disk key.
    Raises ValueError for an entry or an arch of another form.
    """

    entry: str
    arch: str
    features: Hashable
    schedule: Hashable

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+", self.entry):
            raise ValueError(
                f'entry is {self.entry!r}; it must have the form "package.module:function".'
            )
        if not re.fullmatch(r"sm_\d+[af]?", self.arch):
            raise ValueError(f'arch is {self.arch!r}; it must be a target such as "sm_90a".')

    @functools.cached_property
    def name(self) -> str:
        """For people, such as "fa4_sm90_forward_bf16_d128". The schedule is not in it."""
        module = self.entry.split(":")[0]
        for package in _SOURCE_PACKAGES:
            module = module.removeprefix(f"{package}.")
        features = getattr(self.features, "name", None)
        parts = ["fa4", *module.split("."), *([features] if isinstance(features, str) else [])]
        return re.sub(r"\W+", "_", "_".join(parts), flags=re.ASCII)


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What `compile_kernel` did.

    name        `KernelSpec.name`
    arch        target
    seconds     that it took
    was_cached  the entry was there, so this process compiled nothing
    path        the entry; None when it could not be stored (a warning said why)
    """

    name: str
    arch: str
    seconds: float
    was_cached: bool
    path: Path | None


def get_kernel(spec: KernelSpec) -> Callable[..., Any]:
    """The callable of a specialisation: from memory, else from disk, else compiled and stored.

    It is a TVM-FFI function that takes positional arguments only (torch tensors, ints, floats,
    None), checks them, and launches on torch's current stream.

    Raises KernelCompileError when the kernel cannot be built, DependencyError when the DSL is
    missing or too old, and RuntimeError during a CUDA graph capture for a kernel that this process
    has not loaded before. Gives a `CacheWarning` when the disk cache is damaged or unusable.
    """
    function = _loaded.get(spec)
    return _load_or_build(spec) if function is None else function


def compile_kernel(spec: KernelSpec) -> CompileReport:
    """See to it that the disk cache holds the kernel; nothing is loaded, no GPU is needed.

    Raises and warns as `get_kernel` does.
    """
    start = time.perf_counter()
    with _turn_of(spec):
        found = _stored_or_built(spec)
    seconds = time.perf_counter() - start
    return CompileReport(spec.name, spec.arch, seconds, not found.is_new, found.path)


def compile_count() -> int:
    """Kernels that this process has compiled."""
    return _counters["compiles"]


def disk_hits() -> int:
    """Kernels that this process has loaded from disk."""
    return _counters["disk_hits"]


def forget_loaded_kernels() -> None:
    """Empty the memory level: the next `get_kernel` goes to disk. Callables in use stay valid."""
    _loaded.clear()


def loader_description() -> str:
    """How compiled kernels are stored and loaded on this machine, as a sentence for its user."""
    linkers = _installed_linkers()
    if linkers and _link_problem is None:
        return f"Compiled kernels are linked with {linkers[0]} and loaded without the DSL."
    reason = _link_problem or f"no linker ({', '.join(_LINKERS)}) is on PATH"
    return (
        "Compiled kernels are stored as objects, which adds about a second to the first call of a "
        f"process, because {reason}."
    )


# -- memory --------------------------------------------------------------------------------------

_loaded: dict[KernelSpec, Callable[..., Any]] = {}
_counters = {"compiles": 0, "disk_hits": 0}
_turns: dict[KernelSpec, threading.Lock] = {}
_state_lock = threading.Lock()  # guards _counters and _turns

# Two compiles at once abort the process ("An MLIR function requires a Location" out of a C++
# destructor), whatever they compile: the DSL is a singleton that holds the current compile's state.
dsl_lock = threading.RLock()


def _reset_locks() -> None:
    """In a forked child the threads that may have held our locks do not exist."""
    global _state_lock, dsl_lock
    _turns.clear()
    _state_lock, dsl_lock = threading.Lock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks)


def _turn_of(spec: KernelSpec) -> threading.Lock:
    """The lock that keeps two threads from loading or building the same kernel."""
    with _state_lock:
        return _turns.setdefault(spec, threading.Lock())


def _count(event: str) -> None:
    with _state_lock:
        _counters[event] += 1


def _load_or_build(spec: KernelSpec) -> Callable[..., Any]:
    _refuse_during_capture(spec)
    with _turn_of(spec):
        function = _loaded.get(spec)
        if function is None:
            function = _load(spec, _stored_or_built(spec))
            _loaded[spec] = function
    return function


def _refuse_during_capture(spec: KernelSpec) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"The kernel {spec.name} is not loaded yet and cannot be loaded during a CUDA graph "
            "capture; make one such call before the capture begins."
        )


# -- loading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Found:
    """Code of a kernel, stored or just built.

    path         the entry on disk, None if it could not be stored
    is_library   the entry is linked
    object_code  None for a library that was found on disk, whose object is no more
    is_new       built by this call
    """

    path: Path | None
    is_library: bool
    object_code: bytes | None
    is_new: bool


def _load(spec: KernelSpec, found: _Found) -> Callable[..., Any]:
    object_code = found.object_code
    if found.path is not None and found.is_library:
        try:
            function = _load_library(found.path)
        except (OSError, RuntimeError, AttributeError) as error:
            disk_cache.warn_once(
                f"The compiled kernel {found.path} is intact but cannot be loaded ({error}), so "
                "every process compiles its own kernels. Is the folder mounted noexec?",
                about=("not loaded", found.path.parent),
            )
            if object_code is None:
                object_code = _export(spec, _compile(spec))
        else:
            if not found.is_new:
                _count("disk_hits")
            return function
    elif not found.is_new:
        _count("disk_hits")
    assert object_code is not None  # only libraries come without
    return _load_object(spec, object_code)


def _load_library(path: Path) -> Callable[..., Any]:
    import tvm_ffi

    dsl_runtime.load_runtime()
    # TVM-FFI keeps what it loaded until the process ends, so callables outlive `_loaded`.
    return tvm_ffi.load_module(str(path)).get_function(_EXPORT_NAME)


def _load_object(spec: KernelSpec, object_code: bytes) -> Callable[..., Any]:
    """Load through the DSL; the callable keeps the code alive."""
    with dsl_lock, _memory_file(object_code) as path:
        dsl_runtime.import_dsl(spec.arch)
        import cutlass.cute.runtime as cute_runtime

        return getattr(cute_runtime.load_module(path, enable_tvm_ffi=True), _EXPORT_NAME)


@contextlib.contextmanager
def _memory_file(content: bytes = b"") -> Iterator[str]:
    """Path of a file that needs no disk, which may be full, for interfaces that only take paths."""
    handle = os.memfd_create("fa4")
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


# -- building ------------------------------------------------------------------------------------


def _stored_or_built(spec: KernelSpec) -> _Found:
    """The entry on disk; or a new one, for which other processes wait."""
    key = kernel_key(spec)
    entry, _ = disk_cache.read_entry(key)
    if entry is not None:
        return _from_disk(entry)
    with disk_cache.only_builder(key) as entry:
        if entry is None:
            entry, problem = disk_cache.read_entry(key)
            if problem is not None:
                disk_cache.warn(f"The compiled kernel {problem}; it is built again.")
        return _from_disk(entry) if entry is not None else _build(spec, key)


def _from_disk(entry: disk_cache.Entry) -> _Found:
    object_code = None if entry.is_library else entry.code
    return _Found(entry.path, entry.is_library, object_code, is_new=False)


def _build(spec: KernelSpec, key: KernelKey) -> _Found:
    object_code = _export(spec, _compile(spec))
    library = _link(object_code)
    is_library = library is not None
    path = None
    if hash_sources(entry_module(spec)) != key.facts["sources"]:
        disk_cache.warn_once(
            "The kernels' source files have changed since this process started, so what it "
            "compiles is not stored.",
            about="changed sources",
        )
    else:
        path = disk_cache.store_entry(key, library or object_code, is_library)
    return _Found(path, is_library, object_code, is_new=True)


def _compile(spec: KernelSpec) -> Any:
    from fa4.versions import check_versions

    check_versions()
    with dsl_lock:
        try:
            dsl_runtime.import_dsl(spec.arch)
            module = importlib.import_module(entry_module(spec))
            function = getattr(module, spec.entry.split(":")[1])
            compiled = function(spec.features, spec.schedule, spec.arch)
        except Exception as error:
            raise KernelCompileError(
                f"Compiling the kernel {spec.name} for {spec.arch} failed: {_plain_text(error)}"
            ) from error
    _count("compiles")
    return compiled


def _export(spec: KernelSpec, compiled: Any) -> bytes:
    """Object code of what an entry returned, checked to be for the target that was asked for."""
    with dsl_lock, _memory_file() as path:
        try:
            compiled.export_to_c(object_file_path=path, function_name=_EXPORT_NAME)
        except Exception as error:
            raise KernelCompileError(
                f"Exporting the kernel {spec.name} for {spec.arch} failed: {_plain_text(error)}. "
                "Its entry must return what cute.compile made with --enable-tvm-ffi."
            ) from error
        object_code = Path(path).read_bytes()
    # An entry that forgets --gpu-arch compiles for whatever the DSL takes by default. The assembler
    # notes its options, and with them the target, in each cubin.
    targets = set(re.findall(rb"-arch[ =](sm_\d+[af]?)", object_code))
    if targets - {spec.arch.encode()}:
        raise KernelCompileError(
            f"The kernel {spec.name} was asked for {spec.arch} and compiled for "
            f"{b', '.join(sorted(targets)).decode()}; its entry must pass --gpu-arch."
        )
    return object_code


def _plain_text(error: Exception) -> str:
    """The message without the terminal colours that the DSL puts into it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text or type(error).__name__


_link_problem: str | None = None  # why the last link failed with every linker


def _link(object_code: bytes) -> bytes | None:
    """The object as a shared library; None where no linker can make one."""
    global _link_problem
    problems = []
    for linker in _installed_linkers():
        # Symbols bind inside the library, whatever else the process has loaded. The C compilers
        # would add start-up files, which we do not need and which are often not installed.
        options = ["-Bsymbolic", "-z,noexecstack"]
        if os.path.basename(linker).startswith("ld"):
            command = [linker, "-shared", *",".join(options).split(",")]
        else:
            command = [linker, "-shared", "-nostdlib", *(f"-Wl,{option}" for option in options)]
        try:
            with tempfile.TemporaryDirectory(prefix="fa4-") as folder:
                source, library = Path(folder, "kernel.o"), Path(folder, "kernel.so")
                source.write_bytes(object_code)
                subprocess.run(
                    [*command, "-o", str(library), str(source)],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                _link_problem = None
                return library.read_bytes()
        except subprocess.CalledProcessError as error:
            problems.append(f"{linker} failed: {error.stderr.strip()}")
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"{linker} failed: {error}")
    _link_problem = "; ".join(problems) or None
    return None


@functools.cache
def _installed_linkers() -> list[str]:
    return [path for path in map(shutil.which, _LINKERS) if path is not None]


# -- the key -------------------------------------------------------------------------------------


def kernel_key(spec: KernelSpec) -> KernelKey:
    """Everything that changes a kernel's code.

    Python's version is not in it: an entry is machine code behind a C interface.
    """
    facts = {
        "format": CACHE_FORMAT,
        "entry": spec.entry,
        "arch": spec.arch,
        "features": _stable_repr("features", spec.features),
        "schedule": _stable_repr("schedule", spec.schedule),
        "sources": _source_digest(entry_module(spec)),
        "toolchain": dsl_runtime.toolchain(),
    }
    return KernelKey(spec.name, spec.arch, facts)


def entry_module(spec: KernelSpec) -> str:
    return spec.entry.split(":")[0]


def _stable_repr(argument: str, value: Hashable) -> str:
    text = repr(value)
    if re.search(r" at 0x[0-9a-f]+", text):
        raise TypeError(
            f"{argument} is {text}, which shows an address; the disk cache needs a repr that "
            "states the value and is the same in every process."
        )
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.compare and not field.repr:
                raise TypeError(
                    f"{argument}.{field.name} is left out of the repr though it is compared; the "
                    "disk cache would mistake one value for another."
                )
    return text


@functools.cache
def _source_digest(module: str) -> str:
    """SHA-256 of the texts that a kernel is traced from.

    Found once a process: modules that it has imported do not follow later edits either.
    """
    return hash_sources(module)


def hash_sources(module: str) -> str:
    """Hash every module of fa4.kernels and fa4.pipelines, and the entry's own if it is in neither.

    Names and texts count, times and places do not: a reinstalled wheel keeps its entries, and an
    edit is seen whatever it does to the file's time. 20 files take under 1 ms.
    """
    digest = hashlib.sha256()
    is_hashed = False
    for package in _SOURCE_PACKAGES:
        for folder in map(Path, _package_folders(package)):
            for path in sorted(folder.rglob("*.py")):
                _add_file(digest, f"{package}/{path.relative_to(folder).as_posix()}", path)
            is_hashed = is_hashed or module.startswith(f"{package}.")
    if not is_hashed:
        _add_file(digest, module, _module_file(module))
    return digest.hexdigest()


def _package_folders(package: str) -> list[str]:
    """Where a package's files are, in a wheel as in an editable install. It is not imported."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    return list(found.submodule_search_locations or []) if found is not None else []


def _module_file(module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # ValueError: __main__ of a script
        found = None
    if found is None or found.origin is None or not os.path.isfile(found.origin):
        raise KernelCompileError(f"The source file of the kernel module {module} cannot be found.")
    return Path(found.origin)


def _add_file(digest: Any, name: str, path: Path) -> None:
    text = path.read_bytes()
    digest.update(f"{name}\0{len(text)}\0".encode())
    digest.update(text)

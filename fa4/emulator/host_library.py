"""From a compiled kernel to a library that runs its host code without CUDA.

    object of the compiled function  +  launch_shim.c with the PTX text inside  ->  one library

The host code is the real one, byte for byte. Its CUDA calls bind to the shim inside of the library,
so a process that also runs kernels on a GPU is not disturbed. The PTX is part of the library, and
can therefore not be mistaken for the text of another kernel of the same name.

Libraries of `KernelSpec`s are kept in fa4's disk cache, under keys of their own.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from fa4 import compiler, disk_cache, dsl_runtime
from fa4.compiler import KernelCompileError, KernelSpec
from fa4.disk_cache import KernelKey

FORMAT = 1  # to be raised when the build of a library changes in a way that shows in no source
EXPORT_NAME = "kernel"  # prefix of the host function in every library

# Line info changes no instruction, and lets messages name lines of the kernel's source.
_OPTIONS = "--keep-ptx --generate-line-info"
_C_COMPILERS = ("cc", "gcc", "clang")
# CUDA calls of host code; the functions of TVM-FFI and the DSL's error texts stay real.
_CUDA_CALL = re.compile(rb"\0(_cu(?:da)?[A-Z]\w*|cuda_dialect_\w+)(?=\0)")


class HostLibraryError(KernelCompileError):
    """A compiled kernel cannot be given to the emulator. The message says why."""


def library_of_spec(spec: KernelSpec) -> Path | bytes:
    """The library of a specialisation: from the disk cache, else built and stored there.

    Returns the bytes where they could not be stored. The spec's entry must take a fourth argument,
    options for cute.compile. Raises KernelCompileError and HostLibraryError.
    """
    key = _key(spec)
    entry, _ = disk_cache.read_entry(key)
    if entry is not None:
        return entry.path
    with disk_cache.only_builder(key) as entry:
        if entry is not None:
            return entry.path
        library = _build(spec)
        if compiler.hash_sources(compiler.entry_module(spec)) != key.facts["sources"]:
            return library  # of another text than the key says; `fa4.compiler` warns of this
        return disk_cache.store_entry(key, library, is_library=True) or library


def library_of_compiled(compiled: Any, ptx: str | None = None) -> bytes:
    """The library of what cute.compile returned with ``--enable-tvm-ffi --keep-ptx``.

    ptx  the module's text, where the compiled function does not have it itself
    """
    if ptx is None:
        ptx = getattr(compiled, "__ptx__", None)
    if not ptx:
        raise HostLibraryError(
            "The compiled function does not have its PTX text, which is what the emulator "
            'executes; compile it with options="--enable-tvm-ffi --keep-ptx".'
        )
    return link(_object_of(compiled), ptx)


def _key(spec: KernelSpec) -> KernelKey:
    """The key of the kernel itself, and how its library is made."""
    key = compiler.kernel_key(spec)
    shim = hashlib.sha256(_shim_source().encode()).hexdigest()
    recipe = {"format": FORMAT, "shim": shim, "options": _OPTIONS}
    return KernelKey(f"{key.name}_emulated", key.arch, {**key.facts, "emulator": recipe})


def _build(spec: KernelSpec) -> bytes:
    from fa4.versions import check_versions

    check_versions()
    dsl_runtime.import_dsl(spec.arch)
    module, function_name = spec.entry.split(":")
    function = getattr(__import__(module, fromlist=[function_name]), function_name)
    with compiler.dsl_lock, tempfile.TemporaryDirectory(prefix="fa4-") as folder:
        options = f"{_OPTIONS} --dump-dir={folder}"
        try:
            compiled = function(spec.features, spec.schedule, spec.arch, options)
        except Exception as error:
            raise KernelCompileError(
                f"Compiling the kernel {spec.name} for the emulator of {spec.arch} failed: {error}"
            ) from error
        return library_of_compiled(compiled)


def _object_of(compiled: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:
        path = Path(folder, "kernel.o")
        try:
            with compiler.dsl_lock:
                compiled.export_to_c(object_file_path=str(path), function_name=EXPORT_NAME)
        except Exception as error:
            raise HostLibraryError(
                f"Exporting the compiled function failed: {error}. It must be what cute.compile "
                "returned with --enable-tvm-ffi."
            ) from error
        return path.read_bytes()


def link(object_code: bytes, ptx: str) -> bytes:
    """Object, shim and PTX text as a shared library.

    Raises HostLibraryError where there is no C compiler, and for host code that makes a CUDA call
    which the shim does not answer: at run time it would reach the real CUDA.
    """
    answered = _shim_functions()
    calls = {name.decode() for name in _CUDA_CALL.findall(object_code)}
    unknown = sorted(name for name in calls if name not in answered)
    if unknown:
        raise HostLibraryError(
            f"The host code of the compiled function calls {', '.join(unknown)}, which the "
            "emulator does not answer."
        )
    c_compiler = _c_compiler()
    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:
        Path(folder, "shim.c").write_text(_shim_source())
        Path(folder, "kernel.ptx").write_text(ptx.rstrip("\0"))
        Path(folder, "kernel.o").write_bytes(object_code)
        # As in fa4.compiler: no start-up files, which are often not installed; and calls bind
        # inside the library. Hidden symbols cannot be bound to from outside either.
        command = [c_compiler, "-shared", "-fPIC", "-O1", "-ffreestanding", "-nostdlib"]
        command += ["-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack"]
        try:
            subprocess.run(
                [*command, "-o", "kernel.so", "shim.c", "kernel.o"],
                cwd=folder,  # where the shim finds kernel.ptx
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.CalledProcessError as error:
            raise HostLibraryError(
                f"{c_compiler} could not build the emulator's library: {error.stderr.strip()}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise HostLibraryError(f"{c_compiler} did not end within 60 s.") from error
        return Path(folder, "kernel.so").read_bytes()


def _c_compiler() -> str:
    for name in _C_COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise HostLibraryError(
        f"The emulator needs a C compiler ({', '.join(_C_COMPILERS)}) on PATH to link a kernel's "
        "host code."
    )


@functools.cache
def _shim_source() -> str:
    return resources.files("fa4.emulator").joinpath("launch_shim.c").read_text()


@functools.cache
def _shim_functions() -> frozenset[str]:
    """Names of the CUDA calls that the shim defines: its function definitions, at line starts."""
    return frozenset(re.findall(r"^(?:int|void) (_cu\w+|cuda_dialect_\w+)\(", _shim_source(), re.M))

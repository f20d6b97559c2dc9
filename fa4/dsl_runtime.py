"""Which CuTe-DSL is installed, and how its runtime is reached without importing it.

Importing the DSL takes 0.8 s. A kernel that is compiled already needs only the DSL's runtime
library, and a cache needs only the toolchain's versions; both are found here from the files that
are installed. Only `import_dsl` imports the DSL.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

# Settings of the DSL that leave the generated code alone. Every other CUTE_DSL_* variable counts
# as one that changes it: one build too many is cheaper than the code of another setting.
_HARMLESS_SETTING = re.compile(
    r"CUTE_DSL_(ARCH|LIBS|CACHE_DIR|DUMP_DIR|KEEP.*|LOG_.*|PRINT_.*|JIT_.*|NO_CACHE"
    r"|DISABLE_FILE_CACHING|SHOW_STACKTRACE|FILTER_STACKTRACE|WARNINGS_.*)"
)


@functools.cache
def toolchain() -> dict[str, Any]:
    """Everything about the compiler that changes its code, as JSON types.

    Found once a process, as the DSL reads its settings once too. The target is not in it: kernels
    are always compiled for a stated one.
    """
    return {
        "versions": toolchain_versions(),
        "cuda_major": cuda_major(),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("CUTE_DSL_") and not _HARMLESS_SETTING.fullmatch(name)
        },
        "machine": f"{platform.system()} {platform.machine()}",
    }


def toolchain_versions() -> dict[str, str]:
    """Versions of the nvidia-cutlass-dsl* and apache-tvm-ffi* distributions in use.

    Of the DSL's CUDA builds only the one that this process uses counts: which others lie beside it
    differs between machines that make the same code.

    importlib.metadata opens every distribution's metadata to find those whose name begins so
    (8 ms with 100 distributions); the names of their folders say the same.
    """
    pattern = re.compile(
        r"((?:nvidia_cutlass_dsl|apache_tvm_ffi)\w*)-([^-]+)(-.*)?\.(dist|egg)-info"
    )
    versions: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # sys.path may name archives, and folders that do not exist
            continue
        for match in filter(None, map(pattern.fullmatch, sorted(names))):
            versions.setdefault(match[1], match[2])  # the first on the path is what is imported
    unused = re.compile(rf"nvidia_cutlass_dsl_libs_cu(?!{cuda_major()}$)\d+")
    return {name: version for name, version in sorted(versions.items()) if not unused.match(name)}


def cuda_major() -> int | None:
    """Which of its CUDA builds the DSL uses in this process, None when that cannot be told.

    Its own rule: the newest installed build that the driver supports, or the newest of all where
    there is no driver.
    """
    build = re.compile(r"_cutlass_ir\.cu(\d+)\..*")
    loaded = sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir")
    if loaded is not None:
        match = build.fullmatch(Path(getattr(loaded, "__file__", None) or "").name)
        return int(match[1]) if match else None
    root = _dsl_root()
    if root is None:
        return None
    folder = root / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    names = os.listdir(folder) if folder.is_dir() else []
    majors = [int(match[1]) for match in map(build.fullmatch, names) if match]
    driver = _driver_cuda_major()
    return max((major for major in majors if driver is None or major <= driver), default=None)


@functools.cache
def load_runtime() -> None:
    """Make the functions that compiled kernels call visible to libraries that are loaded later.

    Raises OSError when the DSL's runtime library cannot be loaded.
    """
    for path in _runtime_libraries():
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def import_dsl(arch: str | None = None) -> None:
    """Import the DSL; where it sees no GPU to ask for its architecture, let it be `arch`.

    It would silently take sm_100a there. With a GPU, or with CUTE_DSL_ARCH set, nothing is changed;
    and the variable is set for the import only, so that child processes do not inherit it.
    """
    is_open = "cutlass" not in sys.modules and "CUTE_DSL_ARCH" not in os.environ
    if is_open and arch is not None and not _sees_gpu():
        os.environ["CUTE_DSL_ARCH"] = arch
        try:
            import cutlass.cute
        finally:
            del os.environ["CUTE_DSL_ARCH"]
    else:
        import cutlass.cute  # noqa: F401


def _dsl_root() -> Path | None:
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    return Path(folders[0]) if folders else None


def _driver_cuda_major() -> int | None:
    """Major CUDA version of the driver, None without one. Makes no context."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None


def _runtime_libraries() -> list[str]:
    chosen = os.environ.get("CUTE_DSL_LIBS")  # the DSL lets it override what it finds
    if chosen:
        return [path for path in chosen.split(os.pathsep) if path.endswith(RUNTIME_LIBRARY)]
    root = _dsl_root()
    if root is not None:
        path = root / f"cu{cuda_major()}" / "lib" / RUNTIME_LIBRARY
        if path.exists():
            return [str(path)]
    # A layout that is not known here: the DSL finds its own library, for the price of its import.
    import_dsl()
    from cutlass.runtime import find_runtime_libraries

    return list(find_runtime_libraries())


def _sees_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()

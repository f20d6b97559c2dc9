"""Which releases of its dependencies fa4 works with, and the check before a kernel is compiled.

The check reads distribution metadata only, so it can name what is missing or too old in one
sentence, where importing an unfit CuTe-DSL would end in a traceback from inside of it.
"""

import importlib.metadata
import re
import warnings
from typing import NamedTuple


class SupportedRange(NamedTuple):
    """Releases of one distribution: the oldest that works and the first that was never tried."""

    distribution: str
    minimum: str
    untested: str

    def __str__(self) -> str:
        return f"{self.distribution}>={self.minimum},<{self.untested}"


# The same ranges as the dependencies in pyproject.toml; tests/test_import_cost.py compares them.
TORCH = SupportedRange("torch", "2.11", "2.15")
CUTE_DSL = SupportedRange("nvidia-cutlass-dsl", "4.8.0", "4.9")
TVM_FFI = SupportedRange("apache-tvm-ffi", "0.1.11", "0.2")
DEPENDENCIES = (TORCH, CUTE_DSL, TVM_FFI)

_INSTALL_HINT = (
    f'pip install "nvidia-cutlass-dsl[cu13]>={CUTE_DSL.minimum},<{CUTE_DSL.untested}" "{TVM_FFI}"'
)


class DependencyError(ImportError):
    """A distribution that compiling a kernel needs is absent or older than fa4 can work with."""


def fa4_version() -> str:
    """Version of the installed package; "unknown (not installed)" in a bare source tree."""
    return installed_version("fa4-kernels") or "unknown (not installed)"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is absent. Imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_key(version: str) -> tuple[tuple[int, ...], int]:
    """Sort key of a version: its release numbers, then 0 for a pre-release and 1 otherwise.

    "2.13.0+cpu" and "2.13" are equal, as are "0.1.15.post2" and "0.1.15"; "4.8.0rc1" and
    "4.8.0.dev3" come before "4.8.0". Raises ValueError where no number stands at the beginning.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", version.strip())
    if match is None:
        raise ValueError(f"version {version!r} does not begin with a release number such as 4.8.0")
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    suffix = match.group(2).split("+")[0]
    is_early = re.match(r"[.\-_]?(a|b|c|rc|alpha|beta|dev|pre)", suffix) is not None
    return tuple(numbers), 0 if is_early else 1


def version_problem(supported: SupportedRange, found: str | None) -> str | None:
    """Why `found` (None: not installed) cannot be used, as one sentence, or None when it can."""
    needed = f"compiling a kernel needs {supported}"
    if found is None:
        return f"{needed}, and it is not installed; {_INSTALL_HINT} installs it"
    if release_key(found) < release_key(supported.minimum):
        return f"{needed}, and version {found} is installed; {_INSTALL_HINT} brings a newer one"
    return None


def is_untested(supported: SupportedRange, found: str) -> bool:
    """Whether `found` is at or beyond the first release that fa4 was never run with."""
    # A pre-release of the first untested version (4.9.0rc1) is as untested as the version itself.
    return release_key(found)[0] >= release_key(supported.untested)[0]


def check_versions() -> None:
    """Check what compiling a kernel needs; called before the first `import cutlass`.

    Raises DependencyError, in one line with the found and the required version, when a distribution
    is absent or below the minimum. A release above the tested range gives one UserWarning a process
    and is then used.
    """
    for supported in (CUTE_DSL, TVM_FFI):
        found = installed_version(supported.distribution)
        problem = version_problem(supported, found)
        if problem is not None:
            raise DependencyError(problem)
        if found is not None and is_untested(supported, found) and supported not in _warned:
            _warned.add(supported)
            warnings.warn(
                f"{supported.distribution} {found} is newer than the releases fa4 was tested with "
                f"({supported}); it is used all the same.",
                stacklevel=2,
            )


_warned: set[SupportedRange] = set()

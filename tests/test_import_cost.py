"""What `import fa4` costs and needs, and what happens when a dependency does not fit.

Public cases C98 (a DSL too old, too new, absent) and C100 (no devices, no driver).
"""

import json
import os
import re
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fa4 import versions

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that runs `code` outside of the checkout."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_import_costs_at_most_300_ms_beyond_torch() -> None:
    code = (
        "import time, torch; start = time.perf_counter(); import fa4; "
        "print(time.perf_counter() - start)"
    )
    run_python(code)  # writes the byte code, reads the files into memory
    seconds = statistics.median(float(run_python(code)) for _ in range(5))
    assert seconds <= 0.3


def test_import_reads_no_dsl_and_creates_no_cuda_context() -> None:
    heavy = ["cutlass", "tvm_ffi", "cuda", "numpy.testing", "pandas", "matplotlib"]
    code = (
        "import json, sys, torch; before = set(sys.modules); import fa4; "
        f"loaded = [name for name in {heavy!r} if name in set(sys.modules) - before]; "
        "print(json.dumps([loaded, torch.cuda.is_initialized()]))"
    )
    loaded, has_context = json.loads(run_python(code))
    assert loaded == []
    assert not has_context


@pytest.mark.parametrize(
    "code",
    [
        "import fa4, fa4.attention, fa4.dispatch, fa4.problem, fa4.reference, fa4.compiler",
        "import fa4.cli; raise SystemExit(fa4.cli.main(['info']))",
        "import fa4.cli; raise SystemExit(fa4.cli.main(['explain', '--arch', 'sm_90a']))",
        "import fa4.cli; print(fa4.cli.support_table())",
    ],
    ids=["import", "info", "explain", "support-table"],
)
def test_works_with_no_visible_device(code: str) -> None:
    run_python(code, CUDA_VISIBLE_DEVICES="")


@pytest.fixture
def pretend_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a distribution appear in another version, as an installation found first would."""

    def pretend(distribution: str, version: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.setattr(versions, "_warned", set())
    return pretend


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("nvidia-cutlass-dsl", "4.7.1"),
        ("nvidia-cutlass-dsl", "4.8.0rc1"),
        ("apache-tvm-ffi", "0.1.10"),
    ],
)
def test_version_below_the_minimum_is_one_line_with_found_and_required(
    pretend_installed, distribution: str, version: str
) -> None:
    pretend_installed(distribution, version)
    with pytest.raises(versions.DependencyError) as error:
        versions.check_versions()
    message = str(error.value)
    assert "\n" not in message
    assert version in message
    supported = {entry.distribution: entry for entry in versions.DEPENDENCIES}[distribution]
    assert str(supported) in message


def test_absent_dsl_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda distribution: None)
    with pytest.raises(versions.DependencyError) as error:
        versions.check_versions()
    message = str(error.value)
    assert "\n" not in message
    assert "not installed" in message
    assert "nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9" in message


@pytest.mark.parametrize("version", ["4.9.0", "4.9.0rc1", "4.10", "5.0.0.dev1"])
def test_version_above_the_tested_range_warns_once(pretend_installed, version: str) -> None:
    pretend_installed("nvidia-cutlass-dsl", version)
    with pytest.warns(UserWarning, match=re.escape(f"nvidia-cutlass-dsl {version} is newer")):
        versions.check_versions()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_versions()


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("nvidia-cutlass-dsl", "4.8.0"),
        ("nvidia-cutlass-dsl", "4.8.1"),
        ("apache-tvm-ffi", "0.1.11"),
        ("apache-tvm-ffi", "0.1.15.post2"),
    ],
)
def test_versions_within_the_range_pass_in_silence(
    pretend_installed, distribution: str, version: str
) -> None:
    pretend_installed(distribution, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_versions()


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("4.8.0rc1", "4.8.0"),
        ("4.8.0.dev3", "4.8"),
        ("4.8.1", "4.8.10"),
        ("2.9", "2.11"),
        ("0.1.11", "0.1.15.post2"),
    ],
)
def test_release_keys_order_versions(older: str, newer: str) -> None:
    assert versions.release_key(older) < versions.release_key(newer)


def test_local_and_trailing_zero_parts_do_not_change_a_version() -> None:
    assert versions.release_key("2.13.0+cpu") == versions.release_key("2.13")


def test_text_that_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'nightly' does not begin with a release number"):
        versions.release_key("nightly")


def test_version_table_equals_the_dependencies_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", project, re.S | re.M)
    assert dependencies is not None
    declared = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+),<([\d.]+)', dependencies.group(1))
    assert {versions.SupportedRange(*entry) for entry in declared} == set(versions.DEPENDENCIES)

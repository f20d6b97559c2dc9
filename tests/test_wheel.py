"""The package as a user gets it: what the wheel holds, and that it works from anywhere.

Public case C97: the wheel owns its own top-level name and nothing else. The environments made here
see the dependencies of the environment that runs the tests, so nothing is downloaded.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])

# Folder of the source tree -> the package it is installed as.
FOLDERS = {"fa4": "fa4", "kernels": "fa4/kernels", "pipelines": "fa4/pipelines"}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expected_files() -> set[str]:
    """Paths inside the wheel of everything the source tree holds for it."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def module_names() -> list[str]:
    """Every module of the package, by the name it is installed under."""
    files = sorted(name for name in expected_files() if name.endswith(".py"))
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    return [name for name in names if not name.endswith("__main__")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from, free of earlier builds."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution so that both are known to be complete."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def make_environment(folder: Path) -> Path:
    """A new virtual environment that can import this one's dependencies; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder
    ).strip()
    # Sorts before the rest: the .pth files of dependencies import from the folder named here.
    (Path(purelib) / "a_dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    for path in SITE_PACKAGES.glob("*.pth"):
        if "editable" not in path.name:
            shutil.copy(path, Path(purelib) / path.name)
    return python


def pip_install(python: Path, *arguments: str | Path, cwd: Path) -> None:
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"),
        *arguments,
        cwd=cwd,
    )


def import_everywhere(python: Path, cwd: Path) -> dict[str, str]:
    """Imports every module of the package in a new interpreter; returns name -> file."""
    code = (
        "import importlib, json, sys; "
        f"modules = {{name: importlib.import_module(name) for name in {module_names()!r}}}; "
        "print(json.dumps({name: module.__file__ for name, module in modules.items()}))"
    )
    return json.loads(run(python, "-c", code, cwd=cwd).splitlines()[-1])


def test_wheel_holds_every_file_of_the_source_tree_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    modules = {name for name in names if ".dist-info/" not in name}
    missing, extra = expected_files() - modules, modules - expected_files()
    assert not missing, f"not in the wheel, see packages in pyproject.toml: {sorted(missing)}"
    assert not extra
    top_level = {name.split("/")[0] for name in names}
    assert top_level == {"fa4", wheel.name.split("-py3")[0] + ".dist-info"}


def test_wheel_metadata_names_licence_requirements_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(f"{info}/METADATA").decode()
    for line in (
        "Name: fa4-kernels",
        "Requires-Python: >=3.10",
        "License-Expression: Apache-2.0",
        "Requires-Dist: torch<2.15,>=2.11",
        "Provides-Extra: test",
        "Provides-Extra: perf",
        "Provides-Extra: dev",
    ):
        assert line in metadata.splitlines()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "fa4 = fa4.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_installed_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment)
    pip_install(python, wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files = import_everywhere(python, elsewhere)
    assert set(files) == set(module_names())
    outside = {name: file for name, file in files.items() if not file.startswith(str(environment))}
    assert not outside
    assert "compile" in run(environment / "bin" / "fa4", "--help", cwd=elsewhere)


def test_editable_install_resolves_kernels_and_pipelines(source: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    pip_install(python, "--no-build-isolation", "--editable", source, cwd=tmp_path)
    for cwd in (tmp_path, source):
        files = import_everywhere(python, cwd)
        for folder, package in FOLDERS.items():
            module = package.replace("/", ".")
            assert files[module] == str(source / folder / "__init__.py")

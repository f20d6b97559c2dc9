"""The command line: what each command prints, its exit codes, and its errors as sentences."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa4 import cli, compiler, demo, dispatch, versions

COMMANDS = ("info", "explain", "demo", "compile", "cache")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA4_CACHE_DIR", str(folder))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of a command line."""
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_module_runs_as_a_program_and_lists_its_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fa4", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s+\w", done.stdout, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"usage: fa4 {command}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: COMMAND"),
        (("attend",), "invalid choice: 'attend'"),
        (("explain", "--arch", "sm_80"), "invalid choice: 'sm_80'"),
        (("explain", "--heads-q", "7", "--heads-kv", "2"), "heads_q=7 .* heads_kv=2"),
        (("explain", "--window", "-2", "0"), "left bound is -2"),
        (("explain", "--softcap", "-1"), "softcap=-1.0 is negative"),
        (("explain", "--softmax-scale", "nan"), "softmax_scale=nan must be a finite"),
        (("explain", "--batch", "-1"), "--batch is -1"),
        (("compile", "--jobs", "0"), "--jobs is 0"),
        (("compile", "--head-dim", "-8"), "--head-dim is -8"),
        (("demo", "--tokens", "0"), "--tokens is 0"),
        (("demo", "--tokens", "100000000"), "100000000 are asked for"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_arguments_that_make_no_sense_are_a_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert re.search(message, err)
    assert "Traceback" not in err


def test_info_names_versions_devices_kernels_cache_and_mode(
    capsys: pytest.CaptureFixture[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4_CHECKED", "1")
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert f"torch               {torch.__version__}" in out
    assert versions.installed_version("nvidia-cutlass-dsl") in out
    assert ("no GPU" in out) == (not torch.cuda.is_available())
    assert "forward on Hopper (sm_90a): bf16, fp16" in out
    assert f"{empty_cache}: 0 entries, 0.0 MiB" in out
    assert "checked mode        on" in out


def test_info_survives_a_missing_dependency_and_a_wrong_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda distribution: None)
    monkeypatch.setenv("FA4_CHECKED", "perhaps")
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "not installed  needs nvidia-cutlass-dsl>=4.8.0,<4.9" in out
    assert "FA4_CHECKED is 'perhaps'" in out


def test_info_says_for_each_gpu_whether_kernels_run_on_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [("H200", (9, 0)), ("A100", (8, 0)), ("B200", (10, 0))]

    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: devices[device.index][0])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: devices[device.index][1]
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(dispatch, "architecture_of", dispatch.architecture_of.__wrapped__)
    _, out, _ = run(capsys, "info")
    assert "cuda:0 H200 (compute capability 9.0), 80 GiB; kernels: forward" in out
    assert "cuda:1 A100 (compute capability 8.0), 80 GiB; kernels: none" in out
    assert "cuda:2 B200 (compute capability 10.0), 80 GiB; kernels: forward" in out


def test_explain_prints_the_decision_for_an_architecture(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(
        capsys,
        *("explain", "--arch", "sm_90a", "--dtype", "fp16", "--batch", "3", "--seqlen-q", "7"),
        *("--seqlen-k", "100", "--heads-q", "12", "--heads-kv", "4", "--head-dim", "192"),
        *("--head-dim-v", "128", "--window", "5", "-1", "--causal", "--softcap", "30"),
        *("--sink", "bf16", "--varlen", "--seqused-k", "--softmax-scale", "0.5"),
    )
    assert code == 0
    for part in (
        "21 packed rows, 12 heads, dim 192",  # 3 sequences of 7
        "300 packed rows, 4 heads, dim 192",
        "window left 5, right 0",  # causal and window together
        "scale 0.5, ",
        "softcap 30",
        "sink bf16",
        "seqused_k",
        "fp16_d192_dv128_left_right_softcap_sinkbf16_packedq_packedk_sequsedk",
    ):
        assert part in out
    assert re.search(r"^answer +kernel fa4_sm90_forward_\S+ for sm_90a$", out, re.M)
    assert re.search(r"^schedule +query tile", out, re.M)


def test_explain_gives_every_reason_why_a_kernel_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(
        capsys,
        *("explain", "--arch", "sm_100a", "--dtype", "fp32", "--head-dim", "260", "--gradients"),
    )
    assert code == 0
    reasons = re.findall(r"^because +(.*)$", out, re.M)
    assert any("dtype fp32" in reason for reason in reasons)
    assert any("head_dim=260" in reason for reason in reasons)
    assert any("gradients" in reason for reason in reasons)
    assert "answer    reference" in out


def test_explain_without_arch_is_about_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = run(capsys, "explain")
    assert code == 0
    assert out.startswith("device    a cpu device")
    assert "answer    reference" in out


def test_demo_passes_here_and_says_what_ran_where(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo")
    assert code == 0, out
    assert re.search(r"^PASS", out, re.M)
    assert "reference (PyTorch) on the CPU" in out
    assert "tiled online softmax (PyTorch) on the CPU" in out
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in out
    else:
        assert "GPU: none" in out
        assert re.search(r"^kernel fa4_sm90_forward_bf16_d128_right\S* emulated", out, re.M)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, lse: (out * 1.05, lse),
        lambda out, lse: (out.index_fill(1, torch.tensor([100]), float("nan")), lse),
        lambda out, lse: (out, lse + 0.01),
        lambda out, lse: (out.roll(1, dims=2), lse),  # heads in the wrong place
    ],
    ids=["scaled", "nan", "lse", "heads"],
)
def test_demo_fails_for_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spoil
) -> None:
    right = demo.tiled_attention
    monkeypatch.setattr(demo, "tiled_attention", lambda *a, **k: spoil(*right(*a, **k)))
    code, out, _ = run(capsys, "demo", "--tokens", "256")
    assert code == 1
    assert re.search(r"^tiled online softmax .* WRONG$", out, re.M)
    assert re.search(r"^FAIL", out, re.M)


def test_demo_fails_when_the_kernel_cannot_be_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = demo.flash_attn_func

    def refuse(*tensors: torch.Tensor, backend: str, **options: object) -> object:
        if backend == "emulator":
            raise versions.DependencyError("compiling a kernel needs something else")
        return attend(*tensors, backend=backend, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "flash_attn_func", refuse)
    code, out, _ = run(capsys, "demo", "--tokens", "64")
    assert code == 1
    assert "needs something else" in out
    assert re.search(r"^FAIL", out, re.M)


def test_compile_fills_the_cache_once_with_no_gpu(
    capsys: pytest.CaptureFixture[str], empty_cache: Path
) -> None:
    arguments = ("compile", "--arch", "sm_90a", "--dtype", "bf16", "--head-dim", "64", "--causal")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert re.search(r"^fa4_sm90_forward_bf16_d64_right  sm_90a +[\d.]+ s  compiled$", out, re.M)
    assert f"{empty_cache}: 1 entry" in out

    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert re.search(r"^fa4_sm90_forward_bf16_d64_right  sm_90a +0\.\d+ s  was there$", out, re.M)

    code, out, _ = run(capsys, "cache", "--list")
    assert code == 0
    assert re.search(r"^ +\d{4,}  sm_90a +fa4_sm90_forward_bf16_d64_right$", out, re.M)
    (entry,) = compiler.cache_entries()
    assert f"1 entry, {entry.size / 2**20:.1f} MiB" in out

    code, out, _ = run(capsys, "cache", "--clear")
    assert code == 0
    assert "1 entry removed" in out
    assert compiler.cache_entries() == []


def test_compile_takes_every_combination_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def record(spec: compiler.KernelSpec) -> compiler.CompileReport:
        names.append(spec.name)
        return compiler.CompileReport(spec.name, spec.arch, 0.0, True, None)

    monkeypatch.setattr(compiler, "compile_kernel", record)
    # 100 does not divide by 8, and 120 and 128 are one class of head dims.
    code, _, err = run(
        capsys, "compile", "--dtype", "bf16", "fp16", "--head-dim", "64", "120", "128", "100"
    )
    assert code == 1
    assert err.count("refused: ") == 2
    assert "head_dim=100" in err
    assert sorted(names) == [
        f"fa4_sm90_forward_{dtype}_{dim}" for dtype in ("bf16", "fp16") for dim in ("d128", "d64")
    ]


@pytest.mark.parametrize("preset", cli.PRESETS)
def test_every_kernel_of_a_preset_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    names = []

    def record(spec: compiler.KernelSpec) -> compiler.CompileReport:
        names.append(spec.name)
        return compiler.CompileReport(spec.name, spec.arch, 0.0, True, None)

    monkeypatch.setattr(compiler, "compile_kernel", record)
    code, _, err = run(capsys, "compile", "--preset", preset)
    assert (code, err) == (0, "")
    combinations = 1
    for values in cli.PRESETS[preset].values():
        combinations *= len(values)
    assert len(set(names)) == combinations


def test_compile_says_which_kernel_failed_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: compiler.KernelSpec) -> compiler.CompileReport:
        raise compiler.KernelCompileError(f"{spec.name} could not be compiled")

    monkeypatch.setattr(compiler, "compile_kernel", fail)
    code, _, err = run(capsys, "compile", "--head-dim", "64", "128")
    assert code == 1
    assert err.count("could not be compiled") == 2


@pytest.mark.parametrize("fault", ["old", "absent"])
def test_compile_with_an_unfit_dsl_is_one_line_and_exit_1(tmp_path: Path, fault: str) -> None:
    # C98. A fresh process finds an older DSL first, or none.
    if fault == "old":
        info = tmp_path / "nvidia_cutlass_dsl-4.7.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.7.0\n"
        )
        code = "import sys; from fa4.cli import main; sys.exit(main(['compile']))"
    else:
        code = (
            "import sys; from fa4 import versions; from fa4.cli import main; "
            "versions.installed_version = lambda distribution: None; sys.exit(main(['compile']))"
        )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "FA4_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "nvidia-cutlass-dsl>=4.8.0,<4.9" in line
    assert ("version 4.7.0 is installed" if fault == "old" else "not installed") in line


@pytest.mark.slow
def test_compile_in_processes_gives_the_same_entries(
    capsys: pytest.CaptureFixture[str], empty_cache: Path
) -> None:
    code, out, _ = run(capsys, "compile", "--head-dim", "64", "--dtype", "bf16", "fp16", "--jobs=2")
    assert code == 0, out
    assert out.count("compiled") == 2
    assert {entry.name for entry in compiler.cache_entries()} == {
        "fa4_sm90_forward_bf16_d64",
        "fa4_sm90_forward_fp16_d64",
    }


def test_cache_of_a_folder_that_does_not_exist_is_empty(
    capsys: pytest.CaptureFixture[str], empty_cache: Path
) -> None:
    code, out, _ = run(capsys, "cache")
    assert code == 0
    assert out == f"{empty_cache}: 0 entries, 0.0 MiB\n"
    assert not empty_cache.exists()

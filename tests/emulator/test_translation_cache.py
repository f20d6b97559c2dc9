"""Translated kernels on disk: found by a later process, and only for what they were made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa4.emulator import ptx, translation_cache
from fa4.emulator import translate as translate_module
from fa4.emulator.errors import UnknownInstruction
from fa4.emulator.translate import translate
from tests.emulator import ptx_kernels

STORE = "mad.lo.u64 %rd50, %rd60, 4, %rd0;\nst.global.b32 [%rd50], %r1;\n"
LONG_BODY = "mov.b32 %r1, 0;\n" + "add.u32 %r1, %r1, %r60;\n" * 40 + STORE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(translation_cache, "MIN_TEXT_BYTES", 1000)
    translate.cache_clear()


def forbid_translating(monkeypatch: pytest.MonkeyPatch) -> None:
    def translated(text: str, entry: str) -> None:
        raise AssertionError("the kernel was translated again")

    monkeypatch.setattr(translate_module, "_translation_of", translated)
    translate.cache_clear()


def run_long_body() -> list[int]:
    output = np.zeros(32, np.uint32)
    ptx_kernels.run_body(LONG_BODY, [output])
    return output.tolist()


def test_a_translation_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_long_body() == [40 * lane for lane in range(32)]
    (entry,) = tmp_path.glob("kernel_translated-sm_90a-*.o")
    assert entry.stat().st_size < 100_000
    forbid_translating(monkeypatch)
    assert run_long_body() == [40 * lane for lane in range(32)]


def test_faults_are_located_in_a_stored_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    run_long_body()
    forbid_translating(monkeypatch)
    text = ptx_kernels.kernel_text(LONG_BODY, 1)
    program = translate(text, "kernel")
    line = program.first_lines[0]
    assert program.module.line_text(line) == ptx.parse(text).line_text(line) != ""


@pytest.mark.parametrize("part", ["text", "sources", "numpy"])
def test_another_text_or_emulator_is_translated_anew(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_long_body()
    translate.cache_clear()
    if part == "text":
        ptx_kernels.run_body(LONG_BODY.replace("add.u32", "sub.u32"), [np.zeros(32, np.uint32)])
    elif part == "sources":
        monkeypatch.setattr(translation_cache, "_sources_digest", lambda: "other")
        run_long_body()
    else:
        monkeypatch.setattr(np, "__version__", "0.0.0")
        run_long_body()
    assert len(list(tmp_path.glob("*.o"))) == 2


def test_small_and_refused_kernels_leave_no_file(tmp_path: Path) -> None:
    ptx_kernels.run_body("mov.b32 %r1, 0;\n")
    with pytest.raises(UnknownInstruction):
        ptx_kernels.run_body(LONG_BODY + "frobnicate.b32 %r1, %r2;\n", [np.zeros(32, np.uint32)])
    assert not list(tmp_path.glob("*.o"))

"""Words by hand and by the papers' asymptotics; our schedules' bytes as the emulator counts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pandas")
from perf import io_model
from perf.cases import Case, dense


def test_words_of_a_small_problem_by_hand() -> None:
    # N = 4, d = 2, M = 16: blocks of ceil(16 / 8) = 2 keys, 2 passes.
    assert io_model.block_sizes(4, 2, 16) == (2, 2)
    assert io_model.materialised_words(4, 2) == 4 * 8 + 4 * 16
    assert io_model.fa1_words(4, 2, 16) == 2 * 8 + 2 * (3 * 8 + 4 * 4)
    assert io_model.fa2_words(4, 2, 16) == 2 * 8 + 4 + 2 * (2 * 8)


@pytest.mark.parametrize("words", [io_model.fa1_words, io_model.fa2_words])
def test_tiled_algorithms_move_n2_d2_over_m(words) -> None:
    """Dao et al. 2022, theorem 2: constants aside, for every M between d and N d."""
    n, d = 65536, 128
    per_unit = [words(n, d, m) * m / (n * d) ** 2 for m in (2**14, 2**16, 2**18)]
    assert max(per_unit) / min(per_unit) < 1.25
    assert words(2 * n, d, 2**16) / words(n, d, 2**16) == pytest.approx(4, rel=0.05)
    assert words(n, 2 * d, 2**16) / words(n, d, 2**16) == pytest.approx(4, rel=0.05)


def test_materialising_moves_n_d_plus_n2() -> None:
    assert io_model.materialised_words(65536, 64) / 65536**2 == pytest.approx(4, rel=0.01)


def test_writing_the_output_once_saves_a_third() -> None:
    """K/V outermost moves Q, O in and O out a pass, Q outermost only K and V."""
    n, d, m = 16384, 128, 2**16
    saved = io_model.fa2_words(n, d, m) / io_model.fa1_words(n, d, m)
    assert saved == pytest.approx(2 / 3, rel=0.05)


def test_whole_sequence_on_chip_is_read_once() -> None:
    n, d = 64, 64
    assert io_model.fa2_words(n, d, 4 * n * d) == 4 * n * d + n
    with pytest.raises(ValueError, match="four rows of d=64"):
        io_model.fa1_words(n, d, 255)


@pytest.mark.parametrize("case", io_model.CHECKED, ids=lambda case: case.name)
def test_the_emulator_counts_the_bytes_of_the_model(case: Case) -> None:
    traffic = io_model.forward_traffic(case, io_model.schedule_of(case))
    assert io_model.emulated_traffic(case) == (traffic.loaded, traffic.stored)


def test_least_traffic_is_each_tensor_once() -> None:
    case = dense(4, 4096, 32, 8, 128)
    traffic = io_model.forward_traffic(case, io_model.schedule_of(case))
    assert traffic.hbm_least == 2 * 4 * 4096 * 128 * (2 * 32 + 2 * 8)
    assert traffic.loaded > 10 * traffic.hbm_least  # from L2


LONG = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","fa4_sm90_forward","dram__bytes_read.sum","Mbyte","1,268.50"
"0","fa4_sm90_forward","dram__bytes_write.sum","Kbyte","67,108.86"
"0","fa4_sm90_forward","sm__cycles.sum","cycle","5"
"""
WIDE = """"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","Mbyte","byte"
"0","fa4_sm90_forward","1,268.50","67,108,860"
"""


@pytest.mark.parametrize("text", [LONG, WIDE], ids=["details", "raw"])
def test_counters_of_nsight_compute_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counts.csv"
    path.write_text(text)
    (row,) = io_model.read_counters(path).to_dict("records")
    assert row["kernel"] == "fa4_sm90_forward"
    assert row["hbm_in"] == pytest.approx(1.2685e9)
    assert row["hbm_out"] == pytest.approx(67_108_860)


@pytest.mark.parametrize(("text", "message"), [("nothing", "no lines"), ('"a","b"\n', "none of")])
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "counts.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        io_model.read_counters(path)

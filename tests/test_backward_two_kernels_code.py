"""What the compiler makes of the backward kernels without atomics, read from their machine code.

As tests/test_kernel_code.py does for the forward kernels; needs no GPU. The tests marked `slow`
complete the matrix of head dims.
"""

import itertools
from typing import Any, NamedTuple

import pytest

from fa4.compiler import KernelSpec
from fa4.dispatch import DKV_ENTRY, DQ_ENTRY, PREPARE_ENTRY
from fa4.kernels.features import HEAD_DIM_CLASSES, BackwardFeatures, PrepareFeatures
from fa4.pipelines.sm90_backward import (
    DkvSchedule,
    DqSchedule,
    PrepareSchedule,
    two_kernel_schedules,
)
from tests import sass
from tests.sass import Code, Instruction

ARCH = "sm_90a"
FULL: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"has_right_bound": True}
# Everything at once: the most that has to be kept in registers.
HEAVIEST: dict[str, Any] = {
    "dtype": "fp16",
    "has_left_bound": True,
    "has_right_bound": True,
    "score": "softcap",
    "packed_q": True,
    "packed_k": True,
    "has_seqused_q": True,
    "has_seqused_k": True,
}


def features(head_dim: int, head_dim_v: int, options: dict[str, Any]) -> BackwardFeatures:
    return BackwardFeatures(
        **{"dtype": "bf16", "head_dim": head_dim, "head_dim_v": head_dim_v, **options}
    )


# Masks and lengths with the widest blocks, which softcap would narrow.
WIDEST: dict[str, Any] = {**HEAVIEST, "score": "plain"}

USUAL = [
    features(dim, dim_v, options)
    for dim, dim_v in ((128, 128), (192, 128), (256, 256))
    for options in (FULL, CAUSAL, HEAVIEST, WIDEST)
]
REST = [
    specialisation
    for dim, dim_v in itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES)
    for options in (FULL, CAUSAL, HEAVIEST, WIDEST)
    if (specialisation := features(dim, dim_v, options)) not in USUAL
]


class Kernel(NamedTuple):
    """A specialisation and its code."""

    features: BackwardFeatures
    schedule: Any
    code: Code

    @property
    def loops(self) -> list[list[Instruction]]:
        """Loops over blocks: one for each role that multiplies."""
        return self.code.loops_with("HGMMA")


def kernels_of(wanted: BackwardFeatures) -> dict[str, Kernel]:
    schedules = two_kernel_schedules(wanted)
    found = {}
    for name, entry, schedule in (
        ("dkv", DKV_ENTRY, schedules.dkv),
        ("dq", DQ_ENTRY, schedules.dq),
    ):
        spec = KernelSpec(entry, ARCH, wanted, schedule)
        found[name] = Kernel(wanted, schedule, sass.code_of(spec))
    return found


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(each, id=each.name) for each in USUAL),
        *(pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in REST),
    ],
)
def kernels(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    return kernels_of(request.param)


def num_waits(loop: list[Instruction]) -> int:
    """Waits for matrix products; the assembler adds some where it must serialise them."""
    return sum(instruction.opcode.startswith("WARPGROUP.DEPBAR") for instruction in loop)


def test_no_register_is_spilled(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.code.count("STL") == 0, name
        assert kernel.code.count("LDL") == 0, name


def test_products_are_waited_for_where_the_kernel_says_and_nowhere_else(
    kernels: dict[str, Kernel],
) -> None:
    assert [num_waits(loop) for loop in kernels["dkv"].loops] == [2, 2]
    assert [num_waits(loop) for loop in kernels["dq"].loops] == [3]


def test_every_product_is_one_instruction_a_step_of_sixteen(kernels: dict[str, Kernel]) -> None:
    dkv, dq = kernels["dkv"], kernels["dq"]
    schedule = dkv.schedule
    assert isinstance(schedule, DkvSchedule)
    over_rows = schedule.tile_m // 16
    # S over the head dim and dV over rows; dP over the value head dim and dK over rows.
    expected = [schedule.head_dim // 16 + over_rows, schedule.head_dim_v // 16 + over_rows]
    assert sorted(sass.count(loop, "HGMMA") for loop in dkv.loops) == sorted(expected)
    schedule = dq.schedule
    assert isinstance(schedule, DqSchedule)
    steps = (schedule.head_dim + schedule.head_dim_v) // 16 + schedule.tile_n // 16
    assert [sass.count(loop, "HGMMA") for loop in dq.loops] == [steps]


def test_row_statistics_and_weights_are_read_sixteen_bytes_at_a_time(
    kernels: dict[str, Kernel],
) -> None:
    """Both are laid out so that a thread's values are neighbours (`kernels.blocks`)."""
    kernel = kernels["dkv"]
    pieces = kernel.schedule.tile_m // 16
    loads = [
        [instruction.opcode for instruction in loop if instruction.is_a("LDS")]
        for loop in kernel.loops
    ]
    # LSE in the loop of dV; delta and weights in the loop of dK.
    assert sorted(map(len, loads)) == [pieces, 2 * pieces]
    assert {opcode for each in loads for opcode in each} == {"LDS.128"}
    stores = [i.opcode for loop in kernel.loops for i in loop if i.is_a("STS")]
    assert stores == ["STS.128"] * pieces


def test_one_exponential_an_element(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        if kernel.features.score == "softcap":
            continue
        elements = (kernel.schedule.tile_m if name == "dkv" else kernel.schedule.tile_n) // 2
        found = [sass.count(loop, "MUFU.EX2") for loop in kernel.loops]
        assert sorted(found) == ([0, elements] if name == "dkv" else [elements])


def test_the_whole_loop_reads_nothing_from_global_memory(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        for loop in kernel.loops:
            assert sass.count(loop, "LDG") == 0, name
            assert sass.count(loop, "STG") == 0, name


@pytest.mark.parametrize("head_dim_v", HEAD_DIM_CLASSES)
def test_statistics_are_prepared_with_wide_loads_and_no_spill(head_dim_v: int) -> None:
    wanted = PrepareFeatures("bf16", head_dim_v, has_grad_lse=True, packed_q=True, packed_k=True)
    code = sass.code_of(KernelSpec(PREPARE_ENTRY, ARCH, wanted, PrepareSchedule(head_dim_v, 64)))
    assert code.count("STL") == code.count("LDL") == 0
    steps = 64 * PrepareSchedule(head_dim_v, 64).lanes_a_row // 256
    wide = [i for i in code.instructions if i.is_a("LDG") and ".128" in i.opcode]
    assert len(wide) == 2 * steps

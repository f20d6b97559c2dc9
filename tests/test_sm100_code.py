"""What the compiler makes of the Blackwell kernels, read from their machine code; needs no GPU.

The first run compiles (some 5 s a kernel); later ones find the kernels in fa4's cache. The tests
marked `slow` complete the matrix of head dims and features.
"""

import dataclasses
import itertools
from typing import Any

import pytest

from fa4 import dispatch
from fa4.compiler import KernelSpec
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines.sm100 import ForwardSchedule, forward_schedule
from tests import sass
from tests.sass import Code, Instruction
from tests.test_kernel_code import CAUSAL, FULL, HEAVIEST, PROBLEM

ENTRY = "fa4.kernels.sm100.forward:compile_forward"
WINDOW: dict[str, Any] = {"has_left_bound": True, "has_right_bound": True}
SHORT = 64  # rows of a sequence that one CTA holds


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A specialisation and its code."""

    spec: KernelSpec
    features: ForwardFeatures
    schedule: ForwardSchedule
    code: Code

    @property
    def softmax_loops(self) -> list[list[Instruction]]:
        """Loops over key blocks behind the first: at the diagonal, whole, at the left edge."""
        return self.code.loops_with("STTM.x16")

    @property
    def is_masked(self) -> list[bool]:
        """Of each such loop."""
        return [
            *[True] * self.features.has_right_bound,
            False,
            *[True] * self.features.has_left_bound,
        ]


def spec_of(
    head_dim: int,
    head_dim_v: int,
    options: dict[str, Any],
    rows: int | None = None,
    arch: str = "sm_100a",
    group: int = 1,
) -> KernelSpec:
    features = ForwardFeatures(
        **{"dtype": "bf16", "head_dim": head_dim, "head_dim_v": head_dim_v, **options}
    )
    return KernelSpec(ENTRY, arch, features, forward_schedule(features, rows, group, arch))


# One of each structure: two query tiles, a pair of CTAs, a single query tile; static and dynamic
# order; and what needs most registers.
USUAL = [
    spec_of(128, 128, CAUSAL),
    spec_of(128, 128, FULL),
    spec_of(256, 256, HEAVIEST),
]
REST = [
    spec
    for spec in dict.fromkeys(
        spec_of(dim, dim_v, options, rows)
        for dim, dim_v in itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES)
        for options in (FULL, CAUSAL, WINDOW, HEAVIEST)
        for rows in (None, SHORT)
        if dim == dim_v or (dim, dim_v) == (192, 128) or options is HEAVIEST
    )
    if spec not in USUAL
] + [
    spec_of(128, 128, FULL, arch="sm_103a"),
    spec_of(64, 64, CAUSAL, arch="sm_103a"),
    spec_of(128, 128, HEAVIEST, rows=3, group=8),  # heads that share a tile of ragged rows
    spec_of(256, 256, HEAVIEST, rows=60, group=8),
]


def name_of(spec: KernelSpec) -> str:
    assert isinstance(spec.features, ForwardFeatures)
    assert isinstance(spec.schedule, ForwardSchedule)
    return f"{spec.arch}-{spec.features.name}-{spec.schedule.name}"


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(spec, id=name_of(spec)) for spec in USUAL),
        *(pytest.param(spec, id=name_of(spec), marks=pytest.mark.slow) for spec in REST),
    ],
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    spec: KernelSpec = request.param
    assert isinstance(spec.features, ForwardFeatures)
    assert isinstance(spec.schedule, ForwardSchedule)
    return Kernel(spec, spec.features, spec.schedule, sass.code_of(spec))


def test_no_register_is_spilled_in_any_role(kernel: Kernel) -> None:
    assert kernel.code.count("STL") == kernel.code.count("LDL") == 0


def test_matrix_products_are_one_instruction_for_each_step_of_16(kernel: Kernel) -> None:
    """Once for each query tile: the loop over blocks is not unrolled."""
    schedule = kernel.schedule
    steps = schedule.head_dim // 16 + schedule.tile_n // 16
    products = [i for i in kernel.code.instructions if i.is_a("UTCHMMA")]
    assert len(products) == schedule.query_tiles * steps
    assert all(i.is_a("UTCHMMA.2CTA") == (schedule.ctas == 2) for i in products)
    (loop,) = kernel.code.loops_with("UTCHMMA")
    assert sass.count(loop, "UTCHMMA") == len(products)
    assert sass.count(loop, "SHFL") == 0


def test_a_block_goes_once_through_registers(kernel: Kernel) -> None:
    """Scores come in 32 columns at a time, and leave as 16 columns of probabilities."""
    blocks = kernel.schedule.tile_n // 32
    assert len(kernel.softmax_loops) == len(kernel.is_masked)
    for loop in kernel.softmax_loops:
        assert sass.count(loop, "LDTM.x32") == sass.count(loop, "LDTM") == blocks
        assert sass.count(loop, "STTM.x16") == sass.count(loop, "STTM") == blocks
    # O: read and written where it is rescaled, read once more at the end.
    output = kernel.schedule.query_tiles * kernel.schedule.head_dim_v // 32
    assert kernel.code.count("LDTM") == 2 * output + blocks * (len(kernel.is_masked) + 1)
    assert kernel.code.count("STTM") == output + blocks * (len(kernel.is_masked) + 1)


def test_exponentials_are_split_between_mufu_and_fma_as_scheduled(kernel: Kernel) -> None:
    """One more a row for the rescaling, at times in two places; softcap takes one a score."""
    schedule = kernel.schedule
    caps = schedule.tile_n if kernel.features.score == "softcap" else 0
    for loop, is_masked in zip(kernel.softmax_loops, kernel.is_masked, strict=True):
        polynomials = 0 if is_masked else schedule.exp2_polynomials * schedule.tile_n // 32
        scores = schedule.tile_n - polynomials + caps
        assert scores + 1 <= sass.count(loop, "MUFU.EX2") <= scores + 2


def test_arithmetic_of_a_block_is_packed(kernel: Kernel) -> None:
    """Two elements an instruction for the exponent, the sum and the conversion; three scores a
    maximum."""
    half = kernel.schedule.tile_n // 2
    for loop, is_masked in zip(kernel.softmax_loops, kernel.is_masked, strict=True):
        pairs = 0 if is_masked else kernel.schedule.exp2_polynomials * half // 32
        assert sass.count(loop, "FFMA2") == half - pairs + 5 * pairs
        assert sass.count(loop, "FADD2") == half + pairs
        assert sass.count(loop, "F2FP") == half
        assert half <= sass.count(loop, "FMNMX3") <= half + 4


def test_registers_move_between_the_roles_as_scheduled(kernel: Kernel) -> None:
    schedule = kernel.schedule
    at_launch = 65_536 // schedule.threads // 8 * 8
    assert kernel.code.registers == at_launch
    moves = sorted(
        (i.opcode.split(".")[1], int(i.operands.split(",")[-1], 16))
        for i in kernel.code.instructions
        if i.is_a("USETMAXREG")
    )
    roles = (
        schedule.softmax_registers, schedule.correction_registers, schedule.other_registers
    )  # fmt: skip
    assert moves == sorted(
        ("TRY_ALLOC" if count > at_launch else "DEALLOC", count) for count in roles
    )


def test_tiles_are_moved_by_tma_and_work_is_asked_for_as_scheduled(kernel: Kernel) -> None:
    code = kernel.code
    assert code.count("UTMALDG") >= kernel.schedule.query_tiles + 2
    # A copy is as wide as its swizzle: 64 columns, or 32 where they do not divide the row.
    copies = kernel.schedule.head_dim_v // (32 if kernel.schedule.head_dim_v % 64 else 64)
    assert code.count("UTMASTG") == kernel.schedule.query_tiles * copies
    assert code.count("LDGSTS") == 0
    # The LSE, and zeros of rows without keys.
    assert code.count("STG") <= 2 * kernel.schedule.query_tiles
    asks = kernel.schedule.tile_order == "dynamic"
    assert code.count("UGETNEXTWORKID") == asks


def test_a_profiler_shows_the_name_that_explain_gives(kernel: Kernel) -> None:
    name = dispatch.Decision(PROBLEM, "fa4", kernel.spec).kernel_name
    assert name is not None
    assert kernel.code.name.startswith(f"{name}_")

"""What the compiler makes of the one-kernel Hopper backward, read from its machine code.

As `tests.test_kernel_code` for the forward kernels: neither spills nor matrix products that the
assembler has put one after another would show in results. Needs no GPU; the first run compiles.
"""

import dataclasses
import itertools
from typing import Any

import pytest

from fa4.compiler import KernelSpec
from fa4.kernels.features import HEAD_DIM_CLASSES, BackwardFeatures, FinishFeatures, PrepareFeatures
from fa4.pipelines.sm90_backward import OneKernelSchedule, PrepareSchedule, one_kernel_schedules
from tests import sass
from tests.sass import Code, Instruction

ENTRY = "fa4.kernels.sm90.backward:compile_backward"
PREPARE_ENTRY = "fa4.kernels.backward_prepare:compile_prepare"
FINISH_ENTRY = "fa4.kernels.backward_finish:compile_finish"
HEAD_DIMS = (64, 96, 128)

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
# Schedules that the rule does not choose.
NARROW: dict[str, Any] = {"tile_m": 64}  # at d64
MANY_STAGES: dict[str, Any] = {"tile_m": 64, "stages": 5, "grad_stages": 4}


def features(head_dim: int, head_dim_v: int, options: dict[str, Any]) -> BackwardFeatures:
    return BackwardFeatures(
        **{"dtype": "bf16", "head_dim": head_dim, "head_dim_v": head_dim_v, **options}
    )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A specialisation and its code."""

    features: BackwardFeatures
    schedule: OneKernelSchedule
    code: Code

    @property
    def loop(self) -> list[Instruction]:
        """The only loop with matrix products."""
        (loop,) = self.code.loops_with("HGMMA")
        return loop

    @property
    def has_block_of_hidden_keys(self) -> bool:
        """Whether a tile may begin with 64 rows that do not see the last 64 keys."""
        return self.features.has_right_bound and self.schedule.tile_m == 64


USUAL = [
    *((features(dim, dim, options), {}) for dim in HEAD_DIMS for options in (FULL, CAUSAL)),
    *((features(dim, dim, HEAVIEST), {}) for dim in (64, 128)),
    (features(64, 64, CAUSAL), NARROW),
    (features(64, 64, CAUSAL), MANY_STAGES),
]
REST = [
    *(
        (features(dim, dim_v, options), {})
        for dim, dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS)
        for options in (FULL, CAUSAL, HEAVIEST)
        if (features(dim, dim_v, options), {}) not in USUAL
    ),
    (features(64, 64, {"has_left_bound": True, "has_right_bound": True}), {}),
    (features(64, 64, {**HEAVIEST, "score": "plain"}), {}),
]


def identify(case: tuple[BackwardFeatures, dict[str, Any]]) -> str:
    return "_".join([case[0].name, *(f"{name}={value}" for name, value in case[1].items())])


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(each, id=identify(each)) for each in USUAL),
        *(pytest.param(each, id=identify(each), marks=pytest.mark.slow) for each in REST),
    ],
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    wanted, fields = request.param
    schedule = dataclasses.replace(one_kernel_schedules(wanted).gradients, **fields)
    return Kernel(wanted, schedule, sass.code_of(KernelSpec(ENTRY, "sm_90a", wanted, schedule)))


def test_no_register_is_spilled(kernel: Kernel) -> None:
    assert kernel.code.count("STL") == kernel.code.count("LDL") == 0


def test_matrix_products_of_a_block_are_one_instruction_for_each_step_of_16(
    kernel: Kernel,
) -> None:
    schedule = kernel.schedule
    tile_m, tile_n = schedule.tile_m, schedule.tile_n
    head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
    # One step more adds -lse, but with softcap, and one adds -delta.
    s = [f"64x{tile_m}x16"] * (head_dim // 16 + (kernel.features.score == "plain"))
    dp = [f"64x{tile_m}x16"] * (head_dim_v // 16 + 1)
    dq = [f"64x{schedule.dq_columns}x16"] * (tile_n // 16)
    dv_and_dk = [
        *[f"64x{head_dim_v}x16"] * (tile_m // 16),
        *[f"64x{head_dim}x16"] * (tile_m // 16),
    ]
    is_early = tile_m == 64
    expected = [*dq, *(s if is_early else ()), *dv_and_dk, *(() if is_early else s), *dp]
    assert [i.opcode.split(".")[1] for i in kernel.loop if i.is_a("HGMMA")] == expected
    # S and dP of the first block before the loop; behind it the last one without those of a next
    # one, and its dQ by warpgroup 0.
    around = [*s, *dp, *dq, *dv_and_dk, *dq]
    if kernel.has_block_of_hidden_keys:
        around += [*dq, *s, *dp]
    assert kernel.code.count("HGMMA") == len(expected) + len(around)


def test_matrix_products_stay_in_flight_until_the_kernel_waits(kernel: Kernel) -> None:
    """ptxas puts a wait behind each wgmma when it serialises them."""
    wait = "WARPGROUP.DEPBAR"
    order = [
        i.opcode.split(".")[1] if i.is_a("HGMMA") else i.operands.split(",")[-1].strip()
        for i in kernel.loop
        if i.is_a("HGMMA") or i.is_a(wait)
    ]
    waits = [depth for depth in order if depth in ("0x0", "0x1", "0x2", "0x3")]
    # For dQ; for dV, and S or dK; for all but dP, and S where it comes last; for all.
    if kernel.schedule.tile_m == 64:
        assert waits == ["0x3", "0x1", "0x1", "0x0"]
    else:
        assert waits == ["0x2", "0x1", "0x2", "0x0"]
    # For S and dP of the first block; for dQ and everything of the last one, and dQ of that.
    around = 1 + 2 + 1
    if kernel.has_block_of_hidden_keys:
        # For its dQ, for all but dP, for all.
        around += 3
    assert kernel.code.count(wait) == len(waits) + around


def test_scores_take_one_exponential_each_and_no_shuffle(kernel: Kernel) -> None:
    """Softcap another one for its tanh."""
    each = kernel.schedule.tile_m // 2
    has_softcap = kernel.features.score == "softcap"
    assert sass.count(kernel.loop, "MUFU.EX2") == each * (1 + has_softcap)
    assert sass.count(kernel.loop, "MUFU.LG2") == 0
    assert sass.count(kernel.loop, "SHFL") == 0


def test_threads_read_no_statistics_and_write_ds_by_the_widest_accesses(kernel: Kernel) -> None:
    """With softcap they read the LSE: a load for the four columns that a thread has of sixteen."""
    groups = kernel.schedule.tile_m // 16
    loads = groups * (kernel.features.score == "softcap")
    assert sass.count(kernel.loop, "LDS.128") == sass.count(kernel.loop, "LDS") == loads
    assert sass.count(kernel.loop, "STSM.16.M88.4") == sass.count(kernel.loop, "STSM") == groups


def test_a_threads_addresses_are_shifts_and_masks_of_its_number(kernel: Kernel) -> None:
    """Worked out again in each block, in a few instructions as long as nobody divides by a sign.

    Quotients of a number that might be negative took 80 more, with byte permutations among them.
    """
    assert sass.count(kernel.loop, "PRMT") == 0
    integer = ("IMAD", "LOP3", "SHF", "LEA", "IADD3", "VIADD")
    assert sum(sass.count(kernel.loop, opcode) for opcode in integer) <= 64


def test_dq_leaves_in_pieces_of_16_bytes_and_warpgroups_take_turns_once_a_block(
    kernel: Kernel,
) -> None:
    additions = [i.opcode for i in kernel.loop if i.is_a("REDG")]
    # At d96 the warpgroups' columns overlap: two branches, one of which has what is added once.
    assert len(additions) == kernel.schedule.dq_columns // 8
    assert all("F32x4" in opcode for opcode in additions)
    # The turn is waited for, and given; warpgroup 0 waits for all its warps.
    assert sass.count(kernel.loop, "BAR") == 3


def test_two_warpgroups_share_the_register_file(kernel: Kernel) -> None:
    assert kernel.schedule.threads == 256
    assert kernel.code.count("USETMAXREG") == 0
    assert kernel.code.registers <= 255


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tile_m": 96}, "tile_m=96 is not 64 or 128"),
        ({"stages": 2}, "stages=2 is below 3"),
        ({"stages": 6}, "shared memory .* exceeds"),
        ({"tile_m": 128}, "need about 348 registers, more than 255"),
        ({"grad_stages": 2}, "grad_stages=2 is below 3"),
    ],
)
def test_schedules_that_cannot_run_are_refused(fields: dict[str, Any], reason: str) -> None:
    schedule = one_kernel_schedules(features(128, 128, FULL)).gradients
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(schedule, **fields)


def test_wider_heads_than_a_warpgroup_can_keep_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim_v=192: each must be at most 128"):
        one_kernel_schedules(features(128, 192, FULL))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_finishing_reads_and_writes_16_bytes_at_once(head_dim: int) -> None:
    wanted = FinishFeatures("bf16", head_dim, has_right_bound=True)
    schedule = one_kernel_schedules(features(head_dim, head_dim, CAUSAL)).finish
    code = sass.code_of(KernelSpec(FINISH_ENTRY, "sm_90a", wanted, schedule))
    assert code.count("STL") == code.count("LDL") == 0
    for kind in ("LDG", "STG"):
        accesses = [i.opcode for i in code.instructions if i.is_a(kind)]
        assert accesses
        assert all(".128" in opcode for opcode in accesses)


@pytest.mark.parametrize("for_sums", [False, True])
@pytest.mark.parametrize("head_dim_v", HEAD_DIM_CLASSES)
def test_preparing_reads_and_writes_16_bytes_at_once(head_dim_v: int, for_sums: bool) -> None:
    """All but a row's LSE, and the LSE, the delta and the counter that it writes."""
    wanted = PrepareFeatures("bf16", head_dim_v, has_grad_lse=False, has_right_bound=True)
    schedule = PrepareSchedule(head_dim_v, 64, for_sums=for_sums)
    code = sass.code_of(KernelSpec(PREPARE_ENTRY, "sm_90a", wanted, schedule))
    assert code.count("STL") == code.count("LDL") == 0
    for kind, narrow in (("LDG", 1), ("STG", 2 + for_sums)):
        accesses = [i.opcode for i in code.instructions if i.is_a(kind)]
        assert sum(".128" not in opcode for opcode in accesses) == narrow
        assert len(accesses) > narrow or (kind == "STG" and not for_sums)
    # All rows are asked for before any is added up.
    order = [i for i in code.instructions if i.is_a("LDG") or i.is_a("SHFL")]
    rows = [i for i in order if ".128" in i.opcode]
    assert len(rows) == 2 * schedule.steps
    first_sum = next(at for at, i in enumerate(order) if i.is_a("SHFL"))
    assert all(i in order[:first_sum] for i in rows)

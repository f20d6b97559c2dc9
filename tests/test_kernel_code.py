"""What the compiler makes of the kernels, read from their machine code; needs no GPU.

A kernel that spills, or whose matrix products the assembler has put one after another because it
could not prove its registers free, still gives right results: only its code shows it.

The first run compiles (about 3 s a kernel); later ones find the kernels in fa4's cache. The tests
marked `slow` complete the matrix of head dims.
"""

import ast
import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fa4 import compiler, dispatch, dsl_runtime
from fa4.compiler import KernelSpec
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule
from fa4.problem import AttentionProblem
from tests import sass
from tests.sass import Code, Instruction
from tests.test_attention import KERNEL_ARGUMENTS, TENSOR_NAMES

ENTRY = "fa4.kernels.sm90.forward:compile_forward"

FULL: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"has_right_bound": True}
# Everything at once: the most that has to be kept in registers.
HEAVIEST: dict[str, Any] = {
    "dtype": "fp16",
    "has_left_bound": True,
    "has_right_bound": True,
    "score": "softcap",
    "sink_dtype": "bf16",
    "packed_q": True,
    "packed_k": True,
    "has_seqused_q": True,
    "has_seqused_k": True,
}


def features(head_dim: int, head_dim_v: int, options: dict[str, Any]) -> ForwardFeatures:
    return ForwardFeatures(
        **{"dtype": "bf16", "head_dim": head_dim, "head_dim_v": head_dim_v, **options}
    )


# Compiled in every run: equal head dims, the pair that latent attention uses, the two extremes, and
# each feature by itself.
USUAL = [
    *(
        features(dim, dim_v, options)
        for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
        for options in (FULL, CAUSAL, HEAVIEST)
    ),
    features(64, 256, HEAVIEST),
    features(256, 64, HEAVIEST),
    features(128, 128, {"has_left_bound": True, "score": "scaled"}),
    features(64, 64, {"dtype": "fp16", "has_left_bound": True, "has_right_bound": True}),
    features(128, 128, {"dtype": "fp16", "sink_dtype": "fp32", "has_seqused_k": True}),
]
REST = [
    specialisation
    for dim, dim_v in itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES)
    for options in (FULL, CAUSAL, HEAVIEST)
    if (specialisation := features(dim, dim_v, options)) not in USUAL
]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A specialisation and its code."""

    spec: KernelSpec
    features: ForwardFeatures
    schedule: ForwardSchedule
    code: Code

    @property
    def num_block_loops(self) -> int:
        """Loops over key blocks: by online softmax, with masks; whole blocks; the left edge."""
        return 2 + self.features.has_left_bound

    @property
    def block_loops(self) -> list[list[Instruction]]:
        return self.code.loops_with("HGMMA")


def spec_of(wanted: ForwardFeatures) -> KernelSpec:
    return KernelSpec(ENTRY, "sm_90a", wanted, forward_schedule(wanted))


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(each, id=each.name) for each in USUAL),
        *(pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in REST),
    ],
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    wanted: ForwardFeatures = request.param
    spec = spec_of(wanted)
    schedule = forward_schedule(wanted)
    return Kernel(spec, wanted, schedule, sass.code_of(spec))


# -- every kernel --------------------------------------------------------------------------------


def test_no_register_is_spilled(kernel: Kernel) -> None:
    in_loops = [
        str(instruction)
        for loop in kernel.block_loops
        for instruction in loop
        if instruction.is_a("STL") or instruction.is_a("LDL")
    ]
    assert not in_loops, f"{len(in_loops)} spills in loops over key blocks"
    assert kernel.code.count("STL") == kernel.code.count("LDL") == 0


def test_matrix_products_of_a_block_are_one_instruction_for_each_step_of_16(
    kernel: Kernel,
) -> None:
    schedule = kernel.schedule
    assert len(kernel.block_loops) == kernel.num_block_loops
    qk, pv = schedule.head_dim // 16, schedule.tile_n // 16
    for loop in kernel.block_loops:
        shapes = [i.opcode.split(".")[1] for i in loop if i.is_a("HGMMA")]
        expected = [f"64x{schedule.tile_n}x16"] * qk + [f"64x{schedule.head_dim_v}x16"] * pv
        assert shapes == expected
    # Q K^T of the first block is in front of the loops, P V of the last one behind them.
    total = (kernel.num_block_loops + 1) * (qk + pv)
    if schedule.short_n:
        # And Q K^T of a short one, whose P V is issued behind Q K^T of a whole one.
        total += qk + qk + schedule.short_n // 16
        short = [i for i in kernel.code.instructions if i.is_a(f"HGMMA.64x{schedule.short_n}x16")]
        assert len(short) >= qk
    assert kernel.code.count("HGMMA") == total


def test_matrix_products_stay_in_flight_until_the_kernel_waits(kernel: Kernel) -> None:
    """ptxas puts a wait behind each wgmma when it serialises them."""
    wait = "WARPGROUP.DEPBAR"
    for loop in kernel.block_loops:
        order = [i.opcode.split(".")[0] for i in loop if i.is_a("HGMMA") or i.is_a(wait)]
        assert [key for key, _ in itertools.groupby(order)] == ["HGMMA", "WARPGROUP"]
        # First for Q K^T, with one product still in flight, then for P V.
        depths = [i.operands.split(",")[-1].strip() for i in loop if i.is_a(wait)]
        assert depths == ["0x1", "0x0"]
    around_short = 3 if kernel.schedule.short_n else 0
    assert kernel.code.count(wait) == 2 * (kernel.num_block_loops + 1) + around_short


@pytest.mark.parametrize("lengths", [{}, {"packed_q": True, "packed_k": True}], ids=str)
@pytest.mark.parametrize("right", [False, True], ids=["full", "causal"])
def test_values_are_waited_for_behind_most_exponentials_of_d128(
    right: bool, lengths: dict[str, bool]
) -> None:
    """On an H200 the kernel is 1.5 to 2 % slower with a wait behind 13 or all 64 than behind 55.

    Where ptxas puts it hangs on things far away (docs/results/notes.md): look here first when
    a change of the kernel, or of the compiler, costs a few per cent.
    """
    wanted = ForwardFeatures("bf16", 128, 128, has_right_bound=right, **lengths)
    loops = sass.code_of(spec_of(wanted)).loops_with("HGMMA")
    (whole,) = [loop for loop in loops if sass.count(loop, "MUFU.LG2")]  # raises references
    *_, last_wait = [i for i, each in enumerate(whole) if each.is_a("WARPGROUP.DEPBAR")]
    assert 45 <= sass.count(whole[:last_wait], "MUFU.EX2") <= 60


def test_scores_take_one_exponential_each(kernel: Kernel) -> None:
    """And one a row for rescaling, or for raising the reference.

    Softcap takes another one for its tanh, a sink two a row.
    """
    schedule = kernel.schedule
    of_score = 2 if kernel.features.score == "softcap" else 1
    each = schedule.tile_n // 2 * of_score
    for loop in kernel.block_loops:
        assert sass.count(loop, "MUFU.EX2") == each + 2
    loops = kernel.num_block_loops
    sinks = 0 if kernel.features.sink_dtype is None else 4
    around_short = each + 2 + schedule.short_n // 2 * of_score if schedule.short_n else 0
    assert kernel.code.count("MUFU.EX2") == (loops + 1) * each + 2 * loops + sinks + around_short


def test_registers_move_between_the_roles_as_scheduled(kernel: Kernel) -> None:
    schedule = kernel.schedule
    moves = {
        i.opcode.split(".")[1]: int(i.operands.split(",")[-1], 16)
        for i in kernel.code.instructions
        if i.is_a("USETMAXREG")
    }
    assert kernel.code.count("USETMAXREG") == 2
    assert moves == {
        "DEALLOC": schedule.producer_registers,
        "TRY_ALLOC": schedule.consumer_registers,
    }
    # What is moved is what the CTA got: the register file over its threads, in steps of 8.
    assert kernel.code.registers == 65_536 // schedule.threads // 8 * 8


def test_tiles_are_moved_by_tma_alone(kernel: Kernel) -> None:
    code = kernel.code
    # Q for each warpgroup, and K and V in two places each: in the loop and around it.
    assert code.count("UTMALDG") >= kernel.schedule.consumer_warpgroups + 4
    assert code.count("UTMASTG") >= 1
    assert code.count("LDGSTS") == 0
    # Lengths, the sink and the LSE are all that threads load and store by themselves.
    assert code.count("STG") <= 2


def test_a_profiler_shows_the_name_that_explain_gives(kernel: Kernel) -> None:
    name = dispatch.Decision(PROBLEM, "fa4", kernel.spec).kernel_name
    assert name is not None
    assert kernel.code.name.startswith(f"{name}_")


PROBLEM = AttentionProblem(
    dtype="bf16",
    batch=1,
    seqlen_q=1,
    seqlen_k=1,
    heads_q=1,
    heads_kv=1,
    head_dim=8,
    head_dim_v=8,
    softmax_scale=1.0,
)


# -- the compiled function -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [CAUSAL, HEAVIEST], ids=["dense", "everything"])
def test_c65_the_compiled_function_takes_what_a_launch_passes(options: dict[str, Any]) -> None:
    """Its signature is in its refusal of too few arguments."""
    wanted = features(64, 64, options)
    function: Callable[..., Any] = compiler.get_kernel(spec_of(wanted))
    with pytest.raises(TypeError, match="Expects 19 parameters") as refusal:
        function()
    signature = re.search(r"`\w+\((.*)\)`", str(refusal.value))
    assert signature is not None
    parameters = dict(parameter.split(": ") for parameter in re.split(r", (?=\w+: )", signature[1]))
    assert tuple(TENSOR_NAMES.get(name, name) for name in parameters) == KERNEL_ARGUMENTS
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    modes_q, modes_k = 4 - wanted.packed_q, 4 - wanted.packed_k
    expected = {
        "mQ": (dtypes[wanted.dtype], modes_q),
        "mK": (dtypes[wanted.dtype], modes_k),
        "mV": (dtypes[wanted.dtype], modes_k),
        "mO": (dtypes[wanted.dtype], modes_q),
        "mLSE": ("float32", modes_q - 1),
        "mCuQ": ("int32", 1) if wanted.packed_q else None,
        "mCuK": ("int32", 1) if wanted.packed_k else None,
        "mUsedQ": ("int32", 1) if wanted.has_seqused_q else None,
        "mUsedK": ("int32", 1) if wanted.has_seqused_k else None,
        "mSink": None if wanted.sink_dtype is None else (dtypes[wanted.sink_dtype], 1),
        "mCounter": ("int32", 1),
    }
    for name, contract in expected.items():
        if contract is None:
            assert parameters[name] == "None"
            continue
        # Every extent has a name of its own: no size is compiled in. The counter is one word.
        extents, dtype = re.fullmatch(r"Tensor\(\[(.*)\], (\w+)\)", parameters[name]).groups()
        assert (dtype, len(extents.split(", "))) == contract
        assert re.fullmatch("1" if name == "mCounter" else r"n\d+(, n\d+)*", extents)
    scalars = [parameters[name] for name in KERNEL_ARGUMENTS[10:-1]]
    assert scalars == ["float32"] * 2 + ["int32"] * 6
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(*example_arguments(wanted))


def example_arguments(wanted: ForwardFeatures) -> list[Any]:
    """Arguments that fit a specialisation in everything but the device."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[wanted.dtype]
    modes_q, modes_k = 4 - wanted.packed_q, 4 - wanted.packed_k
    q = torch.zeros((1,) * (modes_q - 1) + (64,), dtype=dtype)
    k = torch.zeros((1,) * (modes_k - 1) + (64,), dtype=dtype)
    lengths = [
        torch.zeros(entries, dtype=torch.int32) if is_given else None
        for entries, is_given in (
            (2, wanted.packed_q),
            (2, wanted.packed_k),
            (1, wanted.has_seqused_q),
            (1, wanted.has_seqused_k),
        )
    ]
    sink = None if wanted.sink_dtype is None else torch.zeros(1, dtype=torch.bfloat16)
    lse = torch.zeros((1,) * (modes_q - 1))
    counter = torch.zeros(1, dtype=torch.int32)
    return [q, k, k, q, lse, *lengths, sink, 1.0, 0.0, 0, 0, 1, 1, 1, 1, counter]


# -- reading machine code ------------------------------------------------------------------------

LISTING = """
\t.section\t.text.example,"ax",@progbits
example:
.text.example:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
.L_x_2:
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_x_0) ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   NANOSLEEP 0x64 ;
        /*00a0*/              @!P0 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
.L_x_5:
"""


def test_loops_are_those_of_the_flow_and_not_of_addresses() -> None:
    """The piece at .L_x_3 lies behind EXIT and jumps back over it; STL is in no loop."""
    code = sass.parse(LISTING, registers=168)
    assert (code.name, code.registers, len(code.instructions)) == ("example", 168, 13)
    addresses = sorted(sorted(code.instructions[i].address for i in loop) for loop in code.loops)
    assert addresses == [
        [*range(0x10, 0x70, 0x10), 0x90, 0xA0, 0xB0],
        [0x40, 0x50],
        [0x90, 0xA0],
    ]
    (innermost,) = code.loops_with("HGMMA")
    assert sass.count(innermost, "MUFU.EX2") == 1
    assert sass.count(innermost, "STL") == 0
    assert [len(loop) for loop in code.loops_with("MUFU")] == [2]


def test_instructions_are_matched_modifier_by_modifier() -> None:
    code = sass.parse(LISTING, registers=168)
    assert code.count("MUFU") == code.count("MUFU.EX2") == 1
    assert code.count("MUFU.EX") == code.count("MUF") == 0
    branch = code.instructions[2]
    assert (branch.predicate, branch.opcode, branch.target) == ("@!P0", "BRA", ".L_x_3")


def test_what_is_no_single_kernel_is_refused() -> None:
    with pytest.raises(AssertionError, match="not one"):
        sass.cubin_in(b"no program in here")
    with pytest.raises(AssertionError, match="not one"):
        sass.parse(LISTING + LISTING, registers=168)


# -- shared memory -------------------------------------------------------------------------------


Ranges = list[tuple[int, int]]


class TracedFarEnoughError(Exception):
    """The shared memory of a kernel is laid out; the rest need not be traced."""


def slabs_of(wanted: ForwardFeatures, monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """First and last element of each warpgroup's slab of O in the buffers of V.

    From the layout of the kernel itself, caught where it makes it.
    """
    from fa4.kernels.sm90 import forward

    schedule = forward_schedule(wanted)
    slabs: Ranges = []
    with_slabs = forward.HopperForward.with_slabs

    def caught(self: Any, layout: Any, slab: int) -> Any:
        result = with_slabs(self, layout, slab)
        slabs.extend(ends_of(str(result), w) for w in range(schedule.consumer_warpgroups))
        raise TracedFarEnoughError

    monkeypatch.setattr(forward.HopperForward, "with_slabs", caught)
    with pytest.raises(TracedFarEnoughError):
        forward.compile_forward(wanted, schedule, "sm_90a")
    return slabs


def ends_of(layout: str, warpgroup: int) -> tuple[int, int]:
    """The first and the last offset of a static layout ((rows), (dims), (1, warpgroups)).

    Also checks that no two elements have one offset and that there is no gap.
    """
    shape, stride = (ast.literal_eval(part) for part in layout.split(":"))
    assert shape[2][0] == 1
    offsets = [
        sum(index * step for index, step in zip(indices, (*stride[0], *stride[1]), strict=True))
        for indices in itertools.product(*map(range, (*shape[0], *shape[1])))
    ]
    assert len(set(offsets)) == len(offsets) == max(offsets) + 1
    start = warpgroup * stride[2][1]
    return start, start + max(offsets)


SHARING = [
    (head_dim, head_dim_v)
    for head_dim, head_dim_v in itertools.product(HEAD_DIM_CLASSES, HEAD_DIM_CLASSES)
    if forward_schedule(features(head_dim, head_dim_v, FULL)).o_shares_v
]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), SHARING)
def test_output_lies_in_a_stage_of_values_for_each_warpgroup(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, head_dim_v: int
) -> None:
    """One warpgroup's output is stored while another still writes its own."""
    dsl_runtime.import_dsl("sm_90a")
    wanted = features(head_dim, head_dim_v, FULL)
    schedule = forward_schedule(wanted)
    stage = schedule.tile_n * head_dim_v
    for w, slab in enumerate(slabs_of(wanted, monkeypatch)):
        assert slab == (w * stage, w * stage + 64 * head_dim_v - 1)
        assert slab[1] < (w + 1) * stage
    # TMA and wgmma permute bytes inside 1024 of them, which must be the slab's own.
    assert stage * 2 % 1024 == 0

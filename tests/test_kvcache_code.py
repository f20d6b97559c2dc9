"""What the compiler makes of the kernels behind attention over a cache; needs no GPU.

See tests/test_kernel_code.py.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from fa4 import compiler
from fa4.compiler import KernelSpec
from fa4.kernels import combine
from fa4.kernels.features import AppendFeatures, DecodeFeatures
from fa4.pipelines.sm90_decode import DecodeNumbers, DecodeSchedule, decode_plan
from tests import sass
from tests.sass import Code
from tests.test_kvcache_launch import KERNEL_ARGUMENTS

HEAVIEST = {
    "has_left_bound": True,
    "has_right_bound": True,
    "score": "softcap",
    "sink_dtype": "bf16",
    "packed_q": True,
    "packed_new": True,
    "has_leftpad": True,
    "addressing": "page_table",
}
PAGES = {"addressing": "page_table"}
# What the kernel calls its tensors.
TENSOR_NAMES = {
    "mQ": "q",
    "mK": "k_cache",
    "mV": "v_cache",
    "mO": "out",
    "mLSE": "lse",
    "mPartial": "partial",
    "mCounters": "counters",
    "mCuQ": "cu_seqlens_q",
    "mLengths": "cache_seqlens",
    "mCuNew": "cu_seqlens_k_new",
    "mLeftpad": "leftpad",
    "mTable": "table",
    "mSink": "sink",
}


def spec_of(
    head_dim: int,
    options: dict,
    packed_rows: int,
    page_size: int | None,
    num_splits: int = 0,
    tiles: int = 64,
    has_equal_lengths: bool = False,
    capacity: int = 8192,
) -> KernelSpec:
    features = DecodeFeatures("bf16", head_dim, head_dim, **options)
    problem = (packed_rows, tiles, page_size, num_splits)
    plan = decode_plan(features, *problem, 132, capacity, has_equal_lengths)
    return KernelSpec("fa4.kernels.sm90.decode:compile_decode", "sm_90a", features, plan.schedule)


SPECS = {
    "decode": spec_of(128, {}, 4, None),
    "whole_tiles": spec_of(128, {}, 4, None, tiles=256, has_equal_lengths=True),
    "long": spec_of(128, {}, 4, None, tiles=8, has_equal_lengths=True, capacity=65536),
    "two_ctas": spec_of(128, {}, 4, None, tiles=256),
    "two_ctas_pages_of_64": spec_of(128, PAGES, 4, 64, tiles=256),
    "two_ctas_pages_of_1": spec_of(128, PAGES, 4, 1, tiles=256),
    "pages_of_16": spec_of(128, PAGES, 4, 16),
    "pages_of_1": spec_of(128, PAGES, 4, 1),
    "fixed_splits": spec_of(64, PAGES, 4, 64, num_splits=3),
    "chunk": spec_of(128, {**PAGES, "has_right_bound": True}, 4096, 64),
    "chunk_merging": spec_of(256, {**PAGES, "has_right_bound": True}, 4096, 16, num_splits=3),
    "heaviest_tma": spec_of(256, HEAVIEST, 4096, 16),
    "heaviest_tma_merging": spec_of(256, HEAVIEST, 4096, 16, num_splits=3),
    "heaviest_tma_shared": spec_of(256, HEAVIEST, 100, 16),
    "heaviest_gather": spec_of(256, HEAVIEST, 4096, 1),
    "heaviest_merging": spec_of(256, HEAVIEST, 4096, 1, num_splits=3),
    "heaviest_shared": spec_of(256, HEAVIEST, 4, 1),
    "aligned_to_8": spec_of(128, {"cache_align": 8}, 4, None),
    "aligned_to_4": spec_of(128, {**PAGES, "cache_align": 4}, 4, 64, tiles=256),
    "aligned_to_2": spec_of(128, {"cache_align": 2, "q_align": 2}, 4, None),
    "aligned_to_2_two_ctas": spec_of(128, {**PAGES, "cache_align": 2}, 4, 64, tiles=256),
    "heaviest_aligned_to_2": spec_of(256, {**HEAVIEST, "cache_align": 2}, 4096, 1),
}


@functools.cache
def code_of(spec: KernelSpec) -> Code:
    """The program of a specialisation, which holds one kernel."""
    path = compiler.compile_kernel(spec).path
    assert path is not None, f"{spec.name} could not be stored, so it cannot be read back"
    listing = sass.disassemble(sass.cubin_in(path.read_bytes()))
    (section,) = re.split(r"(?m)^(?=\s*\.section\s+\.text\.)", listing)[1:]
    return sass.parse(section, registers=0)


@pytest.fixture(scope="module", params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> KernelSpec:
    return SPECS[request.param]


def schedule_of(spec: KernelSpec) -> DecodeSchedule:
    assert isinstance(spec.schedule, DecodeSchedule)
    return spec.schedule


def test_the_compiled_function_takes_what_a_launch_passes() -> None:
    """Its signature is in its refusal of too few arguments."""
    function: Callable[..., Any] = compiler.get_kernel(SPECS["fixed_splits"])
    with pytest.raises(TypeError, match=f"Expects {len(KERNEL_ARGUMENTS)} parameters") as refusal:
        function()
    signature = re.search(r"`\w+\((.*)\)`", str(refusal.value))
    assert signature is not None
    parameters = dict(parameter.split(": ") for parameter in re.split(r", (?=\w+: )", signature[1]))
    assert [TENSOR_NAMES.get(name, name) for name in parameters] == list(KERNEL_ARGUMENTS)
    types = ["float32"] * 2 + ["int32"] * (len(DecodeNumbers._fields) - 2)
    assert parameters["numbers"] == f"Tuple[{', '.join(types)}]"
    assert DecodeNumbers._fields[:2] == ("softmax_scale", "softcap")
    for name in ("mCuQ", "mCuNew", "mLeftpad", "mSink"):
        assert parameters[name] == "None"


def test_no_register_is_spilled(spec: KernelSpec) -> None:
    code = code_of(spec)
    assert code.count("STL") == code.count("LDL") == 0


def test_matrix_products_stay_in_flight_until_the_kernel_waits(spec: KernelSpec) -> None:
    """ptxas puts a wait behind each wgmma when it serialises them."""
    code = code_of(spec)
    schedule = schedule_of(spec)
    loops = code.loops_with("HGMMA")
    features = spec.features
    assert isinstance(features, DecodeFeatures)
    has_front = features.has_left_bound or features.has_leftpad
    assert len(loops) == 1 + features.has_right_bound + has_front
    per_block = schedule.head_dim // 16 + schedule.tile_n // 16
    wait = "WARPGROUP.DEPBAR"
    for loop in loops:
        assert sass.count(loop, "HGMMA") == per_block
        order = [i.opcode.split(".")[0] for i in loop if i.is_a("HGMMA") or i.is_a(wait)]
        assert [key for key, _ in itertools.groupby(order)] == ["HGMMA", "WARPGROUP"]
        depths = [i.operands.split(",")[-1].strip() for i in loop if i.is_a(wait)]
        assert depths == ["0x1", "0x0"]
    assert code.count(wait) == 2 * (len(loops) + 1)


def test_keys_come_by_tma_or_by_copies_as_wide_as_they_are_aligned(spec: KernelSpec) -> None:
    """Through registers only where not even 4 bytes can be copied at once."""
    code = code_of(spec)
    features = spec.features
    assert isinstance(features, DecodeFeatures)
    copies = {
        16: "LDGSTS.E.BYPASS.128",
        8: "LDGSTS.E.64",
        4: "LDGSTS.E",
        2: "LDG.E.U16",
    }
    wanted = "UTMALDG" if schedule_of(spec).copy_rows else copies[features.cache_align]
    found = [i.opcode for i in code.instructions if i.is_a("UTMALDG") or i.is_a("LDGSTS")]
    if features.cache_align == 2:
        assert not found
        assert code.count(wanted) > 0
    else:
        assert found
        assert all(opcode.startswith(wanted) for opcode in found)


def test_parts_are_counted_exactly_where_tiles_may_be_split(spec: KernelSpec) -> None:
    assert code_of(spec).count("ATOMG") == int(schedule_of(spec).merges)


def test_a_row_is_merged_with_the_outputs_and_lses_of_many_parts_in_flight_together(
    spec: KernelSpec,
) -> None:
    """Behind the count of parts, before anything waits for the first of their LSEs.

    By loads that see what other CTAs have written: none through the path for constants.
    """
    if not schedule_of(spec).merges:
        return
    instructions = code_of(spec).instructions
    count = next(i for i, one in enumerate(instructions) if one.is_a("ATOMG"))
    behind = instructions[count:]
    arrives = next(i for i, one in enumerate(behind) if one.is_a("SHFL"))
    vectors = [one for one in behind[:arrives] if one.opcode == "LDG.E.128"]
    chunks = -(-schedule_of(spec).head_dim_v // (32 * combine.VECTOR))
    assert len(vectors) == combine.HELD // chunks * chunks


def test_appending_moves_16_bytes_at_a_time() -> None:
    features = AppendFeatures("bf16", "half", "bf16", q_advances=True, addressing="page_table")
    spec = KernelSpec("fa4.kernels.append_kv:compile_append", "sm_90a", features, None)
    code = sass.code_of(spec)
    assert code.count("STL") == code.count("LDL") == 0
    stores = [i for i in code.instructions if i.is_a("STG")]
    assert stores
    assert all(i.opcode.endswith("128") for i in stores)

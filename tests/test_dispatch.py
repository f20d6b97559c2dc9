"""Which kernel answers a problem: a pure function of problem and architecture, total and explained.

Nothing here compiles; that what is promised can be compiled is shown by tests/test_kernel_code.py.
"""

import dataclasses
import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa4
from fa4 import dispatch
from fa4.dispatch import (
    CAPABILITIES,
    Decision,
    FallbackWarning,
    architecture_of,
    decide,
    features_of,
    num_tiles,
    support_table,
)
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures, head_dim_class
from fa4.pipelines import sm90, sm100
from fa4.problem import MAX_ROWS, AttentionProblem

ARCHS = (None, "sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_120a")
KERNELS = {"sm_90a": sm90, "sm_100a": sm100, "sm_103a": sm100}  # where their schedules are
SUPPORTED = "9.0 (Hopper), 10.0 (Blackwell), 10.3 (Blackwell Ultra)"

# Answered on Hopper; tests change what they are about.
PLAIN = AttentionProblem(
    dtype="bf16",
    batch=2,
    seqlen_q=300,
    seqlen_k=500,
    heads_q=4,
    heads_kv=2,
    head_dim=128,
    head_dim_v=128,
    softmax_scale=0.125,
)

bounds = st.none() | st.integers(0, MAX_ROWS)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    """Any problem that `describe_problem` may give, and most of them not answered by a kernel."""
    heads_kv = draw(st.integers(0, 40))
    return AttentionProblem(
        dtype=draw(st.sampled_from(["bf16", "fp16", "bf16", "fp16", "fp32", "fp64"])),
        batch=draw(st.integers(0, 100_000)),
        seqlen_q=draw(st.integers(0, MAX_ROWS)),
        seqlen_k=draw(st.integers(0, MAX_ROWS)),
        heads_q=heads_kv * draw(st.integers(0, 16)),
        heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 35)) * draw(st.sampled_from([1, 8, 8, 8])),
        head_dim_v=draw(st.integers(1, 35)) * draw(st.sampled_from([1, 8, 8, 8])),
        softmax_scale=draw(st.floats(-10, 10) | st.sampled_from([1e-40, 1e30, -2e30, 1e300])),
        softcap=draw(st.just(0.0) | st.floats(0, 100) | st.sampled_from([1e-300, 4096.0, 1e5])),
        window_left=draw(bounds),
        window_right=draw(bounds),
        sink_dtype=draw(st.sampled_from([None, None, "fp32", "bf16", "fp16", "fp64"])),
        packed_q=draw(st.booleans()),
        packed_k=draw(st.booleans()),
        has_seqused_q=draw(st.booleans()),
        has_seqused_k=draw(st.booleans()),
        needs_grad=draw(st.sampled_from([False, False, False, True])),
        layout_fault=draw(st.sampled_from([None, None, None, "k has stride 2 in its last one"])),
    )


def is_answered(problem: AttentionProblem, arch: str | None) -> bool:
    """Whether docs/support.md promises a kernel; written apart from `dispatch`."""
    rows = problem.seqlen_q if problem.packed_q else problem.seqlen_q * problem.batch
    keys = problem.seqlen_k if problem.packed_k else problem.seqlen_k * problem.batch
    if arch not in KERNELS or rows * problem.heads_q == 0 or keys * problem.heads_kv == 0:
        return False
    dims_fit = all(
        dim % 8 == 0 and 8 <= dim <= 256 for dim in (problem.head_dim, problem.head_dim_v)
    )
    # The most tiles that any tile of 128 to 512 rows makes; problems between the two do not occur.
    tiles = -(-problem.seqlen_q // 128) * problem.batch * problem.heads_q
    if problem.packed_q:
        tiles = (problem.seqlen_q // 128 + problem.batch + 1) * problem.heads_q
    return (
        problem.dtype in ("bf16", "fp16")
        and dims_fit
        and problem.sink_dtype in (None, "bf16", "fp16", "fp32")
        and -1e30 <= problem.softmax_scale <= 1e30
        and (problem.softcap == 0 or 0.001 <= problem.softcap <= 4096)
        and (arch == "sm_90a" or not problem.needs_grad)
        and problem.layout_fault is None
        and tiles <= dispatch.MAX_TILES
    )


# -- total, pure, and what was promised ----------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(problem=problems(), arch=st.sampled_from(ARCHS))
def test_every_problem_gets_a_kernel_or_reasons(
    problem: AttentionProblem, arch: str | None
) -> None:
    decision = decide(problem, arch)
    assert decision.problem is problem
    assert decision == decide(dataclasses.replace(problem), arch)
    if decision.kernel is None:
        assert decision.backend == "reference"
        assert decision.reasons
        assert decision.kernel_name is None
    else:
        assert decision.backend == "fa4"
        assert decision.reasons == ()


@settings(max_examples=400, deadline=None)
@given(problem=problems())
def test_c65_a_kernel_answers_exactly_what_is_documented(problem: AttentionProblem) -> None:
    tiles = [num_tiles(problem, tile_m) for tile_m in (128, 192, 256, 512)]
    if min(tiles) <= dispatch.MAX_TILES < max(tiles):
        return  # depends on the schedule; see the test of MAX_TILES
    for arch in ARCHS:
        assert (decide(problem, arch).kernel is not None) == is_answered(problem, arch)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    problem=problems().filter(lambda problem: is_answered(problem, "sm_100a")),
    arch=st.sampled_from(sorted(KERNELS)),
)
def test_c65_a_kernel_can_do_what_the_problem_asks(problem: AttentionProblem, arch: str) -> None:
    kernel = decide(problem, arch).kernel
    assert kernel is not None
    assert kernel.arch == arch
    features, schedule = kernel.features, kernel.schedule
    assert isinstance(features, ForwardFeatures)
    assert isinstance(schedule, KERNELS[arch].ForwardSchedule)
    for name in ("dtype", "sink_dtype", "packed_q", "packed_k", "has_seqused_q", "has_seqused_k"):
        assert getattr(features, name) == getattr(problem, name)
    for name in ("head_dim", "head_dim_v"):
        fitting = [padded for padded in HEAD_DIM_CLASSES if padded >= getattr(problem, name)]
        assert getattr(features, name) == min(fitting) == getattr(schedule, name)
    assert features.has_left_bound == (problem.window_left is not None)
    assert features.has_right_bound == (problem.window_right is not None)
    assert (features.score == "softcap") == (problem.softcap > 0)
    # With scale <= 0 the largest score is not the largest product, and 0 times -inf is NaN.
    assert features.score != "plain" or problem.softmax_scale >= 1e-30
    if arch == "sm_90a":
        assert schedule == sm90.forward_schedule(features)
    else:
        rows = dispatch.rows_of_a_sequence(problem)
        group = problem.heads_q // problem.heads_kv
        assert schedule == sm100.forward_schedule(features, rows, group, arch)


def test_c65_the_entry_of_a_kernel_exists() -> None:
    """Found without importing it, which would import the DSL."""
    entry = {c.entry for c in CAPABILITIES if c.dtypes}
    assert entry == {
        "fa4.kernels.sm90.forward:compile_forward",
        "fa4.kernels.sm100.forward:compile_forward",
        "fa4.kernels.sm90.decode:compile_decode",
    }
    import importlib.util

    for module, function in (each.split(":") for each in entry):
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        with open(found.origin, encoding="utf-8") as source:
            assert re.search(rf"^def {function}\(", source.read(), re.M)


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({"head_dim": 512}, "sm_100a", "head_dim=512 is not a multiple of 8 up to 256"),
        ({"dtype": "fp32"}, "sm_90a", "dtype fp32 is not one of bf16, fp16"),
        (
            {"head_dim": 192, "needs_grad": True},
            "sm_100a",
            "gradients are asked for and the Blackwell backward is not built yet",
        ),
        # C106
        ({"head_dim": 100}, "sm_90a", "head_dim=100 is not a multiple of 8 up to 256"),
        ({"head_dim_v": 60}, "sm_90a", "head_dim_v=60 is not a multiple of 8 up to 256"),
        ({"head_dim_v": 512}, "sm_90a", "head_dim_v=512 is not a multiple of 8 up to 256"),
        ({"dtype": "fp64"}, "sm_90a", "dtype fp64 is not one of bf16, fp16"),
    ],
)
def test_c65_c106_a_refusal_names_what_came_and_what_is_allowed(
    changes: dict[str, Any], arch: str, reason: str
) -> None:
    assert decide(dataclasses.replace(PLAIN, **changes), arch).reasons == (reason,)


# -- reasons -------------------------------------------------------------------------------------

# What a kernel refuses: the change that makes a problem so, and words of its reason.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp32"}, "dtype fp32"),
    "head_dim": ({"head_dim": 100}, "head_dim=100"),
    "head_dim_v": ({"head_dim_v": 264}, "head_dim_v=264"),
    "sink": ({"sink_dtype": "fp64"}, "fp64 sink"),
    "gradients": ({"needs_grad": True}, "gradients"),
    "layout": ({"layout_fault": "v starts at an odd address"}, "v starts at an odd address"),
}


@pytest.mark.parametrize(
    "faults",
    [faults for size in range(len(FAULTS) + 1) for faults in itertools.combinations(FAULTS, size)],
    ids=lambda faults: "+".join(faults) or "none",
)
def test_each_fault_has_one_reason_and_mending_it_takes_that_away(faults: tuple[str, ...]) -> None:
    changes: dict[str, Any] = {}
    for fault in faults:
        changes |= FAULTS[fault][0]
    reasons = decide(dataclasses.replace(PLAIN, **changes), "sm_100a").reasons
    assert len(reasons) == len(faults)
    for fault, reason in zip(faults, reasons, strict=True):
        assert FAULTS[fault][1] in reason


@settings(max_examples=200, deadline=None)
@given(problem=problems(), arch=st.sampled_from(ARCHS))
def test_a_reason_is_a_part_of_a_sentence(problem: AttentionProblem, arch: str | None) -> None:
    """They are joined by "; " behind a colon."""
    reasons = decide(problem, arch, "a GTX 1080").reasons
    assert len(set(reasons)) == len(reasons)
    for reason in reasons:
        assert re.fullmatch(r"[^\n]{10,200}", reason), reason
        assert not reason.endswith((".", " "))
        assert " is " in reason or " are " in reason or " has " in reason or " starts " in reason


def test_text_of_a_decision_names_the_kernel_or_every_reason() -> None:
    answered = decide(PLAIN, "sm_90a")
    assert answered.kernel is not None
    name = answered.kernel_name
    assert name is not None
    assert re.fullmatch(r"fa4_sm90_forward_bf16_d128_m\d+n\d+s\d", name)
    lines = str(answered).splitlines()
    assert lines[0] == f"problem   {PLAIN}"
    assert f"answer    kernel {name} for sm_90a" in lines
    assert isinstance(answered.kernel.schedule, sm90.ForwardSchedule)
    assert f"schedule  {answered.kernel.schedule.description}" in lines
    refused = decide(dataclasses.replace(PLAIN, dtype="fp32", needs_grad=True), "sm_90a")
    assert [f"because   {reason}" for reason in refused.reasons] == str(refused).splitlines()[2:]


def test_a_problem_without_work_needs_no_kernel() -> None:
    for changes in (
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"heads_q": 0},
        {"heads_q": 0, "heads_kv": 0},
        {"packed_q": True, "seqlen_q": 0},
        {"packed_k": True, "seqlen_k": 0},
    ):
        decision = decide(dataclasses.replace(PLAIN, **changes), "sm_90a")
        assert decision.backend == "reference"
        assert decision.reasons == ("there are no queries or no keys",)
    # Rows of no sequence: there are outputs to be set to zero, and keys that nobody reads.
    padding = dataclasses.replace(PLAIN, packed_q=True, packed_k=True, batch=0)
    assert decide(padding, "sm_90a").kernel is not None


# -- sizes ---------------------------------------------------------------------------------------


def test_more_query_tiles_than_a_launch_holds_are_refused_with_both_numbers() -> None:
    most = dataclasses.replace(PLAIN, batch=1, seqlen_q=1, heads_q=dispatch.MAX_TILES, heads_kv=1)
    assert decide(most, "sm_90a").kernel is not None
    over = dataclasses.replace(most, heads_q=dispatch.MAX_TILES + 1)
    assert decide(over, "sm_90a").reasons == (
        f"the problem has {dispatch.MAX_TILES + 1} query tiles; "
        f"one launch holds {dispatch.MAX_TILES}",
    )


def test_a_tile_number_and_the_step_to_the_next_fit_32_bits() -> None:
    """A CTA adds the size of the grid, which may be the number of tiles, to its tile's number."""
    assert 2 * dispatch.MAX_TILES <= 2**31 - 1


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), max_size=12),
    tail=st.integers(0, 400),
    tile_m=st.sampled_from([64, 128, 192]),
)
def test_packed_slots_hold_every_tile(lengths: list[int], tail: int, tile_m: int) -> None:
    """One for each tile of each sequence and of the padding behind, whatever the lengths."""
    problem = dataclasses.replace(
        PLAIN, packed_q=True, batch=len(lengths), seqlen_q=sum(lengths) + tail
    )
    needed = sum(-(-length // tile_m) for length in [*lengths, tail])
    slots, rest = divmod(num_tiles(problem, tile_m), problem.heads_q)
    assert rest == 0
    assert needed <= slots <= problem.seqlen_q // tile_m + len(lengths) + 1


def test_dense_tiles_are_counted_exactly() -> None:
    for seqlen_q, tiles in ((1, 1), (128, 1), (129, 2), (256, 2)):
        problem = dataclasses.replace(PLAIN, seqlen_q=seqlen_q)
        assert num_tiles(problem, 128) == tiles * problem.batch * problem.heads_q


# -- what is compiled in -------------------------------------------------------------------------

sizes = st.integers(1, 5000)
half_dims = st.integers(1, 32).map(lambda eighth: 8 * eighth)
inner_bounds = st.integers(0, 5000)
scales = st.floats(1e-3, 10)
caps = st.floats(1e-2, 1000)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_sizes_and_values_are_not_compiled_in(data: st.DataObject) -> None:
    """Two problems that only differ in numbers share a kernel; only kinds of things make others."""
    draw = data.draw
    has_left, has_right, has_cap, is_positive = (draw(st.booleans()) for _ in range(4))
    kind = {
        "dtype": draw(st.sampled_from(["bf16", "fp16"])),
        "sink_dtype": draw(st.sampled_from([None, "fp32", "bf16", "fp16"])),
        **{
            name: draw(st.booleans())
            for name in ("packed_q", "packed_k", "has_seqused_q", "has_seqused_k")
        },
    }
    head_dim, head_dim_v = draw(half_dims), draw(half_dims)

    def same_class(dim: int) -> int:
        alike = [d for d in range(8, 257, 8) if head_dim_class(d) == head_dim_class(dim)]
        return draw(st.sampled_from(alike))

    def one_problem() -> AttentionProblem:
        heads_kv = draw(st.integers(1, 64))
        scale = draw(scales)
        return AttentionProblem(
            **kind,
            batch=draw(sizes),
            seqlen_q=draw(sizes),
            seqlen_k=draw(sizes),
            heads_q=heads_kv * draw(st.integers(1, 16)),
            heads_kv=heads_kv,
            head_dim=same_class(head_dim),
            head_dim_v=same_class(head_dim_v),
            softmax_scale=scale if is_positive else draw(st.sampled_from([0.0, -scale])),
            softcap=draw(caps) if has_cap else 0.0,
            window_left=draw(inner_bounds) if has_left else None,
            window_right=draw(inner_bounds) if has_right else None,
        )

    first, second = one_problem(), one_problem()
    assert features_of(first) == features_of(second)
    kernels = [decide(problem, "sm_90a").kernel for problem in (first, second)]
    assert kernels[0] == kernels[1]
    assert kernels[0] is not None
    assert hash(kernels[0]) == hash(kernels[1])


def test_what_changes_the_code_makes_another_kernel() -> None:
    kernels = {
        decide(dataclasses.replace(PLAIN, **changes), "sm_90a").kernel
        for changes in (
            {},
            {"dtype": "fp16"},
            {"head_dim": 136},
            {"head_dim_v": 64},
            {"window_left": 5},
            {"window_right": 5},
            {"window_left": 5, "window_right": 5},
            {"softmax_scale": 0.0},
            {"softcap": 15.0},
            {"sink_dtype": "fp32"},
            {"sink_dtype": "bf16"},
            {"packed_q": True},
            {"packed_k": True},
            {"has_seqused_q": True},
            {"has_seqused_k": True},
        )
    }
    assert len(kernels) == 15
    names = {kernel.name for kernel in kernels if kernel is not None}
    assert len(names) == 15


@pytest.mark.parametrize("head_dim", range(1, 257))
def test_head_dims_go_to_the_smallest_class_that_holds_them(head_dim: int) -> None:
    padded = head_dim_class(head_dim)
    assert padded in HEAD_DIM_CLASSES
    assert padded >= head_dim
    assert not any(head_dim <= other < padded for other in HEAD_DIM_CLASSES)


def test_head_dims_above_the_largest_class_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=257 is above the largest class 256"):
        head_dim_class(257)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "fp32"),
        ("head_dim", 120),
        ("head_dim_v", 0),
        ("score", "alibi"),
        ("sink_dtype", "fp64"),
    ],
)
def test_features_that_no_kernel_has_are_refused_by_name(field: str, value: object) -> None:
    good = features_of(PLAIN)
    with pytest.raises(ValueError, match=rf"^{field}={value!r} is not one of \("):
        dataclasses.replace(good, **{field: value})


# -- devices -------------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with (major, minor) to make device cuda:0 one of that compute capability."""

    def pretend(capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
        return torch.device("cuda", 0)

    yield pretend
    architecture_of.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((11, 0), None),
        ((12, 0), None),
        ((8, 0), None),
    ],
)
def test_c66_compute_capabilities(
    fake_gpu: Any, capability: tuple[int, int], arch: str | None
) -> None:
    architecture_of.cache_clear()
    found, words = architecture_of(fake_gpu(capability))
    assert found == arch
    assert words == f"Fake GPU (compute capability {capability[0]}.{capability[1]})"
    decision = decide(PLAIN, found, words)
    if arch is None:
        assert decision.reasons == (
            f"{words} has no kernels; they need compute capability {SUPPORTED}",
        )
    else:
        assert decision.kernel is not None
        assert decision.kernel.arch == arch


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_devices_that_are_no_gpu_have_no_architecture(kind: str) -> None:
    arch, words = architecture_of(torch.device(kind))
    assert arch is None
    assert words == f"a {kind} device"


def test_a_device_is_asked_once(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture_of.cache_clear()
    device = fake_gpu((9, 0))
    assert architecture_of(device)[0] == "sm_90a"

    def refuse(device: torch.device) -> tuple[int, int]:
        raise AssertionError("asked again")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    assert architecture_of(torch.device("cuda", 0))[0] == "sm_90a"


def test_no_cuda_function_is_called_for_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> object:
        raise AssertionError("a CUDA function was called")

    for name in ("get_device_capability", "get_device_name", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    architecture_of.cache_clear()
    q = torch.zeros(1, 2, 1, 8)
    assert fa4.explain(q, q, q).backend == "reference"
    with pytest.warns(FallbackWarning, match="a cpu device"):
        dispatch.warn_of_fallback(unwarned_refusal("a cpu device, asked without CUDA"))


# -- warnings ------------------------------------------------------------------------------------


def unwarned_refusal(*reasons: str) -> Decision:
    dispatch._warned.discard(reasons)
    return Decision(PLAIN, "reference", reasons=reasons)


def fallback_warnings(*decisions: Decision) -> list[str]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for decision in decisions:
            dispatch.warn_of_fallback(decision)
    assert all(item.category is FallbackWarning for item in record)
    return [str(item.message) for item in record]


def test_one_warning_for_each_set_of_reasons() -> None:
    first = unwarned_refusal("reason one", "reason two")
    second = unwarned_refusal("reason two")
    same_again = dataclasses.replace(first, problem=dataclasses.replace(PLAIN, batch=7))
    assert fallback_warnings(first, second, same_again, first, second) == [
        "attention is computed by the PyTorch reference: reason one; reason two.",
        "attention is computed by the PyTorch reference: reason two.",
    ]


def test_no_warning_where_there_is_nothing_to_compute() -> None:
    for changes in ({"batch": 0}, {"seqlen_k": 0}):
        empty = decide(dataclasses.replace(PLAIN, **changes), "sm_90a")
        assert fallback_warnings(empty) == []


# -- the table -----------------------------------------------------------------------------------


def test_support_table_has_a_row_for_each_capability_and_hides_nothing() -> None:
    rows = support_table()
    assert len(rows) == len(CAPABILITIES)
    for row, capability in zip(rows, CAPABILITIES, strict=True):
        assert list(row) == list(rows[0])
        assert capability.arch in row["architecture"]
        if not capability.dtypes:
            assert row["dtypes"] == "not built yet"
        if not capability.dtypes and capability.operation == "forward":
            assert decide(PLAIN, capability.arch).kernel is None


def test_support_table_and_decide_agree() -> None:
    """Each entry of a row is answered, and what is just outside of it is not."""
    for row, capability in zip(support_table(), CAPABILITIES, strict=True):
        if row["dtypes"] == "not built yet" or capability.operation != "forward":
            continue
        found = re.fullmatch(r"multiples of (\d+) up to (\d+), each", row["head_dim, head_dim_v"])
        assert found is not None
        step, largest = int(found[1]), int(found[2])
        dims = range(step, largest + 1, step)

        def is_kernel(arch: str = capability.arch, **changes: Any) -> bool:
            return decide(dataclasses.replace(PLAIN, **changes), arch).kernel is not None

        assert all(
            is_kernel(head_dim=dim, head_dim_v=dim_v)
            for dim, dim_v in itertools.product(dims, dims)
        )
        for dim in (step - 1, step + 1, largest + 1, largest + step):
            assert not is_kernel(head_dim=dim)
            assert not is_kernel(head_dim_v=dim)
        for dtype in ("bf16", "fp16", "fp32", "fp64"):
            assert is_kernel(dtype=dtype) == (dtype in row["dtypes"].split(", "))
            assert is_kernel(sink_dtype=dtype) == (dtype in row["sink dtypes"].split(", "))
        assert is_kernel(needs_grad=True) == (row["gradients"] == "yes")


def test_every_architecture_has_a_name_and_a_capability() -> None:
    assert set(dispatch.ARCHITECTURES.values()) == set(dispatch.ARCHITECTURE_NAMES)
    assert {capability.arch for capability in CAPABILITIES} == set(dispatch.ARCHITECTURE_NAMES)

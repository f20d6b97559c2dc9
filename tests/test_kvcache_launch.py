"""From a call of attention over a cache to its launch, with kernels that only note what they get.

What they would compute is judged in tests/emulator/test_hopper_kvcache.py and tests/gpu.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4
from fa4 import kvcache
from fa4.compiler import KernelSpec
from fa4.kernels.features import AppendFeatures, DecodeFeatures
from fa4.kvcache_launch import COUNTERS_PLACE, KVCacheLaunch
from fa4.pipelines.sm90_decode import DecodeSchedule

BATCH, ROWS, HEADS_KV, DIM = 2, 64, 2, 32
KERNEL_ARGUMENTS = (
    *("q", "k_cache", "v_cache", "out", "lse", "partial", "counters", "cu_seqlens_q"),
    *("cache_seqlens", "cu_seqlens_k_new", "leftpad", "table", "sink", "numbers"),
    *("fills_padding", "stores_lse"),
)


@dataclasses.dataclass
class Machine:
    """Kernels that were loaded, calls of each kind, and how often the path was walked."""

    specs: list[KernelSpec] = dataclasses.field(default_factory=list)
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    appends: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    walks: int = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A CPU that passes for an H200."""
    machine = Machine()

    def load(spec: KernelSpec):
        machine.specs.append(spec)
        if not isinstance(spec.features, DecodeFeatures):
            align = spec.features.new_align

            def append(*arguments: Any) -> None:
                q, _, k, v, _, _, cos, sin = arguments[:8]
                if any(t is not None and t.data_ptr() % align for t in (q, k, v, cos, sin)):
                    raise ValueError("misaligned")
                machine.appends.append(arguments)

            return append

        def kernel(*arguments: Any) -> None:
            given = dict(zip(KERNEL_ARGUMENTS, arguments, strict=True))
            # As a compiled function would:
            if given["k_cache"].dtype != torch.bfloat16:
                raise TypeError("mismatched dtype")
            aligns = dict.fromkeys(("q", "out"), spec.features.q_align)
            aligns |= dict.fromkeys(("k_cache", "v_cache"), spec.features.cache_align)
            if any(given[name].data_ptr() % align for name, align in aligns.items()):
                raise ValueError("misaligned")
            machine.calls.append(given)

        return kernel

    def launch(decision, device, multiprocessors):
        machine.walks += 1
        return KVCacheLaunch(decision, device, multiprocessors, load)

    monkeypatch.setattr(kvcache, "_launches", {})
    monkeypatch.setattr(kvcache, "KVCacheLaunch", launch)
    monkeypatch.setattr(kvcache, "architecture_of", lambda device: ("sm_90a", "a pretended H200"))
    monkeypatch.setattr(kvcache, "multiprocessor_count", lambda device: 132)
    return machine


def rows(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a decode step over a cache of which not all is in use."""
    caches = {name: rows(BATCH, ROWS, HEADS_KV, DIM) for name in ("k_cache", "v_cache")}
    return {
        "q": rows(BATCH, 1, 4, DIM),
        **caches,
        "cache_seqlens": int32(3, 40),
        "causal": True,
        "backend": "fa4",
        **changes,
    }


def new_rows(**changes: Any) -> dict[str, Any]:
    """What appending and rotary add to the arguments."""
    angles = torch.rand(ROWS, DIM // 2)
    tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    new = {name: rows(BATCH, 1, HEADS_KV, DIM) for name in ("k", "v")}
    return {**new, **tables, **changes}


def call(arguments: dict[str, Any]):
    return fa4.flash_attn_with_kvcache(**arguments)


def test_a_repeated_call_is_launched_without_a_walk_and_with_its_own_tensors(machine) -> None:
    for turn in (1, 2, 3):
        given = arguments()
        out = call(given)
        assert machine.walks == 1
        assert len(machine.calls) == turn
        launched = machine.calls[-1]
        for name in ("q", "k_cache", "v_cache", "cache_seqlens"):
            assert launched[name] is given[name]
        assert launched["out"] is out
        assert out.shape == (BATCH, 1, 4, DIM)
        assert out.is_contiguous()
        assert launched["fills_padding"] == 1
        assert launched["stores_lse"] == 0
        partial = launched["partial"]
        assert partial.shape == (2 * 132, 2, DIM + 4)
        assert partial.is_contiguous()
        assert partial.dtype == torch.float32
        counters = launched["counters"]
        assert KERNEL_ARGUMENTS[COUNTERS_PLACE] == "counters"
        assert counters.dtype == torch.int32
        assert counters.numel() >= 132
        assert not counters.any()
        assert launched["numbers"].head_groups == HEADS_KV


def test_appending_goes_first_and_attention_gets_the_rotated_queries(machine) -> None:
    for _ in range(2):
        given = arguments(**new_rows())
        call(given)
        source, rotated, k, v, *_ = machine.appends[-1]
        assert (source is given["q"], k is given["k"], v is given["v"]) == (True, True, True)
        assert machine.calls[-1]["q"] is rotated
        assert machine.calls[-1]["numbers"].new_rows == 1
    assert machine.walks == 1


def transposed(tensor: Tensor) -> Tensor:
    """The same tensor with heads in front of the rows in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


OTHERS = {
    "causal": {"causal": False},
    "window": {"window_size": (7, 0)},
    "scale": {"softmax_scale": 0.25},
    "softcap": {"softcap": 3.0},
    "splits": {"num_splits": 2},
    "sink": {"sink": torch.zeros(4)},
    "out": {"out": rows(BATCH, 1, 4, DIM)},
    "leftpad": {"cache_leftpad": int32(1, 1)},
    "batch_idx": {"cache_batch_idx": int32(1, 0)},
    "pages": {"page_table": int32(0, 1).view(2, 1)},
    "one length": {"cache_seqlens": 5},
    "whole": {"cache_seqlens": None},
    "strides": {"k_cache": transposed(rows(BATCH, ROWS, HEADS_KV, DIM))},
    "rows": {"q": rows(BATCH, 2, 4, DIM)},
    "capacity": {name: rows(BATCH, ROWS + 1, HEADS_KV, DIM) for name in ("k_cache", "v_cache")},
    "packed": {"q": rows(3, 4, DIM), "cu_seqlens_q": int32(0, 1, 2)},
    "promise": {"q": rows(3, 4, DIM), "cu_seqlens_q": int32(0, 1, 2), "max_seqlen_q": 1},
    "new": {name: tensor for name, tensor in new_rows().items() if name in ("k", "v")},
    "rotary": new_rows(),
    "pairs": {**new_rows(), "rotary_interleaved": False},
    "turns": {**new_rows(), "rotary_seqlens": int32(1, 2)},
    "rotary_dim": {
        **new_rows(),
        "rotary_cos": rows(ROWS, DIM // 4),
        "rotary_sin": rows(ROWS, DIM // 4),
    },
    "rotary_dtype": {
        **new_rows(),
        "rotary_cos": torch.rand(ROWS, DIM // 2),
        "rotary_sin": torch.rand(ROWS, DIM // 2),
    },
    "packed new": {
        **new_rows(k=rows(2, HEADS_KV, DIM), v=rows(2, HEADS_KV, DIM)),
        "cu_seqlens_k_new": int32(0, 1, 2),
    },
}


def test_calls_that_differ_in_what_was_decided_never_share_a_launch(machine) -> None:
    kinds = [{}, *OTHERS.values()]
    for changes in kinds:
        call(arguments(**changes))
    assert machine.walks == len(kinds)
    assert len(kvcache._launches) == len(kinds)
    for changes in kinds:
        call(arguments(**changes))
    assert machine.walks == len(kinds)


@pytest.mark.parametrize("length", [None, 5])
def test_a_length_told_to_the_host_is_written_to_the_device(machine, length: int | None) -> None:
    for step in range(3):
        number = None if length is None else length + step
        call(arguments(cache_seqlens=number))
        expected = ROWS if number is None else number
        assert machine.calls[-1]["cache_seqlens"].tolist() == [expected] * BATCH
    assert machine.walks == 1
    with pytest.raises(ValueError, match="above the 64 rows"):
        call(arguments(cache_seqlens=ROWS + 1))
    with pytest.raises(ValueError, match="cache_seqlens=-1"):
        call(arguments(cache_seqlens=-1))


def test_whole_tiles_need_no_workspace(machine) -> None:
    heads_kv = 33  # with 4 sequences 132 tiles, one for each CTA
    shape = (4, ROWS, heads_kv, DIM)
    caches = {name: rows(*shape) for name in ("k_cache", "v_cache")}
    call(arguments(q=rows(4, 1, heads_kv, DIM), **caches, cache_seqlens=None))
    schedule = machine.specs[-1].schedule
    assert isinstance(schedule, DecodeSchedule)
    assert not schedule.merges
    assert machine.calls[-1]["partial"] is None
    assert machine.calls[-1]["counters"] is None


def test_what_a_known_launch_refuses_is_explained_by_the_walk(machine) -> None:
    call(arguments())
    halves = rows(BATCH, ROWS, HEADS_KV, DIM).half()
    with pytest.raises(TypeError, match="q, k and v have dtypes"):
        call(arguments(k_cache=halves))
    with pytest.raises(NotImplementedError, match="q requires grad"):
        call(arguments(q=rows(BATCH, 1, 4, DIM).requires_grad_()))
    with pytest.raises(NotImplementedError, match="k requires grad"):
        call(arguments(**new_rows(k=rows(BATCH, 1, HEADS_KV, DIM).requires_grad_())))


def test_checked_mode_always_walks(machine) -> None:
    call(arguments())
    with fa4.checked(), pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 65"):
        call(arguments(cache_seqlens=int32(3, 65)))
    assert len(machine.calls) == 1


def padded(tensor: Tensor) -> Tensor:
    """The same tensor with 4 elements behind each row in memory: 8 bytes."""
    extent = tensor.shape[-1]
    wider = tensor.new_zeros(*tensor.shape[:-1], extent + 4)
    wider[..., :extent] = tensor
    return wider[..., :extent]


def shifted(tensor: Tensor) -> Tensor:
    """The same tensor, starting one element past an address that is a multiple of 16 bytes."""
    longer = tensor.new_zeros(tensor.numel() + 1)
    longer[1:] = tensor.flatten()
    return longer[1:].view(tensor.shape)


# Which tensors of a call are read together, and so as widely as the least aligned of them.
TOGETHER = {
    "cache_align": ("k_cache", "v_cache"),
    "q_align": ("q", "out"),
    "new_align": ("k", "v", "rotary_cos", "rotary_sin"),
}
ODD = [(field, name) for field, names in TOGETHER.items() for name in names]


@pytest.mark.parametrize(("field", "name"), ODD)
@pytest.mark.parametrize(("place", "align"), [(padded, 8), (shifted, 2)])
def test_rows_that_are_not_16_byte_aligned_have_a_kernel_that_is_found_again(
    machine, place, align: int, field: str, name: str
) -> None:
    plain = arguments(**new_rows(), out=torch.zeros(BATCH, 1, 4, DIM).bfloat16())
    odd = plain | {name: place(plain[name])}
    decision = fa4.explain_kvcache(**odd)
    for other in TOGETHER:
        assert getattr(decision.problem, other) == (align if other == field else 16)
    assert f"aligned to {align} bytes" in str(decision)
    for turn in (1, 2):
        call(odd)
        assert machine.walks == 1
        assert len(machine.calls) == len(machine.appends) == turn
    append, attention = (
        next(s.features for s in machine.specs if isinstance(s.features, kind))
        for kind in (AppendFeatures, DecodeFeatures)
    )
    caches_are_odd, q_is_odd = field == "cache_align", field == "q_align"
    assert attention.cache_align == (align if caches_are_odd else 16)
    assert attention.q_align == (2 if q_is_odd else 16)
    assert append.cache_align == (2 if caches_are_odd else 16)
    assert append.new_align == (16 if caches_are_odd else 2)
    schedule = next(s.schedule for s in machine.specs if s.features is attention)
    assert isinstance(schedule, DecodeSchedule)
    assert (schedule.copy_rows == 0) == caches_are_odd


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_an_odd_address_among_aligned_ones_has_a_kernel_of_its_own(machine, name: str) -> None:
    plain = arguments(out=torch.zeros(BATCH, 1, 4, DIM).bfloat16())
    odd = plain | {name: shifted(plain[name])}
    for turn, given in enumerate((plain, odd, plain, odd), start=1):
        call(given)
        assert len(machine.calls) == turn
        assert machine.calls[-1][name] is given[name]
    aligned, other = (s.features for s in machine.specs[:2])
    assert min(aligned.cache_align, aligned.q_align) == 16
    assert min(other.cache_align, other.q_align) == 2
    call(plain)
    assert machine.walks == 3, "aligned tensors were given to the walk again"


def test_the_first_call_with_an_odd_address_does_not_choose_for_aligned_ones(machine) -> None:
    plain = arguments()
    call(plain | {"k_cache": shifted(plain["k_cache"])})
    call(plain)
    assert [s.features.cache_align for s in machine.specs] == [2, 16]


def test_alignment_counts_only_strides_that_are_used(machine) -> None:
    caches = {n: torch.zeros(BATCH, 1, 1, DIM + 1)[..., :DIM].bfloat16() for n in ("k", "v")}
    one = {f"{n}_cache": t[:1].as_strided((1, 1, 1, DIM), (7, 5, 3, 1)) for n, t in caches.items()}
    call(arguments(q=rows(1, 1, 1, DIM), cache_seqlens=int32(1), **one))
    assert machine.specs[0].features.cache_align == 16

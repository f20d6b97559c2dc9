"""Who is measured: fa4 and every other attention that can be imported here, by name and version.

A contender is a class with a method for each operation that it has: ``forward`` and ``backward``
(dense), ``varlen`` (packed), ``decode`` (one query row, KV cache). A method prepares what may be
prepared outside the clock and returns a call without arguments. Making an object raises ImportError
where the implementation is absent; a method raises whatever the implementation refuses with.

FA3 is the package ``flash_attn_interface``; or, without it, the operators of vLLM's build in the
shared object that FA4_FA3_LIBRARY names (no backward there).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.versions import fa4_version, installed_version
from perf.cases import SEED, Case, Inputs
from perf.reading import PIECE_BYTES, reading_kernel
from perf.timing import Call

OPERATIONS = ("forward", "backward", "varlen", "decode")
WORKSPACE_BYTES = 512 << 20


def differentiate(attention: Any, *leaves: Tensor) -> Call:
    """The backward pass alone, of an attention of (q, k, v)."""
    leaves = tuple(t.detach().requires_grad_() for t in leaves)
    out = output_of(attention(*leaves))
    # The same for every contender, so that their gradients can be compared.
    generator = torch.Generator(out.device).manual_seed(SEED)
    gradient = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def output_of(result: Any) -> Tensor:
    """The output tensor of what an implementation returned: alone, or first of several."""
    return result[0] if isinstance(result, (tuple, list)) else result


class Fa4:
    name = "fa4"

    def __init__(self) -> None:
        self.version = fa4_version()

    def forward(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: fa4.flash_attn_func(q, k, v, causal=case.causal, backend="fa4")

    def backward(self, case: Case, inputs: Inputs) -> Call:
        attention = functools.partial(fa4.flash_attn_func, causal=case.causal, backend="fa4")
        return differentiate(attention, inputs.q, inputs.k, inputs.v)

    def varlen(self, case: Case, inputs: Inputs) -> Call:
        q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
        return lambda: fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, causal=case.causal, backend="fa4"
        )

    def decode(self, case: Case, inputs: Inputs) -> Call:
        if not hasattr(fa4, "flash_attn_with_kvcache"):
            raise NotImplementedError(f"fa4 {self.version} has no flash_attn_with_kvcache")
        return lambda: fa4.flash_attn_with_kvcache(
            inputs.q,
            inputs.k,
            inputs.v,
            cache_seqlens=inputs.cache_seqlens,
            page_table=inputs.page_table,
            causal=True,
            backend="fa4",
        )


class Fa4Deterministic:
    """Ours with gradients that are equal bit by bit from run to run: what that costs."""

    name = "fa4-deterministic"

    def __init__(self) -> None:
        self.version = fa4_version()

    def backward(self, case: Case, inputs: Inputs) -> Call:
        attention = functools.partial(
            fa4.flash_attn_func, causal=case.causal, deterministic=True, backend="fa4"
        )
        return differentiate(attention, inputs.q, inputs.k, inputs.v)


class FlashAttention4:
    name = "flash-attn-4"

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        self.dense, self.packed = flash_attn_func, flash_attn_varlen_func
        self.version = installed_version("flash-attn-4") or "unknown"

    def forward(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: self.dense(q, k, v, causal=case.causal)

    def backward(self, case: Case, inputs: Inputs) -> Call:
        attention = functools.partial(self.dense, causal=case.causal)
        return differentiate(attention, inputs.q, inputs.k, inputs.v)

    def varlen(self, case: Case, inputs: Inputs) -> Call:
        q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
        longest = max(case.lengths_k)
        return lambda: self.packed(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=case.causal,
        )

    def decode(self, case: Case, inputs: Inputs) -> Call:
        return lambda: self.packed(
            inputs.q,
            inputs.k,
            inputs.v,
            max_seqlen_q=1,
            max_seqlen_k=max(case.lengths_k),
            seqused_k=inputs.cache_seqlens,
            page_table=inputs.page_table,
            causal=True,
            num_splits=0,
        )


class Fa4Reading:
    """As many bytes as a decoding step reads, by a kernel that does nothing else: the limit."""

    name = "fa4-reading"

    def __init__(self) -> None:
        self.version = fa4_version()

    def decode(self, case: Case, inputs: Inputs) -> Call:
        if inputs.k.data_ptr() == inputs.v.data_ptr():
            raise NotImplementedError("reads keys and values apart")
        device = torch.cuda.get_device_properties()
        kernel = reading_kernel(f"sm_{device.major}{device.minor}a")
        k, v = inputs.k.view(-1), inputs.v.view(-1)
        pieces = case.kv_bytes // 2 // PIECE_BYTES
        done = inputs.q.new_zeros(1)

        def read() -> Tensor:
            kernel(k, v, pieces, device.multi_processor_count)
            return done  # nothing is worked out

        return read


class FlashAttention3:
    """The package of FA3."""

    name = "flash-attn-3"

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("flash_attn_interface")
        names = ("flash-attn-3", "flash_attn_3", "flash-attn-interface")
        self.version = next(filter(None, map(installed_version, names)), "unknown")

    def forward(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: self.module.flash_attn_func(q, k, v, causal=case.causal)

    def backward(self, case: Case, inputs: Inputs) -> Call:
        attention = functools.partial(self.module.flash_attn_func, causal=case.causal)
        return differentiate(attention, inputs.q, inputs.k, inputs.v)

    def varlen(self, case: Case, inputs: Inputs) -> Call:
        cu_seqlens, longest = inputs.cu_seqlens, max(case.lengths_k)
        return lambda: self.module.flash_attn_varlen_func(
            inputs.q,
            inputs.k,
            inputs.v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            causal=case.causal,
        )

    def decode(self, case: Case, inputs: Inputs) -> Call:
        return lambda: self.module.flash_attn_with_kvcache(
            inputs.q,
            inputs.k,
            inputs.v,
            cache_seqlens=inputs.cache_seqlens,
            page_table=inputs.page_table,
            causal=True,
        )


class FlashAttention3Library:
    """FA3's operators as vLLM builds them; dense batches go through the packed form."""

    name = "flash-attn-3"

    def __init__(self) -> None:
        path = os.environ.get("FA4_FA3_LIBRARY")
        if not path:
            raise ImportError("no module flash_attn_interface, and FA4_FA3_LIBRARY is not set")
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(f"FA4_FA3_LIBRARY={path} cannot be loaded: {error}") from error
        self.operator: Any = torch.ops._vllm_fa3_C.fwd
        self.arguments = [a.name for a in self.operator.default._schema.arguments]
        self.defaults = {
            a.name: a.default_value
            for a in self.operator.default._schema.arguments
            if a.has_default_value()
        }
        self.version = "vLLM's build"

    def forward(self, case: Case, inputs: Inputs) -> Call:
        rows = case.lengths_q[0]
        cu_seqlens = torch.arange(
            0, (case.batch + 1) * rows, rows, dtype=torch.int32, device=inputs.q.device
        )
        q, k, v = (t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        call = self._packed(case, q, k, v, cu_seqlens)
        shape = (*inputs.q.shape[:-1], case.head_dim_v)
        return lambda: output_of(call()).view(shape)

    def varlen(self, case: Case, inputs: Inputs) -> Call:
        assert inputs.cu_seqlens is not None
        return self._packed(case, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)

    def decode(self, case: Case, inputs: Inputs) -> Call:
        device = inputs.q.device
        table = inputs.page_table
        if table is None:  # every sequence is one long page
            table = torch.arange(case.batch, dtype=torch.int32, device=device)[:, None]
        call = self._call(
            case,
            q=inputs.q.flatten(0, 1),
            k=inputs.k,
            v=inputs.v,
            cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=device),
            seqused_k=inputs.cache_seqlens,
            max_seqlen_q=1,
            max_seqlen_k=max(case.lengths_k),
            page_table=table,
            is_causal=True,
            num_splits=0,
        )
        return lambda: output_of(call()).unsqueeze(1)

    def _packed(self, case: Case, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Call:
        longest = max(case.lengths_k)
        return self._call(
            case,
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            is_causal=case.causal,
            num_splits=1,
        )

    def _call(self, case: Case, **given: Any) -> Call:
        """The operator with every argument of its schema; those not given are at rest."""
        at_rest: dict[str, Any] = {
            "softmax_scale": case.head_dim**-0.5,
            "window_size_left": -1,
            "window_size_right": -1,
            "attention_chunk": 0,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        values = dict.fromkeys(self.arguments) | self.defaults
        values |= {name: at_rest[name] for name in at_rest if name in values}
        unknown = set(given) - set(values)
        if unknown:
            raise TypeError(f"this build of FA3 has no argument {', '.join(sorted(unknown))}")
        values |= given
        return lambda: self.operator(**values)


class Sdpa:
    """torch's scaled_dot_product_attention, held to one of its backends, or (None) to none."""

    def __init__(self, name: str, backend: SDPBackend | None):
        self.name, self.backend = name, backend
        self.version = f"torch {torch.__version__}"
        if backend is SDPBackend.CUDNN_ATTENTION and torch.backends.cudnn.version():
            self.version += f", cuDNN {torch.backends.cudnn.version()}"

    def forward(self, case: Case, inputs: Inputs) -> Call:
        attention = self._attention(case, case.causal)
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: attention(q, k, v)

    def backward(self, case: Case, inputs: Inputs) -> Call:
        return differentiate(
            self._attention(case, case.causal), inputs.q, inputs.k, inputs.v
        )  # fmt: skip

    def decode(self, case: Case, inputs: Inputs) -> Call:
        if inputs.page_table is not None or len(set(case.lengths_k)) > 1:
            raise NotImplementedError("SDPA has neither pages nor lengths")
        attention = self._attention(case, causal=False)
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: attention(q, k, v)

    def _attention(self, case: Case, causal: bool) -> Any:
        is_grouped = case.heads_q != case.heads_kv

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped)
            return out.transpose(1, 2)

        if self.backend is None:
            return plain
        backend = self.backend

        def held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return plain(q, k, v)

        return held


class CudnnFrontend:
    """cuDNN's graph through its own Python frontend, inference form (no statistics)."""

    name = "cudnn-frontend"

    def __init__(self) -> None:
        self.cudnn: Any = importlib.import_module("cudnn")
        frontend = installed_version("nvidia-cudnn-frontend") or self.cudnn.__version__
        self.version = f"{frontend}, cuDNN {self.cudnn.backend_version()}"
        self.handle: Any = None
        self.graphs: dict[Case, tuple[Any, ...]] = {}

    def forward(self, case: Case, inputs: Inputs) -> Call:
        graph, names, workspace = self._graph(case, inputs)
        out = torch.empty(
            *inputs.q.shape[:-1], case.head_dim_v, dtype=inputs.q.dtype, device=inputs.q.device
        )
        tensors = (inputs.q, inputs.k, inputs.v, out)
        pack = dict(zip(names, (t.transpose(1, 2) for t in tensors), strict=True))

        def call() -> Tensor:
            graph.execute(pack, workspace, handle=self.handle)
            return out

        return call

    def _graph(self, case: Case, inputs: Inputs) -> tuple[Any, ...]:
        if case in self.graphs:
            return self.graphs[case]
        cudnn = self.cudnn
        if self.handle is None:
            self.handle = cudnn.create_handle()
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=self.handle, stream=stream)
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        q, k, v = (graph.tensor_like(t.transpose(1, 2)) for t in (inputs.q, inputs.k, inputs.v))
        out, _ = graph.sdpa(
            name="sdpa",
            q=q,
            k=k,
            v=v,
            generate_stats=False,
            attn_scale=case.head_dim**-0.5,
            use_causal_mask=case.causal,
        )
        rows, heads, dim = case.lengths_q[0], case.heads_q, case.head_dim_v
        out.set_output(True).set_dim([case.batch, heads, rows, dim])
        out.set_stride([rows * heads * dim, dim, heads * dim, 1])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(
            graph.get_workspace_size(), dtype=torch.uint8, device=inputs.q.device
        )
        self.graphs[case] = graph, (q, k, v, out), workspace
        return self.graphs[case]


class FlashInfer:
    name = "flashinfer"

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("flashinfer")
        self.version = installed_version("flashinfer-python") or self.module.__version__

    def forward(self, case: Case, inputs: Inputs) -> Call:
        cu_seqlens = list(itertools.accumulate(case.lengths_q, initial=0))
        indptr = torch.tensor(cu_seqlens, dtype=torch.int32, device=inputs.q.device)
        call = self._ragged(
            case, indptr, *(t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        )
        shape = (*inputs.q.shape[:-1], case.head_dim_v)
        return lambda: call().view(shape)

    def varlen(self, case: Case, inputs: Inputs) -> Call:
        assert inputs.cu_seqlens is not None
        return self._ragged(case, inputs.cu_seqlens, inputs.q, inputs.k, inputs.v)

    def decode(self, case: Case, inputs: Inputs) -> Call:
        device = inputs.q.device
        page = case.page_size or max(case.lengths_k)
        pages = [-(-length // page) for length in case.lengths_k]
        table = inputs.page_table
        if table is None:
            table = torch.arange(case.batch, dtype=torch.int32, device=device)[:, None]
        integers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        used = torch.arange(table.shape[1], device=device) < integers(pages)[:, None]
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(device), "NHD", use_tensor_cores=case.heads_q > case.heads_kv
        )
        wrapper.plan(
            integers(list(itertools.accumulate(pages, initial=0))),
            table[used],
            integers([(length - 1) % page + 1 for length in case.lengths_k]),
            case.heads_q,
            case.heads_kv,
            case.head_dim,
            page,
            q_data_type=inputs.q.dtype,
            kv_data_type=inputs.k.dtype,
        )
        q = inputs.q.squeeze(1)
        return lambda: wrapper.run(q, (inputs.k, inputs.v)).unsqueeze(1)

    def _ragged(self, case: Case, indptr: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Call:
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(self._workspace(q.device), "NHD")
        wrapper.plan(
            indptr,
            indptr,
            case.heads_q,
            case.heads_kv,
            case.head_dim,
            head_dim_vo=case.head_dim_v,
            causal=case.causal,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return lambda: wrapper.run(q, k, v)

    @functools.cache  # noqa: B019  one object lives as long as the process
    def _workspace(self, device: torch.device) -> Tensor:
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlexAttention:
    """torch's flex_attention, compiled for each shape."""

    name = "flex-attention"

    def __init__(self) -> None:
        import triton  # noqa: F401  its compiler
        from torch.nn.attention import flex_attention

        self.module: Any = flex_attention
        # Past the limit torch would run the next shape uncompiled, in quadratic memory.
        torch._dynamo.config.recompile_limit = 1000
        self.compiled: Any = torch.compile(flex_attention.flex_attention, dynamic=False)
        self.version = f"torch {torch.__version__}"

    def forward(self, case: Case, inputs: Inputs) -> Call:
        attention = self._attention(case, inputs)
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: attention(q, k, v)

    def backward(self, case: Case, inputs: Inputs) -> Call:
        return differentiate(self._attention(case, inputs), inputs.q, inputs.k, inputs.v)

    def _attention(self, case: Case, inputs: Inputs) -> Any:
        mask = None
        if case.causal:
            rows = case.lengths_q[0], case.lengths_k[0]
            mask = self.module.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, *rows, device=inputs.q.device
            )
        is_grouped = case.heads_q != case.heads_kv

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            return self.compiled(
                *heads_first, block_mask=mask, enable_gqa=is_grouped
            ).transpose(1, 2)  # fmt: skip

        return attention


class FlashMla:
    """FlashMLA: decode over a latent cache only, where values are the first columns of the keys."""

    name = "flash-mla"

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("flash_mla")
        self.version = installed_version("flash-mla") or "unknown"

    def decode(self, case: Case, inputs: Inputs) -> Call:
        if (case.head_dim, case.head_dim_v, case.heads_kv) != (576, 512, 1):
            raise NotImplementedError("FlashMLA takes head_dim=576, head_dim_v=512, heads_kv=1")
        metadata, num_splits = self.module.get_mla_metadata(
            inputs.cache_seqlens, case.heads_q // case.heads_kv, case.heads_kv
        )
        return lambda: self.module.flash_mla_with_kvcache(
            inputs.q,
            inputs.k,
            inputs.page_table,
            inputs.cache_seqlens,
            case.head_dim_v,
            metadata,
            num_splits,
            causal=True,
        )


def _flash_attention_3() -> Any:
    try:
        return FlashAttention3()
    except ImportError:
        return FlashAttention3Library()


# Ours first: the others' outputs are compared with it.
CONTENDERS: dict[str, Any] = {
    "fa4": Fa4,
    "fa4-deterministic": Fa4Deterministic,
    "fa4-reading": Fa4Reading,
    "flash-attn-4": FlashAttention4,
    "flash-attn-3": _flash_attention_3,
    "cudnn-sdpa": functools.partial(Sdpa, "cudnn-sdpa", SDPBackend.CUDNN_ATTENTION),
    "cudnn-frontend": CudnnFrontend,
    "flash-sdpa": functools.partial(Sdpa, "flash-sdpa", SDPBackend.FLASH_ATTENTION),
    "flashinfer": FlashInfer,
    "flex-attention": FlexAttention,
    "flash-mla": FlashMla,
}


def available(operation: str, wanted: str = "") -> tuple[list[Any], dict[str, str]]:
    """Contenders that have an operation, and for each other one why it is not measured.

    wanted  regular expression that a name must contain; others are not mentioned
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r} is not one of {', '.join(OPERATIONS)}.")
    found, absent = [], {}
    for name, make in CONTENDERS.items():
        if not re.search(wanted, name):
            continue
        try:
            contender = make()
        except (ImportError, OSError) as reason:
            absent[name] = first_line(reason)
            continue
        if hasattr(contender, operation):
            found.append(contender)
        else:
            absent[name] = f"has no {operation} here"
    return found, absent


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__

"""The command line, `fa4` or `python -m fa4`: info, explain, demo, compile, cache.

Exit codes: 0, done; 1, the answer is no (a check failed, a kernel cannot be compiled); 2, the
arguments make no sense.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fa4 import compiler, dispatch, versions
from fa4.checked_mode import is_checked
from fa4.problem import DTYPE_NAMES, AttentionProblem, describe_problem

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ARCHITECTURES = tuple(dispatch.ARCHITECTURES.values())

# What `compile --preset` stands for: options, each combination of which becomes one kernel.
PRESETS: dict[str, dict[str, list[Any]]] = {
    "training": {
        "dtype": ["bf16"],
        "head_dim": [64, 128, 256],
        "causal": [False, True],
        "varlen": [False, True],
    },
    "serving": {
        "dtype": ["bf16", "fp16"],
        "head_dim": [64, 128, 256],
        "causal": [True],
        "varlen": [False, True],
        "window": [(-1, -1), (1, -1)],
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's own; returns the exit code.

    argparse itself exits, with code 2, where it cannot read the arguments.
    """
    options = make_parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def make_parser() -> argparse.ArgumentParser:
    """The parser; each command's function is in `command` of what it returns."""
    parser = argparse.ArgumentParser(
        prog="fa4", description="Exact attention for NVIDIA Hopper and Blackwell GPUs."
    )
    parser.add_argument("--version", action="version", version=f"fa4 {versions.fa4_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info", help="versions, devices, cache, backends", description="Show what fa4 finds here."
    )
    info.add_argument(
        "--support-table", action="store_true", help="print docs/support.md and nothing else"
    )
    info.set_defaults(command=run_info)

    explain = commands.add_parser(
        "explain",
        help="which kernel answers a problem, or why none does",
        description="Show which kernel and schedule answer a problem, or why none does. "
        "Needs no GPU.",
    )
    explain.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        help="for a device of this architecture (default: this machine's first GPU)",
    )
    explain.add_argument("--dtype", choices=DTYPES, default="bf16")
    explain.add_argument("--head-dim", type=int, default=128, help="of q and k (default: 128)")
    explain.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    explain.add_argument("--seqlen-q", type=int, default=4096, help="per sequence (default: 4096)")
    explain.add_argument("--seqlen-k", type=int, help="per sequence (default: --seqlen-q)")
    explain.add_argument("--heads-q", type=int, default=16, help="query heads (default: 16)")
    explain.add_argument("--heads-kv", type=int, help="key/value heads (default: --heads-q)")
    explain.add_argument("--gradients", action="store_true", help="autograd will need gradients")
    add_feature_options(explain)
    explain.set_defaults(command=run_explain)

    demo = commands.add_parser(
        "demo",
        help="attention on a real text, checked against float64",
        description="Compute attention on a real text by everything this machine offers, and "
        "check each result against float64.",
    )
    demo.add_argument("--tokens", type=int, help="length of the text (default: by device)")
    demo.set_defaults(command=run_demo)

    compile_ = commands.add_parser(
        "compile",
        help="compile kernels into the cache",
        description="Compile the kernels of every combination of the given options into the "
        "cache. Needs no GPU.",
    )
    compile_.add_argument("--arch", choices=ARCHITECTURES, default="sm_90a")
    compile_.add_argument("--preset", choices=PRESETS, help="a usual set of kernels")
    compile_.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    compile_.add_argument("--head-dim", type=int, nargs="+", default=[128])
    compile_.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    add_feature_options(compile_)
    compile_.set_defaults(command=run_compile)

    cache = commands.add_parser(
        "cache",
        help="show or clear the compile cache",
        description="Show the folder of compiled kernels, what is in it and how large it is.",
    )
    cache.add_argument("--list", action="store_true", help="also list the entries")
    cache.add_argument("--clear", action="store_true", help="remove every entry")
    cache.set_defaults(command=run_cache)
    return parser


def add_feature_options(parser: argparse.ArgumentParser) -> None:
    """Options that a problem and a kernel to be compiled have in common."""
    parser.add_argument("--head-dim-v", type=int, help="of v (default: --head-dim)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="keys seen left and right of the diagonal, -1 for all (default: -1 -1)",
    )
    parser.add_argument("--softmax-scale", type=float, help="default: 1/sqrt(head_dim)")
    parser.add_argument("--softcap", type=float, default=0.0, help="0 is off (default)")
    parser.add_argument(
        "--sink",
        choices=DTYPES,
        nargs="?",
        const="fp32",
        metavar="DTYPE",
        help="with sink logits, fp32 unless a dtype is given",
    )
    parser.add_argument(
        "--varlen", action="store_true", help="q, k and v are packed, with cu_seqlens"
    )
    parser.add_argument("--seqused-q", action="store_true", help="with used query lengths")
    parser.add_argument("--seqused-k", action="store_true", help="with used key lengths")


def problem_of(options: argparse.Namespace) -> AttentionProblem:
    """The problem that the options describe, checked like a call with tensors of those shapes.

    Raises ValueError or TypeError, as the call would.
    """
    batch, seqlen_q, heads_q = options.batch, options.seqlen_q, options.heads_q
    seqlen_k = seqlen_q if options.seqlen_k is None else options.seqlen_k
    heads_kv = heads_q if options.heads_kv is None else options.heads_kv
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must not be negative.")

    # Tensors without storage: the checks look at shapes, dtypes and strides only.
    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        shape = (batch * seqlen, heads, dim) if options.varlen else (batch, seqlen, heads, dim)
        return torch.empty(shape, dtype=DTYPES[options.dtype], device="meta")

    def lengths(entries: int, is_given: bool) -> torch.Tensor | None:
        return torch.empty(entries, dtype=torch.int32, device="meta") if is_given else None

    sink = None
    if options.sink is not None:
        sink = torch.empty(heads_q, dtype=DTYPES[options.sink], device="meta")
    return describe_problem(
        tensor(seqlen_q, heads_q, options.head_dim),
        tensor(seqlen_k, heads_kv, options.head_dim),
        tensor(seqlen_k, heads_kv, head_dim_v),
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size=tuple(options.window),
        softcap=options.softcap,
        sink=sink,
        cu_seqlens_q=lengths(batch + 1, options.varlen),
        cu_seqlens_k=lengths(batch + 1, options.varlen),
        seqused_q=lengths(batch, options.seqused_q),
        seqused_k=lengths(batch, options.seqused_k),
        out=None,
        needs_grad=options.gradients,
    )


def complain(error: Exception) -> int:
    """Print what is wrong with the arguments; returns the exit code for that."""
    print(f"fa4: error: {error}", file=sys.stderr)
    return 2


def run_info(options: argparse.Namespace) -> int:
    """`fa4 info`."""
    if options.support_table:
        print(support_table(), end="")
        return 0
    print(f"fa4                 {versions.fa4_version()} (Python {platform.python_version()})")
    for supported in versions.DEPENDENCIES:
        found = versions.installed_version(supported.distribution)
        remark = ""
        if versions.version_problem(supported, found) is not None:
            remark = f"  needs {supported}"
        elif found is not None and versions.is_untested(supported, found):
            remark = f"  newer than what was tested, {supported}"
        print(f"{supported.distribution:19} {found or 'not installed'}{remark}")
    print("devices")
    for line in device_lines():
        print(f"  {line}")
    print("kernels")
    for capability in dispatch.CAPABILITIES:
        architecture = f"{dispatch.ARCHITECTURE_NAMES[capability.arch]} ({capability.arch})"
        dtypes = ", ".join(capability.dtypes) or "not built yet"
        print(f"  {capability.operation} on {architecture}: {dtypes}")
    print("  reference in PyTorch: every device and dtype")
    print(f"cache               {cache_summary()}")
    print(f"                    {compiler.loader_description()}")
    print(f"checked mode        {checked_mode()}")
    return 0


def checked_mode() -> str:
    """Whether checked mode is on, or what is wrong with the variable that says so."""
    try:
        return f"{'on' if is_checked() else 'off'} (FA4_CHECKED=1 turns it on)"
    except ValueError as error:
        return str(error)


def device_lines() -> list[str]:
    """A line for each CUDA device and whether fa4 has kernels for it, or why there is no device."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return ["no GPU: this build of torch has no CUDA; the reference runs on the CPU"]
        return ["no GPU: torch finds none; the reference runs on the CPU"]
    lines = []
    for index in range(torch.cuda.device_count()):
        arch, words = dispatch.architecture_of(torch.device("cuda", index))
        kernels = [c for c in dispatch.CAPABILITIES if c.arch == arch and c.dtypes]
        gibibytes = torch.cuda.get_device_properties(index).total_memory / 2**30
        answer = ", ".join(c.operation for c in kernels) or "none, the reference runs on it"
        lines.append(f"cuda:{index} {words}, {gibibytes:.0f} GiB; kernels: {answer}")
    return lines


def run_explain(options: argparse.Namespace) -> int:
    """`fa4 explain`."""
    try:
        problem = problem_of(options)
    except (TypeError, ValueError) as error:
        return complain(error)
    if options.arch is not None:
        arch, device = options.arch, f"an {options.arch} device"
    else:
        here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        arch, device = dispatch.architecture_of(here)
        print(f"device    {device}; --arch asks for another")
    print(dispatch.decide(problem, arch, device))
    return 0


def run_demo(options: argparse.Namespace) -> int:
    """`fa4 demo`."""
    from fa4 import demo

    if options.tokens is not None and options.tokens < 1:
        return complain(ValueError(f"--tokens is {options.tokens}; it must be at least 1."))
    try:
        return demo.run(options.tokens)
    except demo.TextTooShortError as error:
        return complain(error)


def run_compile(options: argparse.Namespace) -> int:
    """`fa4 compile`."""
    if options.jobs < 1:
        return complain(ValueError(f"--jobs is {options.jobs}; it must be at least 1."))
    specs: dict[compiler.KernelSpec, None] = {}  # in order, each once
    refused = False
    for combination in combinations(options):
        try:
            decision = dispatch.decide(
                problem_of(combination), options.arch, f"an {options.arch} device"
            )
        except (TypeError, ValueError) as error:
            return complain(error)
        if decision.kernel is None:
            print(f"refused: {decision.problem}: {'; '.join(decision.reasons)}", file=sys.stderr)
            refused = True
        else:
            specs[decision.kernel] = None
    failed = False
    for outcome in compile_all(list(specs), options.jobs):
        if isinstance(outcome, compiler.CompileReport):
            how = "was there" if outcome.was_cached else "compiled"
            print(f"{outcome.name}  {outcome.arch}  {outcome.seconds:6.2f} s  {how}", flush=True)
        else:
            print(f"fa4: error: {outcome}", file=sys.stderr)
            failed = True
    print(f"cache: {cache_summary()}")
    return 1 if refused or failed else 0


def combinations(options: argparse.Namespace) -> list[argparse.Namespace]:
    """One set of options for each kernel asked for, with sizes that any kernel takes."""
    lists: dict[str, list[Any]] = {"dtype": options.dtype, "head_dim": options.head_dim}
    if options.preset is not None:
        lists = PRESETS[options.preset]
    sizes = {"batch": 1, "seqlen_q": 1024, "seqlen_k": None, "heads_q": 8, "heads_kv": None}
    return [
        argparse.Namespace(
            **{
                **vars(options),
                **sizes,
                "gradients": False,
                **dict(zip(lists, values, strict=True)),
            }
        )
        for values in itertools.product(*lists.values())
    ]


def compile_all(
    specs: list[compiler.KernelSpec], jobs: int
) -> Iterator[compiler.CompileReport | Exception]:
    """Compile each, in `jobs` processes; yields reports, and errors, in the order given."""
    if jobs == 1:
        yield from map(compile_one, specs)
        return
    # The DSL compiles one kernel at a time in a process, and a fork would inherit torch's threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(compile_one, specs)


def compile_one(spec: compiler.KernelSpec) -> compiler.CompileReport | Exception:
    """The report of one compilation, or the error that a user can act on."""
    try:
        return compiler.compile_kernel(spec)
    except (versions.DependencyError, compiler.KernelCompileError) as error:
        return type(error)(str(error))  # without its causes, which may not travel between processes


def run_cache(options: argparse.Namespace) -> int:
    """`fa4 cache`."""
    if options.clear:
        try:
            count = compiler.clear_cache()
        except OSError as error:
            print(f"fa4: error: the cache could not be cleared: {error}", file=sys.stderr)
            return 1
        print(f"{compiler.cache_dir()}: {count} {plural(count)} removed")
        return 0
    if options.list:
        for entry in compiler.cache_entries():
            fault = "" if entry.problem is None else f"  ({entry.problem})"
            print(f"{entry.size:10}  {entry.arch:8}  {entry.name}{fault}")
    print(cache_summary())
    return 0


def cache_summary() -> str:
    """The cache's folder, number of entries and size."""
    entries = compiler.cache_entries()
    mebibytes = sum(entry.size for entry in entries) / 2**20
    return f"{compiler.cache_dir()}: {len(entries)} {plural(len(entries))}, {mebibytes:.1f} MiB"


def support_table() -> str:
    """docs/support.md: what each kernel answers, from the table that dispatch uses."""
    rows = dispatch.support_table()
    columns = list(rows[0])
    table = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"""\
# Supported problems

<!-- Generated: python -m fa4 info --support-table > docs/support.md -->

What the kernels answer. Everything else, and every other device, is answered by the reference
backend, exact attention in PyTorch, after one warning that names each reason; `backend="fa4"` turns
that into an error.

{lines}

Every kernel listed takes every mask (causal, window, both), a softcap from 0.001 to 4096, softmax
scales of either sign up to 1e30, any ratio of `heads_q` to `heads_kv`, dense and packed tensors
with or without `seqused`, and lengths from 0. Tensors need a unit stride in the last dimension; for
forward their other strides and their addresses must be multiples of 16 bytes, for a kv cache they
may be any.

The reference takes fp64, fp32, bf16 and fp16, every head dimension, and gives gradients.
"""


def plural(count: int) -> str:
    return "entry" if count == 1 else "entries"

"""Which schedule of the Hopper forward kernel is fastest for a problem? Searched on the GPU.

1. Enumerate tiles, drop what is over a budget (`ForwardSchedule` refuses it), and rank the rest by
   perf.roofline's bound, then by traffic from L2.
2. Compile the best ones, in several processes, and reject by machine code those that spill or whose
   matrix products the assembler has serialised: they are never run.
3. Time the others at each length, interleaved with the rule's schedule; their outputs must be the
   rule's. Then, on the best tile, vary one other choice at a time.
4. Time the best two again, in a second run. --write puts the winner into the table that dispatch
   uses (pipelines/sm90_tuned.csv) if it wins by more than 1.5 % in both.

No further step is begun when --minutes are over. Without a GPU, --list shows steps 1 and 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import fa4
from fa4.compiler import KernelSpec
from fa4.dispatch import features_of
from fa4.kernels.features import ForwardFeatures
from fa4.launch import ForwardLaunch, Lengths
from fa4.pipelines import sm90_tuned
from fa4.pipelines.sm90 import ForwardSchedule, forward_rule, half_block
from perf import records
from perf.cases import Case, dense, input_bytes, make_inputs, mix, problem_of
from perf.command import differences_from_first, need_gpu
from perf.contenders import first_line
from perf.roofline import ENTRY, forward_cost
from perf.timing import Call, DeviceTimer, copies_needed, interleave, ratio, rotating

TILES_M = (64, 128, 192)
TILES_N = (64, 80, 96, 112, 128, 144, 160, 176, 192, 224)
STAGES = (4, 3, 2)
# Registers of consumers and producer, by consumer warpgroups: all that the file holds.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}

WAITS_MAX = 4  # WARPGROUP.DEPBAR in a loop over key blocks; serialised products have 28 and more
HANG_SECONDS = 10.0
DEVICE = "cuda"
DIFFERENCE_MAX = 0.02  # of outputs, over the largest value


def tiles(rule: ForwardSchedule) -> list[ForwardSchedule]:
    """Every tile that fits, with the most stages and O beside Q where that fits; best bound first.

    What is not about the tile is as in the rule's schedule.
    """
    found = []
    for tile_m, tile_n in itertools.product(TILES_M, TILES_N):
        consumer, producer = REGISTERS[tile_m // 64]
        for o_shares_v, stages in itertools.product((False, True), STAGES):
            schedule = variant(
                rule,
                tile_m=tile_m,
                tile_n=tile_n,
                stages=stages,
                o_shares_v=o_shares_v,
                short_n=half_block(tile_n) if rule.short_n else 0,
                consumer_registers=consumer,
                producer_registers=producer,
            )
            if schedule is not None:
                found.append(schedule)
                break
    return sorted((each for each in found if each != rule), key=rank)


def rank(schedule: ForwardSchedule) -> tuple[float, ...]:
    """Clocks of the busiest unit and bytes from L2, of a (query, key) pair; then long blocks."""
    pairs = schedule.tile_m * schedule.tile_n
    return forward_cost(schedule).clocks / pairs, 1 / schedule.tile_m, -schedule.tile_n


def other_choices(schedule: ForwardSchedule) -> list[ForwardSchedule]:
    """The schedule with one choice changed that is not about the tile: stages, yes or no."""
    changes: list[dict[str, Any]] = [{"stages": stages} for stages in STAGES]
    changes.append({"short_n": 0 if schedule.short_n else half_block(schedule.tile_n)})
    for field in dataclasses.fields(schedule):
        value = getattr(schedule, field.name)
        if isinstance(value, bool):
            changes.append({field.name: not value})
    found = (variant(schedule, **change) for change in changes)
    return [each for each in dict.fromkeys(found) if each not in (None, schedule)]


def variant(schedule: ForwardSchedule, **changes: Any) -> ForwardSchedule | None:
    """The changed schedule; None where it is over a budget."""
    try:
        return dataclasses.replace(schedule, **changes)
    except ValueError:
        return None


def fault_in_code(features: ForwardFeatures, schedule: ForwardSchedule) -> str | None:
    """Compile, and say why the machine code is not worth running; None if it is."""
    from tests import sass

    try:
        code = sass.code_of(KernelSpec(ENTRY, "sm_90a", features, schedule))
    except (fa4.compiler.KernelCompileError, AssertionError) as error:
        return first_line(error)  # of the compiler, or of code that cannot be read
    spills = code.count("STL") + code.count("LDL")
    if spills:
        return f"spills: {spills} accesses of local memory"
    loops = code.loops_with("HGMMA")
    waits = max(sass.count(loop, "WARPGROUP.DEPBAR") for loop in loops) if loops else 0
    if waits > WAITS_MAX:
        return f"serialised: {waits} waits for matrix products in a loop"
    return None


def without_faults(
    features: Sequence[ForwardFeatures], schedules: Iterable[ForwardSchedule], workers: int
) -> list[ForwardSchedule]:
    """Schedules whose code is good for all the features; says why the others are not."""
    jobs = list(itertools.product(schedules, features))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        faults = list(pool.map(fault_in_code, [f for _, f in jobs], [s for s, _ in jobs]))
    rejected = {}
    for (schedule, _), fault in zip(jobs, faults, strict=True):
        if fault is not None:
            rejected[schedule] = fault
    for schedule, fault in rejected.items():
        print(f"  rejected {describe(schedule)}: {fault}", flush=True)
    return [s for s in dict.fromkeys(s for s, _ in jobs) if s not in rejected]


def describe(schedule: ForwardSchedule) -> str:
    """The name, and what the name leaves out."""
    parts = [schedule.name]
    parts += ["o_shares_v"] if schedule.o_shares_v else []
    parts += [] if schedule.takes_turns else ["no_turns"]
    parts += [f"short{schedule.short_n}"] if schedule.short_n else []
    return "_".join(parts)


# -- on the GPU ----------------------------------------------------------------------------------


class Bench:
    """Times schedules on one problem at several lengths, beside the rule's schedule."""

    def __init__(self, cases: Sequence[Case], options: dict[str, Any], rounds: int):
        self.cases, self.options, self.rounds = cases, options, rounds

    def gains(self, rule: ForwardSchedule, others: Sequence[ForwardSchedule]) -> dict[Any, float]:
        """How many times as fast as the rule's each schedule is: geometric mean over lengths."""
        logs: dict[ForwardSchedule, list[float]] = {each: [] for each in (rule, *others)}
        for case in self.cases:
            calls = self.calls(case, list(logs))
            times = interleave(calls, DeviceTimer(), self.rounds)
            for schedule in list(logs):
                if describe(schedule) in times:
                    gain = ratio(times[describe(schedule)], times[describe(rule)])
                    logs[schedule].append(math.log(gain))
                else:
                    del logs[schedule]
        return {each: math.exp(sum(values) / len(values)) for each, values in logs.items()}

    def calls(self, case: Case, schedules: Sequence[ForwardSchedule]) -> dict[str, Call]:
        """Calls by description; a schedule whose output is not the first one's is left out."""
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        copies = copies_needed(input_bytes(case), l2_bytes)
        inputs = [make_inputs(case, DEVICE, copy) for copy in range(copies)]
        problem = problem_of(inputs[0], **self.options)
        calls: dict[str, Call] = {}
        outputs: dict[str, Any] = {}
        for schedule in schedules:
            spec = KernelSpec(ENTRY, "sm_90a", features_of(problem), schedule)
            launch = ForwardLaunch(problem, spec, inputs[0].q)
            name = describe(schedule)
            prepared = [launch_call(launch, each) for each in inputs]
            outputs[name] = watched(prepared[0], name)
            calls[name] = rotating(prepared)
        for name, difference in differences_from_first(outputs).items():
            if not difference <= DIFFERENCE_MAX:
                print(f"  rejected {name}: its output differs by {difference:.3f}")
                del calls[name]
        return calls


def launch_call(launch: ForwardLaunch, inputs: Any) -> Call:
    cu_seqlens = inputs.cu_seqlens
    lengths = None if cu_seqlens is None else Lengths(cu_seqlens, cu_seqlens, None, None)
    return lambda: launch(inputs.q, inputs.k, inputs.v, lengths, None, None, False)[0]


def watched(call: Call, name: str) -> Any:
    """The first run. A kernel that does not end cannot be taken back: it ends the process."""
    result = call()
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + HANG_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            print(f"{name} did not end in {HANG_SECONDS:.0f} s; go on with --exclude {name}")
            sys.stdout.flush()
            os._exit(3)
        time.sleep(0.001)
    return result


def search(
    rule: ForwardSchedule,
    gains: Callable[[ForwardSchedule, Sequence[ForwardSchedule]], dict[Any, float]],
    good: Callable[[Sequence[ForwardSchedule]], list[ForwardSchedule]],
    limit: int,
    is_over: Callable[[], bool],
    exclude: Sequence[str] = (),
) -> dict[ForwardSchedule, float]:
    """Gains over the rule of every schedule that was timed, best first; the rule's own is 1.

    gains    times schedules beside the rule's
    good     drops schedules by their machine code
    limit    tiles that are timed
    is_over  whether the time box is used up: no further step is begun
    exclude  descriptions of schedules that are not run
    """
    found: dict[ForwardSchedule, float] = {rule: 1.0}

    def step(candidates: Iterable[ForwardSchedule]) -> None:
        new = [s for s in candidates if s not in found and describe(s) not in exclude]
        measured = gains(rule, good(new)) if new else {}
        for schedule, gain in measured.items():
            if schedule != rule:
                found[schedule] = gain
                print(f"  {describe(schedule):40} {gain:.3f} of the rule's", flush=True)

    for candidates in (
        lambda: tiles(rule)[:limit],
        lambda: other_choices(best(found)),
        lambda: other_choices(best(found)),
    ):
        if is_over():
            break
        step(candidates())
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def best(found: dict[ForwardSchedule, float]) -> ForwardSchedule:
    return max(found, key=lambda schedule: found[schedule])


def row_for(
    features: ForwardFeatures,
    schedule: ForwardSchedule,
    margin: float,
    runner_up: tuple[ForwardSchedule, float],
    cases: Sequence[Case],
) -> dict[str, str]:
    """The winner's row of the table in pipelines/."""
    fields = dataclasses.asdict(schedule)
    for name in ("head_dim", "head_dim_v"):  # they are the features'
        del fields[name]
    around = records.surroundings()
    return {
        "features": sm90_tuned.key(features),
        "schedule": sm90_tuned.text_of(fields),
        "margin": f"{margin:.4f}",
        "runner_up": f"{describe(runner_up[0])} {runner_up[1]:.4f}",
        "lengths": " ".join(case.label or str(case.lengths_k[0]) for case in cases),
    } | {name: around[name] for name in ("device", "commit", "date", "command")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, default=None, help="head_dim by default")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, default=-1, help="left bound; -1 is none")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--packed", action="store_true", help="mixed lengths with cu_seqlens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--minutes", type=float, default=5.0, help="time box (%(default)s)")
    parser.add_argument("--limit", type=int, default=8, help="tiles to time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved (%(default)s)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--exclude", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="put the winner into the table")
    parser.add_argument("--list", action="store_true", help="show candidates and stop; no GPU")
    arguments = parser.parse_args()

    dim, dim_v = arguments.head_dim, arguments.head_dim_v or arguments.head_dim
    heads = max(1, 2048 // dim)
    cases = [dense(max(1, 16384 // n), n, heads, heads, dim, dim_v) for n in arguments.lengths]
    if arguments.packed:
        cases = [mix(kind, 8, heads, heads, dim) for kind in ("uniform", "log")]
    options = {"causal": arguments.causal, "softcap": arguments.softcap}
    options["window_size"] = (arguments.window, -1)
    wanted = features_of(problem_of(make_inputs(cases[0], "meta"), **options))
    both = [dataclasses.replace(wanted, dtype=dtype) for dtype in ("bf16", "fp16")]
    rule = forward_rule(wanted)
    print(f"{sm90_tuned.key(wanted)}: the rule takes {describe(rule)}")

    def good(schedules: Sequence[ForwardSchedule]) -> list[ForwardSchedule]:
        return without_faults(both, schedules, arguments.workers)

    if arguments.list:
        for schedule in good(tiles(rule)[: arguments.limit]):
            clocks = forward_cost(schedule).clocks
            print(f"  {describe(schedule):40} {clocks:.0f} clocks a block")
        return
    need_gpu()
    deadline = time.monotonic() + 60 * arguments.minutes
    bench = Bench(cases, options, arguments.rounds)
    found = search(
        rule,
        bench.gains,
        good,
        arguments.limit,
        lambda: time.monotonic() > deadline,
        arguments.exclude,
    )
    first, *others = list(found)
    if first == rule:
        print("the rule stands")
        return
    again = Bench(cases, options, 2 * arguments.rounds + 1).gains(rule, [first])
    margin = min(found[first], again.get(first, 0.0))
    print(f"{describe(first)}: {found[first]:.3f}, second run {again.get(first, 0.0):.3f}")
    if margin <= sm90_tuned.MARGIN:
        print(f"the rule stands: the margin is not above {sm90_tuned.MARGIN}")
    elif arguments.write:
        row = row_for(wanted, first, margin, (others[0], found[others[0]]), cases)
        sm90_tuned.write_row(row, sm90_tuned.TABLE)
        print(f"written to {sm90_tuned.TABLE}")
    else:
        print("not written: --write was not given")


if __name__ == "__main__":
    main()

"""The tables of schedules in docs/schedules.md and docs/blackwell.md, made from what dispatch uses.

python -m fa4.schedule_table docs/schedules.md     writes the table into the page
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines import sm100
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule

BEGIN = "<!-- Generated: python -m fa4.schedule_table docs/schedules.md -->"
BLACKWELL_BEGIN = "<!-- Generated: python -m fa4.schedule_table docs/blackwell.md -->"
END = "<!-- End of what is generated -->"

# Kinds of kernels that may have schedules of their own, by the words of the documentation.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"has_right_bound": True},
    "window": {"has_left_bound": True, "has_right_bound": True},
    "softcap": {"score": "softcap"},
    "scale <= 0": {"score": "scaled"},
    "varlen": {"packed_q": True, "packed_k": True},
    "seqused": {"has_seqused_q": True, "has_seqused_k": True},
}

COLUMNS = (
    "head_dim",
    "head_dim_v",
    "kernels",
    "tile_m x tile_n",
    "K/V stages",
    "O lies in",
    "turns",
    "short last block",
    "registers: consumer, producer",
    "of which O + S + P",
    "shared memory, KiB",
)


def forward_table() -> str:
    """The forward schedules, a line for each pair of head dim classes and distinct schedule."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for head_dim in HEAD_DIM_CLASSES:
        for head_dim_v in HEAD_DIM_CLASSES:
            rows += _rows(head_dim, head_dim_v)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(head_dim: int, head_dim_v: int) -> list[tuple[str, ...]]:
    kinds_of: dict[ForwardSchedule, list[str]] = {}
    for kind, options in KINDS.items():
        schedule = forward_schedule(
            ForwardFeatures(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, **options)
        )
        kinds_of.setdefault(schedule, []).append(kind)
    return [
        (
            str(head_dim),
            str(head_dim_v),
            _words(kinds),
            f"{schedule.tile_m} x {schedule.tile_n}",
            str(schedule.stages),
            "V's stages" if schedule.o_shares_v else "slabs of its own",
            "yes" if schedule.takes_turns else "no",
            str(schedule.short_n or "no"),
            f"{schedule.consumer_registers}, {schedule.producer_registers}",
            str(schedule.accumulator_registers),
            f"{schedule.smem_bytes / 1024:g}",
        )
        for schedule, kinds in kinds_of.items()
    ]


def _words(kinds: list[str]) -> str:
    """Kinds as a list, "all" if they are all there are."""
    return "all" if kinds == list(KINDS) else ", ".join(kinds)


BLACKWELL_COLUMNS = (
    "head_dim",
    "head_dim_v",
    "rows of a sequence",
    "kernels",
    "query tiles x rows",
    "CTAs",
    "K/V stages",
    "O lies in",
    "registers: softmax, correction, others",
    "exponentials of 32 on FMA units",
    "shared memory, KiB",
    "TMEM columns",
)
# Longest sequences that one CTA is chosen for, by the words of the documentation.
ROWS_OF_A_SEQUENCE = {"few": 1, "many": None}


def blackwell_table() -> str:
    """The Blackwell forward schedules, a line for each pair of equal head dim classes, or the pair
    of latent attention, and distinct schedule but for the tile order."""
    rows = [BLACKWELL_COLUMNS, ("---",) * len(BLACKWELL_COLUMNS)]
    for head_dim, head_dim_v in (*((dim, dim) for dim in HEAD_DIM_CLASSES), (192, 128)):
        for words, limit in ROWS_OF_A_SEQUENCE.items():
            kinds_of: dict[sm100.ForwardSchedule, list[str]] = {}
            for kind, options in KINDS.items():
                features = ForwardFeatures("bf16", head_dim, head_dim_v, **options)
                schedule = dataclasses.replace(
                    sm100.forward_schedule(features, limit), tile_order="static"
                )
                kinds_of.setdefault(schedule, []).append(kind)
            rows += [
                (
                    str(head_dim),
                    str(head_dim_v),
                    words,
                    _words(kinds),
                    f"{schedule.query_tiles} x {schedule.tile_rows}",
                    str(schedule.ctas),
                    str(schedule.stages),
                    "Q's slabs" if schedule.o_shares_q else "slabs of its own",
                    f"{schedule.softmax_registers}, {schedule.correction_registers}, "
                    f"{schedule.other_registers}",
                    str(schedule.exp2_polynomials),
                    f"{schedule.smem_bytes / 1024:g}",
                    str(schedule.used_columns),
                )
                for schedule, kinds in kinds_of.items()
            ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


TABLES = {BEGIN: forward_table, BLACKWELL_BEGIN: blackwell_table}


def table_in(page: str) -> str:
    """The generated part of a page."""
    return _split(page)[1]


def with_table(page: str) -> str:
    """A page with what is generated in it made anew."""
    before, _, behind = _split(page)
    return before + TABLES[before.splitlines()[-1]]() + behind


def _split(page: str) -> tuple[str, str, str]:
    mark = next((mark for mark in TABLES if f"{mark}\n" in page), BEGIN)
    begin, end = page.find(f"{mark}\n"), page.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"the page does not have the lines {mark!r} and, below it, {END!r}.")
    begin += len(mark) + 1
    return page[:begin], page[begin:end], page[end:]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fa4.schedule_table PAGE")
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

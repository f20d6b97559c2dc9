"""Which warp runs next, for how long, and when asynchronous copies happen.

A correct kernel gives the same result under every policy. "round_robin" is the plain order: each
warp runs until it must wait, copies happen when they are issued. "random" switches at random, and
copies happen at random moments after they were issued, in any order. "adversarial" gives warps
random priorities, runs the highest as long as it can and changes a priority now and then
(Burckhardt et al. 2010, probabilistic concurrency testing), and lets copies happen when nothing
else can run. Under both, waits of limited time, which kernels have to repeat, may end too early.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from fa4.emulator.errors import Deadlock
from fa4.emulator.warp import Deferred, Warp

Place = tuple[tuple[int, int, int], int]  # a CTA's position, and a warp of it
NAMES = ("round_robin", "random", "adversarial")
_GIVES_UP = 0.9  # probability; less than 1, so that loops around waits come to sleep
_QUANTUM = 1 << 16  # blocks; no warp spins for ever on what another will store


class Policy(Protocol):
    def choose(self, ready: Sequence[Warp]) -> tuple[Warp, int]:
        """A warp that can run, and for how many blocks."""

    def postpones(self, copy: Deferred) -> bool:
        """Whether a copy that is issued now happens later."""

    def completes_now(self) -> bool:
        """Whether a pending copy happens before the next warp runs."""

    def pick(self, pending: int) -> int:
        """Which of the pending copies happens."""

    def gives_up(self) -> bool:
        """Whether a wait of limited time ends without what it waits for."""


class _RoundRobin:
    def __init__(self) -> None:
        self.last: Place = ((-1, -1, -1), -1)

    def choose(self, ready: Sequence[Warp]) -> tuple[Warp, int]:
        places = [(warp.cta.position, warp.index) for warp in ready]
        after = [place for place in places if place > self.last]
        self.last = min(after or places)
        return ready[places.index(self.last)], _QUANTUM

    def postpones(self, copy: Deferred) -> bool:
        return False

    def completes_now(self) -> bool:
        return True

    def pick(self, pending: int) -> int:
        return 0

    def gives_up(self) -> bool:
        return False


class _Random:
    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def choose(self, ready: Sequence[Warp]) -> tuple[Warp, int]:
        return self.random.choice(ready), self.random.randint(1, 16)

    def postpones(self, copy: Deferred) -> bool:
        return self.random.random() < 0.75

    def completes_now(self) -> bool:
        return self.random.random() < 0.25

    def pick(self, pending: int) -> int:
        return self.random.randrange(pending)

    def gives_up(self) -> bool:
        return self.random.random() < _GIVES_UP


class _Adversarial:
    CHANGE = 0.02  # probability that the running warp falls behind all others
    MERCY = 0.02  # probability that a copy is made though a warp can run

    def __init__(self, seed: int, is_merciful: bool):
        self.random = random.Random(seed)
        self.is_merciful = is_merciful
        self.priorities: dict[Place, float] = {}

    def choose(self, ready: Sequence[Warp]) -> tuple[Warp, int]:
        warp = max(ready, key=self._priority)
        if self.random.random() < self.CHANGE:
            place = warp.cta.position, warp.index
            self.priorities[place] = min(self.priorities.values()) - self.random.random()
        return warp, self.random.randint(1, 64)

    def _priority(self, warp: Warp) -> float:
        return self.priorities.setdefault((warp.cta.position, warp.index), self.random.random())

    def postpones(self, copy: Deferred) -> bool:
        return True

    def completes_now(self) -> bool:
        return self.is_merciful and self.random.random() < self.MERCY

    def pick(self, pending: int) -> int:
        return self.random.randrange(pending)

    def gives_up(self) -> bool:
        return self.random.random() < _GIVES_UP


def policy(name: str, seed: int, polls: bool = False) -> Policy:
    """polls  warps may ask memory again and again for what others will write.

    Then the adversary cannot put off copies until no warp can run: there would always be one.
    """
    if name == "round_robin":
        return _RoundRobin()
    if name == "random":
        return _Random(seed)
    if name == "adversarial":
        return _Adversarial(seed, is_merciful=polls)
    raise ValueError(f"schedule is {name!r}; allowed are {', '.join(NAMES)}.")


class Scheduler:
    """Runs the warps of a cluster to their end."""

    def __init__(self, chosen: Policy):
        self.policy = chosen
        self.pending: list[Deferred] = []

    def defer(self, copy: Deferred) -> None:
        if self.policy.postpones(copy):
            self.pending.append(copy)
        else:
            copy.complete()

    def run(self, warps: Sequence[Warp]) -> None:
        """Raises `Deadlock` with what each warp waits for."""
        while True:
            if self.pending and self.policy.completes_now():
                self._complete_one()
            ready = [warp for warp in warps if warp.can_run()]
            if ready:
                warp, blocks = self.policy.choose(ready)
                warp.run(blocks)
            elif self.pending:
                self._complete_one()
            elif all(warp.has_exited for warp in warps):
                return
            else:
                raise Deadlock(_report(warps))

    def _complete_one(self) -> None:
        self.pending.pop(self.policy.pick(len(self.pending))).complete()


def _report(warps: Sequence[Warp]) -> str:
    waiting = [warp for warp in warps if not warp.has_exited]
    exited = len(warps) - len(waiting)
    lines = "\n".join(f"  {warp.describe()}" for warp in waiting)
    return f"No warp can go on; {exited} of {len(warps)} have exited, the others wait:\n{lines}"

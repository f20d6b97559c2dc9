"""Barriers: mbarriers in shared memory, named barriers of a CTA, and the cluster's barrier.

They only count. Waits are polls that the scheduler repeats until they are true, so every waiting
method may be called again and again without further effect. Methods named ``describe`` give the
text that a deadlock report shows.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from fa4.emulator.errors import BarrierMisuse

WARP_LANES = 32
NUM_NAMED_BARRIERS = 16
MAX_COUNT = (1 << 20) - 1  # of arrivals, and of bytes either way


@dataclass
class MBarrier:
    """One mbarrier: a phase completes when no arrival and no byte is pending.

    count    arrivals of a phase
    pending  arrivals that the phase still waits for
    tx       bytes that it still waits for; negative while bytes came before they were expected
    phase    number of completed phases; hardware keeps its lowest bit only
    """

    count: int
    name: str = "mbarrier"
    pending: int = field(init=False)
    tx: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise BarrierMisuse(
                f"{self.name} is initialised with a count of {self.count}; allowed are 1 to "
                f"{MAX_COUNT}."
            )
        self.pending = self.count

    def arrive(self, arrivals: int = 1, expected_bytes: int = 0, drop: bool = False) -> int:
        """Expect bytes, then arrive. Returns a token for `test_state`: the phase it arrived in.

        drop  also lower the count of the phases that follow
        """
        token = self.phase
        self.expect_tx(expected_bytes)
        if arrivals > self.pending:
            raise BarrierMisuse(
                f"{arrivals} arrivals at {self.describe()}: more than it still waits for."
            )
        self.pending -= arrivals
        if drop:
            self.count -= arrivals
        if self.pending == 0 and self.tx < 0:
            raise BarrierMisuse(
                f"{self.describe()} got its last arrival, but {-self.tx} more bytes than it was "
                "told to expect: it never completes."
            )
        self._complete_if_due()
        return token

    def expect_tx(self, nbytes: int) -> None:
        if nbytes < 0 or self.tx + nbytes > MAX_COUNT:
            raise BarrierMisuse(
                f"{self.describe()} is told to expect {nbytes} more bytes; at most {MAX_COUNT} "
                "can be pending."
            )
        self.tx += nbytes

    def complete_tx(self, nbytes: int) -> None:
        if self.tx - nbytes < -MAX_COUNT:
            raise BarrierMisuse(
                f"{nbytes} bytes complete at {self.describe()}, beyond the {MAX_COUNT} that may "
                "come early."
            )
        self.tx -= nbytes
        if self.pending == 0 and self.tx < 0:
            raise BarrierMisuse(
                f"{nbytes} bytes complete at {self.describe()}: more than it was told to expect."
            )
        self._complete_if_due()

    def test_parity(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: on a fresh barrier that of parity 1 is."""
        return (self.phase & 1) != (parity & 1)

    def test_state(self, token: int) -> bool:
        """Whether the phase of an `arrive` is complete."""
        return self.phase != token

    def describe(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, parity {self.phase & 1}, {self.pending} of "
            f"{self.count} arrivals and {self.tx} bytes pending)"
        )

    def _complete_if_due(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count


class MBarriers:
    """The mbarriers in one CTA's shared memory, by offset."""

    NBYTES = 8  # of each, and its alignment

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._barriers: dict[int, MBarrier] = {}

    def init(self, offset: int, count: int) -> MBarrier:
        """Initialise, or initialise again: hardware allows that only after `invalidate`."""
        if offset % self.NBYTES:
            raise BarrierMisuse(f"{self._name(offset)} must be aligned to {self.NBYTES} bytes.")
        if offset in self._barriers:
            raise BarrierMisuse(
                f"{self._barriers[offset].describe()} is initialised again without being "
                "invalidated."
            )
        barrier = MBarrier(count, self._name(offset))
        self._barriers[offset] = barrier
        return barrier

    def invalidate(self, offset: int) -> None:
        self.at(offset)
        del self._barriers[offset]

    def at(self, offset: int) -> MBarrier:
        barrier = self._barriers.get(offset)
        if barrier is None:
            raise BarrierMisuse(f"{self._name(offset)} is used, but it was never initialised.")
        return barrier

    def require_apart(self, offset: int, size: int, what: str) -> None:
        """Raise where a write to [offset, offset + size) of shared memory hits an mbarrier."""
        for place, barrier in self._barriers.items():
            if place < offset + size and offset < place + self.NBYTES:
                raise BarrierMisuse(
                    f"{what} of bytes {offset} to {offset + size} overwrites {barrier.describe()}."
                )

    def __iter__(self) -> Iterator[MBarrier]:
        return iter(self._barriers.values())

    def _name(self, offset: int) -> str:
        return f"mbarrier at shared offset {offset} of CTA rank {self.rank}"


@dataclass
class _NamedBarrier:
    expected: int = 0  # threads of the generation; 0 before its first arrival
    arrived: int = 0
    generation: int = 0


class NamedBarriers:
    """Barriers 0 to 15 of a CTA (`bar`, `barrier`).

    A barrier counts threads, a warp at a time. Every arrival at one generation must name the same
    number of threads.
    """

    def __init__(self) -> None:
        self._barriers = [_NamedBarrier() for _ in range(NUM_NAMED_BARRIERS)]
        self._waiting: dict[Hashable, tuple[int, int]] = {}  # warp: barrier, generation

    def arrive(self, barrier_id: int, num_threads: int, threads: int = WARP_LANES) -> int:
        """Count ``threads`` of ``num_threads``; returns the generation that they belong to."""
        barrier = self._at(barrier_id)
        if num_threads <= 0 or num_threads % WARP_LANES:
            raise BarrierMisuse(
                f"named barrier {barrier_id} is used with {num_threads} threads; allowed are "
                f"positive multiples of {WARP_LANES}."
            )
        if barrier.expected not in (0, num_threads):
            raise BarrierMisuse(
                f"named barrier {barrier_id} is used with {num_threads} threads while "
                f"{barrier.arrived} of {barrier.expected} have arrived."
            )
        if barrier.arrived + threads > num_threads:
            raise BarrierMisuse(
                f"{threads} threads arrive at named barrier {barrier_id}, of whose {num_threads} "
                f"threads {barrier.arrived} have arrived."
            )
        generation = barrier.generation
        barrier.expected = num_threads
        barrier.arrived += threads
        if barrier.arrived == num_threads:
            barrier.expected = barrier.arrived = 0
            barrier.generation += 1
        return generation

    def generation(self, barrier_id: int) -> int:
        """The number of generations that are complete."""
        return self._at(barrier_id).generation

    def passed(self, barrier_id: int, generation: int) -> bool:
        return self._at(barrier_id).generation != generation

    def sync(self, warp: Hashable, barrier_id: int, num_threads: int) -> bool:
        """Arrive with a warp at the first call, then poll. True once, when the warp may go on."""
        if warp not in self._waiting:
            self._waiting[warp] = (barrier_id, self.arrive(barrier_id, num_threads))
        if not self.passed(*self._waiting[warp]):
            return False
        del self._waiting[warp]
        return True

    def describe(self, barrier_id: int) -> str:
        barrier = self._at(barrier_id)
        return (
            f"named barrier {barrier_id} ({barrier.arrived} of {barrier.expected} threads have "
            f"arrived, generation {barrier.generation})"
        )

    def _at(self, barrier_id: int) -> _NamedBarrier:
        if not 0 <= barrier_id < NUM_NAMED_BARRIERS:
            raise BarrierMisuse(
                f"named barrier {barrier_id} does not exist; there are {NUM_NAMED_BARRIERS}."
            )
        return self._barriers[barrier_id]


class ClusterBarrier:
    """The barrier of all warps of a cluster (`barrier.cluster`): arrive, later wait."""

    def __init__(self, warps: int) -> None:
        self.warps = warps  # that have not exited
        self.generation = 0
        self._arrived = 0
        self._tokens: dict[Hashable, int] = {}  # warp: generation of its arrival

    def arrive(self, warp: Hashable) -> None:
        if warp in self._tokens:
            raise BarrierMisuse(
                f"warp {warp} arrives twice at the cluster's barrier without a wait between."
            )
        self._tokens[warp] = self.generation
        self._arrived += 1
        self._complete_if_due()

    def is_over(self, warp: Hashable) -> bool:
        """Whether the warp has arrived and may go on."""
        return self._tokens.get(warp, self.generation) != self.generation

    def wait(self, warp: Hashable) -> bool:
        """Poll; true once, when the warp may go on."""
        if warp not in self._tokens:
            raise BarrierMisuse(f"warp {warp} waits at the cluster's barrier without arriving.")
        if self._tokens[warp] == self.generation:
            return False
        del self._tokens[warp]
        return True

    def exit(self, warp: Hashable) -> None:
        """A warp that exits is no longer waited for."""
        if self._tokens.pop(warp, None) == self.generation:
            self._arrived -= 1
        self.warps -= 1
        self._complete_if_due()

    def describe(self) -> str:
        return (
            f"the cluster's barrier ({self._arrived} of {self.warps} warps have arrived, "
            f"generation {self.generation})"
        )

    def _complete_if_due(self) -> None:
        if 0 < self.warps == self._arrived:
            self._arrived = 0
            self.generation += 1

"""What all trials and rounds of a cell share, what a trial found out, and estimates of what the rounds will
take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.hosts.memory import can_freeze_and_read
from moe_routing_bench.bench.hosts.messages import Described
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.series import SAMPLE_OVERHEAD, fewest_rounds
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import MIN_ROUNDS
from moe_routing_bench.core.accuracy import Verdict
from moe_routing_bench.workloads.experiment import LONG_CALL, Experiment, ImplementationRef

GATE_CALLS = ((0, 0), (10, 1))  # number and step; the first is called twice
PATIENCE = 0.3  # the share of a cell's time that one trial may take
FAR_BEHIND = 10.0  # so many times the best time
MIN_LIMIT = 10.0  # seconds that a request may take even when the time is over
NEAR = 4.0  # calls whose times differ by no more than this factor: a sample has the same number of both
SLOW = 5.0  # so many times the best time, an implementation leaves early

Watch = Callable[[], str | None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a trial: Trial(status=Status.PASSED, about=Described(label="index_add"), calls=4, ...)"""

    status: Status
    reason: str = ""
    about: Described
    checks: tuple[str, ...] = ()  # those it passed
    verdict: Verdict | None = None
    first_call: float | None = None
    runs: str = ""  # what really ran, in words
    calls: int = 1  # enough to make a sample long enough for the clock
    call_seconds: float = 0.0  # roughly, the best of a few samples
    at_least: float = 0.0  # instead of these: what a call took with fewer tokens
    peak_rss_bytes: int | None = None
    log_tail: str = ""

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def long(self) -> bool:
        """Is a call so long that none is needed before it to fill the caches?"""
        return self.call_seconds >= LONG_CALL


class Numbers:
    """Call numbers that were not used before: take(3) gives the first of three."""

    def __init__(self, first: int = 100):
        self._next = first

    def take(self, calls: int = 1) -> int:
        first, self._next = self._next, self._next + calls + 1
        return first


@dataclass(kw_only=True)
class Setup:
    """What stays the same for all trials and rounds of a cell.

    outside: implementations that are not our own code
    sources: hashes of the code that runs
    watch:   called after every turn; returns a sentence if something outside was touched, such as the
             results file
    """

    experiment: Experiment
    judge: Judge
    cores: tuple[int, ...]
    budget: Budget
    watch: Watch = lambda: None
    outside: frozenset[ImplementationRef] = frozenset()
    sources: Mapping[ImplementationRef, str] = field(default_factory=dict)
    trials: dict[ImplementationRef, Trial] = field(default_factory=dict)
    described: dict[ImplementationRef, Described] = field(default_factory=dict)  # those in their trial too
    numbers: Numbers = field(default_factory=Numbers)
    best_seconds: float = math.inf  # of a call, of those tried so far

    def too_slow(self, call_seconds: float) -> bool:
        """True if it is far behind, and its trial and the fewest rounds would take the time of the others."""
        needed = (len(GATE_CALLS) + MIN_ROUNDS + 2) * call_seconds
        return call_seconds > FAR_BEHIND * self.best_seconds and needed > PATIENCE * self.budget.seconds

    def about(self, implementation: ImplementationRef) -> Described:
        """Returns what it declared in its trial."""
        return self.described.get(implementation) or self.trials[implementation].about

    @property
    def can_freeze(self) -> bool:
        """True if the parent itself can time code from outside here (hosts/isolated.py)."""
        return self.experiment.device == "cpu" and can_freeze_and_read()

    def compiles(self, implementation: ImplementationRef) -> bool:
        """True if the first call and the kit compile kernels, which takes none of the time for measuring."""
        ours = implementation not in self.outside
        return self.experiment.device != "cpu" or (ours and self.about(implementation).compiles)

    @property
    def limit(self) -> float:
        """Seconds for one request, so that a single call cannot use more than the whole budget. What does not
        count, such as a compilation, may take longer."""
        if self.budget.is_paused:
            return self.experiment.step_seconds
        return min(self.experiment.step_seconds, max(self.budget.left, MIN_LIMIT))

    def calls(self, implementation: ImplementationRef, baseline: ImplementationRef) -> int:
        """Returns the calls in a sample: the baseline's number, unless the implementation is several times
        slower or faster.

        The first call of a sample is slower than the rest, so the times of the same code with 16 and with 4
        calls differ by up to a tenth.
        """
        mine, its = self.trials[implementation], self.trials[baseline]
        near = 1 / NEAR <= mine.call_seconds / its.call_seconds <= NEAR
        return its.calls if near else mine.calls

    def sample_seconds(self, implementation: ImplementationRef, calls: int, call_seconds: float) -> float:
        """Estimates the seconds of a sample, with the call before it that fills the caches."""
        before = 0 if self.trials[implementation].long and implementation not in self.outside else 1
        return (calls + before) * call_seconds + SAMPLE_OVERHEAD

    def round_seconds(self, alive: Sequence[ImplementationRef]) -> dict[ImplementationRef, float]:
        """Estimates how long each implementation's part of a round takes, with the copies of the baseline."""
        seconds = {}
        for s in alive:
            copies = 2 if s == alive[0] or s in self.outside else 1
            sample = self.sample_seconds(s, self.calls(s, alive[0]), self.trials[s].call_seconds)
            seconds[s] = copies * sample
        return seconds

    def deciding_rounds(self, implementations: int) -> int:
        """Rounds that decide each comparison of so many, if all are on one side; time is shared by them."""
        return min(fewest_rounds(implementations), self.experiment.max_rounds)

    def judging_seconds(self, alive: Sequence[ImplementationRef]) -> float:
        """About how long the right results of one call of each take: one for each question."""
        oracles = 0 if self.judges_known(alive) else len({s.question for s in alive})
        return oracles * self.judge.oracle_seconds

    def judges_known(self, alive: Sequence[ImplementationRef]) -> bool:
        """Are timed calls judged on inputs of the trials, whose right results are known? Those of our own
        code are, if a sample is one call. Code from outside has never seen what it is judged on."""
        if not self.outside.isdisjoint(alive) or any(self.calls(s, alive[0]) > 1 for s in alive):
            return False
        return all(self.judge.knows(*call, s) for call in GATE_CALLS for s in alive)

    def all_judging_seconds(self, alive: Sequence[ImplementationRef]) -> float:
        """The same for all their calls that are judged; of our own code, the last one's result is known."""
        return (self.experiment.checked - self.outside.isdisjoint(alive)) * self.judging_seconds(alive)

    def slow_ones(self, alive: Sequence[ImplementationRef]) -> set[ImplementationRef]:
        """Returns the implementations that are so slow that a few rounds show it; none if the experiment says
        `all`."""
        best = min((self.trials[s].call_seconds for s in alive), default=0.0)
        if self.experiment.all:
            return set()
        return {s for s in alive[1:] if self.trials[s].call_seconds > SLOW * best}

"""What all trials and rounds of a cell share, what a trial found out, and about what the rounds will cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.hosts.memory import can_freeze_and_read
from moe_routing_bench.bench.hosts.messages import Described
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.series import SAMPLE_OVERHEAD
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import MIN_ROUNDS
from moe_routing_bench.core.accuracy import Verdict
from moe_routing_bench.workloads.experiment import LONG_CALL, Experiment, ImplementationRef

GATE_CALLS = ((0, 0), (10, 1))  # number and step; the first is called twice
PATIENCE = 0.3  # the share of a cell's time that one trial may take
FAR_BEHIND = 10.0  # so many times the best time
MIN_LIMIT = 10.0  # seconds that a request may take even when the time is over
NEAR = 4.0  # calls whose times differ by no more than this factor: a sample has the same number of both
SLOW = 5.0  # so many times the best time, a subject leaves early

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
    numbers: Numbers = field(default_factory=Numbers)
    best_seconds: float = math.inf  # of a call, of those tried so far

    def too_slow(self, call_seconds: float) -> bool:
        """Is it far behind, and would its trial and the fewest rounds take the time of the others?"""
        needed = (len(GATE_CALLS) + MIN_ROUNDS + 2) * call_seconds
        return call_seconds > FAR_BEHIND * self.best_seconds and needed > PATIENCE * self.budget.seconds

    @property
    def can_freeze(self) -> bool:
        """Can the parent itself time code from outside here (hosts/isolated.py)?"""
        return self.experiment.device == "cpu" and can_freeze_and_read()

    @property
    def limit(self) -> float:
        """Seconds for one request: a single call must not use up the whole budget and more."""
        return min(self.experiment.step_seconds, max(self.budget.left, MIN_LIMIT))

    def calls(self, subject: ImplementationRef, baseline: ImplementationRef) -> int:
        """Calls in a sample: the baseline's number, unless a subject is several times slower or faster.

        The first call of a sample is slower than the rest, so the times of the same code with 16 and with 4
        calls differ by up to a tenth.
        """
        mine, its = self.trials[subject], self.trials[baseline]
        near = 1 / NEAR <= mine.call_seconds / its.call_seconds <= NEAR
        return its.calls if near else mine.calls

    def sample_seconds(self, subject: ImplementationRef, calls: int, call_seconds: float) -> float:
        """About what a sample takes, with the call before it that fills the caches."""
        before = 0 if self.trials[subject].long and subject not in self.outside else 1
        return (calls + before) * call_seconds + SAMPLE_OVERHEAD

    def round_seconds(self, alive: Sequence[ImplementationRef]) -> dict[ImplementationRef, float]:
        """About how long each subject's part of a round takes, with that of the baseline's copies."""
        seconds = {}
        for s in alive:
            copies = 2 if s == alive[0] or s in self.outside else 1
            sample = self.sample_seconds(s, self.calls(s, alive[0]), self.trials[s].call_seconds)
            seconds[s] = copies * sample
        return seconds

    def slow_ones(self, alive: Sequence[ImplementationRef]) -> set[ImplementationRef]:
        """Subjects so much slower than the best that a few rounds show it; none with the policy's `all`."""
        best = min((self.trials[s].call_seconds for s in alive), default=0.0)
        if self.experiment.all:
            return set()
        return {s for s in alive[1:] if self.trials[s].call_seconds > SLOW * best}

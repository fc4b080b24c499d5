"""The protocol for code from outside: it and the baseline beside it run in a process each, on the same secret
inputs, by the parent's clock.

A turn:  the worker makes views of its slots and, for hot caches, one untimed call on other inputs; it is
         frozen; the parent writes the inputs, starts the clock, wakes it and says go; it calls and says done;
         it is frozen, and only then the clock stops. The parent reads the results from its memory.

So before the clock there is nothing to compute, since the inputs do not exist yet, and after it nothing runs.
What waking and freezing cost is measured with calls that do nothing, and taken off the times of both. A
baseline that is several times as fast makes more calls in a sample, or that cost would be most of its time.
Code from outside never makes more than the baseline, since each of its results is compared with one of that.
Samples are short, because most of what disturbs this machine lasts longer than two of them: with blocks of
1, 5 and 20 ms in turn, a second of timed calls tells a ratio to 0.1 %, 0.4 % and 0.8 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median

from moe_routing_bench.bench.calls import Result
from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.outside.checking import Checker
from moe_routing_bench.bench.outside.seats import Drawn, Seat, Secret
from moe_routing_bench.bench.series import NEAR
from moe_routing_bench.bench.supervisor import SubjectError
from moe_routing_bench.bench.trial import Trial
from moe_routing_bench.workloads.experiment import Question

MAX_COST = 0.1  # of a sample, for waking and freezing; more is not taken off, since too little would be left
MAX_CALLS = 128  # of a sample: each has its own inputs, which take longer to draw than short calls to run
MAX_SAMPLE_SECONDS = 0.05  # no more calls than this takes
MAX_SLOT_BYTES = 2**28
ORACLE_SHARE = 0.25  # of the time, where each result needs an oracle of its own


class PairError(SubjectError):
    """A series of a pair failed, perhaps not the one whose turn it is."""

    def __init__(self, series: int, failure: SubjectError):
        super().__init__(failure.status, failure.reason)
        self.series = series


class Pair:
    """Two series that get the same inputs in every round: code from outside, and the baseline beside it.

    trusted: the series whose results need no check of their own
    """

    def __init__(
        self, secret: Secret, indexes: Mapping[int, int], trials: Mapping[int, Trial],
        trusted: frozenset[int],
    ):  # fmt: skip
        self.secret, self.indexes, self.trials, self.trusted = secret, indexes, trials, trusted
        self.calls = dict.fromkeys(indexes, 1)  # in a sample
        self.seats: dict[int, Seat] = {}
        self.numbers: list[int] = []
        self.steps: list[int] = []
        self.drawn: dict[Question, Drawn] = {}
        self.results: dict[int, list[Result]] = {}
        self.rounds = 0
        self.compared = 0
        self.judged = dict.fromkeys(indexes, 0)
        self.cost, self.taken_off = dict.fromkeys(indexes, 0.0), dict.fromkeys(indexes, 0.0)
        self.sample_seconds: dict[int, list[float]] = {series: [] for series in indexes}
        self._started, self._oracle_seconds = time.perf_counter(), 0.0
        subjects = {series: secret.experiment.implementations[index] for series, index in indexes.items()}
        self.same_question = len({subject.question for subject in subjects.values()}) == 1
        self.checkers = {
            series: Checker(secret.judge, secret.right(subject)) for series, subject in subjects.items()
        }

    def move_in(self) -> None:
        """Start both processes; then choose how many calls make the protocol's cost small."""
        trials = {series: self.trials[index] for series, index in self.indexes.items()}
        seconds = {series: trial.call_seconds for series, trial in trials.items()}
        single = self.secret.experiment.cache != "hot"
        single = single or any(trial.about.reuses_output for trial in trials.values())
        apart = self._apart(seconds) and not single
        slow, fast = max(seconds.values()), min(seconds.values())
        for series, index in self.indexes.items():
            longest = seconds[series] if apart else slow
            most = 1 if single else min(MAX_CALLS, math.ceil(MAX_SAMPLE_SECONDS / longest))
            try:
                seat = Seat(self.secret, self.secret.experiment.implementations[index], MAX_SLOT_BYTES, most)
            except SubjectError as failure:
                raise PairError(series, failure) from None
            self.seats[series] = seat
        quiet = self.seats[next(iter(self.trusted & set(self.indexes)), next(iter(self.indexes)))]
        together = min(seat.most_calls for seat in self.seats.values())
        cost = min(quiet.empty(1)) / MAX_COST
        for series, seat in self.seats.items():
            most, shortest = (seat.most_calls, seconds[series]) if apart else (together, fast)
            self.calls[series] = calls = max(1, min(most, math.ceil(cost / shortest)))
            self.cost[series] = median(quiet.empty(min(calls, quiet.most_calls)))
            enough = self.cost[series] <= 2 * MAX_COST * calls * shortest
            self.taken_off[series] = self.cost[series] if enough else 0.0

    def _apart(self, seconds: Mapping[int, float]) -> bool:
        """Is the trusted one several times as fast? Else both make the same number of calls: the first of a
        sample is slower than the rest."""
        slow = max(seconds, key=lambda series: seconds[series])
        return slow not in self.trusted and seconds[slow] > NEAR * min(seconds.values())

    def close(self) -> None:
        for seat in self.seats.values():
            seat.close()

    def sample(self, series: int) -> float:
        """Seconds per call. All results are checked."""
        if not self.numbers or series in self.results:
            self._open_round()
        seat = self.seats[series]
        try:
            question = seat.subject.question
            if question not in self.drawn:
                self.drawn[question] = seat.draw(self.numbers, self.steps)
            seconds, tensors = seat.sample(self.drawn[question].first(self.calls[series], seat.slot_bytes))
            self.results[series] = [self.checkers[series].result(one) for one in tensors]
            if series not in self.trusted:
                self._judge_by_lot(series)
        except SubjectError as failure:
            raise PairError(series, failure) from None
        self._compare()
        self.sample_seconds[series].append(seconds)
        # at least half is left: code that suddenly does nothing must not get a time of nothing
        return max(seconds - self.taken_off[series], seconds / 2) / self.calls[series]

    def finish(self, series: int) -> None:
        """One call at least is judged in full."""
        try:
            if not self.judged[series] and series in self.results:
                self._judge(series, self.secret.random.randrange(self.calls[series]))
        except SubjectError as failure:
            raise PairError(series, failure) from None

    def note(self, series: int) -> str:
        """What readers should know about how this series was timed."""
        sample = median(self.sample_seconds[series]) if self.sample_seconds[series] else math.inf
        spec = self.secret.experiment.implementations[self.indexes[series]].name
        checked = (
            f"each of its {self.compared} timed results was compared with the baseline's"
            if self._partner(series) is not None
            else "its results have no trusted one to be compared with"
        )
        cost, kept = self.cost[series], "taken off" if self.taken_off[series] else "not taken off"
        return (
            f"{spec} is from outside: timed by the parent's clock, which costs {1e6 * cost:.0f} us of a "
            f"sample of {1e3 * sample:.3g} ms ({100 * cost / sample:.1f} %, {kept}); {checked}, "
            f"and {self.judged[series]} were judged in full: it is as accurate as "
            f"{self.secret.experiment.dtype}, in whatever type it computes"
        )

    def _open_round(self) -> None:
        calls = 1 + max(self.calls.values())  # the first is the hot call
        self.numbers = list(self.secret.numbers(calls))
        self.steps = [(self.rounds + c) % ROUTINGS for c in range(calls)]
        self.rounds += 1
        self.drawn, self.results = {}, {}

    def _partner(self, series: int) -> int | None:
        """The trusted series whose results this one's are compared with."""
        others = [one for one in self.indexes if one != series and one in self.trusted]
        return others[0] if others and self.same_question else None

    def _compare(self) -> None:
        """Compare all calls of a round as soon as both have made them."""
        for series in self.indexes:
            partner = self._partner(series)
            if series in self.trusted or partner is None or not {series, partner} <= self.results.keys():
                continue
            mine, theirs = self.results[series], self.results[partner]
            drawn = next(iter(self.drawn.values()))
            for call, args in enumerate(drawn.args[1 : 1 + self.calls[series]]):
                if not self.checkers[series].alike(mine[call], theirs[call], args):
                    try:
                        self._judge(series, call)
                    except SubjectError as failure:
                        raise PairError(series, failure) from None
            self.compared += self.calls[series]

    def _judge_by_lot(self, series: int) -> None:
        """Judge a call in full if the lot says so; without a partner, as many calls as time allows."""
        experiment, secret = self.secret.experiment, self.secret
        drawn = secret.random.random() < experiment.checked / max(experiment.min_rounds, self.rounds)
        if drawn and (self._may_judge() or not self.judged[series]):
            self._judge(series, secret.random.randrange(self.calls[series]))
        if self._partner(series) is None:
            for call in secret.random.sample(range(self.calls[series]), self.calls[series]):
                if not self._may_judge():
                    return
                self._judge(series, call)

    def _may_judge(self) -> bool:
        return self._oracle_seconds <= ORACLE_SHARE * (time.perf_counter() - self._started)

    def _judge(self, series: int, call: int) -> None:
        started, index = time.perf_counter(), self.indexes[series]
        self.checkers[series].judge_in_full(
            self.results[series][call], self.numbers[call + 1], self.steps[call + 1],
            self.secret.experiment.implementations[index], self.trials[index].about.ties,
        )  # fmt: skip
        self.judged[series] += 1
        self._oracle_seconds += time.perf_counter() - started

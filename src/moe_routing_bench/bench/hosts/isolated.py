"""IsolatedHost: code from outside and the baseline beside it, in a process each, on the same secret inputs,
by the parent's clock.

A turn:  the child makes views of its slots and, for hot caches, one untimed call on other inputs; it is
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

from moe_routing_bench.bench.hosts.drawn_inputs import Drawn, Seat, Secret
from moe_routing_bench.bench.hosts.freezing import Strangers
from moe_routing_bench.bench.hosts.host import Clock, Judged, Reading, Turn
from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.series import Series
from moe_routing_bench.bench.setup import NEAR, Setup
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.core.fork_server import server_pid
from moe_routing_bench.workloads.experiment import Question

MAX_COST = 0.1  # of a sample, for waking and freezing; more is not taken off, since too little would be left
MAX_CALLS = 128  # of a sample: each has its own inputs, which take longer to draw than short calls to run
MAX_SAMPLE_SECONDS = 0.05  # no more calls than this takes
MAX_SLOT_BYTES = 2**28
ORACLE_SHARE = 0.25  # of the time, where each result needs an oracle of its own


class Isolation:
    """What all isolated processes of a set share: the secret, and the watch for processes left behind."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._secret: Secret | None = None
        self._strangers: Strangers | None = None

    @property
    def secret(self) -> Secret:
        self._secret = self._secret or Secret(self.setup)
        return self._secret

    def know_all(self) -> None:
        """What runs now was not left behind."""
        self._strangers = Strangers(server_pid())

    def end_strangers(self) -> int:
        return 0 if self._strangers is None else self._strangers.end()

    def close(self) -> None:
        self.end_strangers()
        if self._secret is not None:
            self._secret.close()
            self._secret = None


class IsolatedHost:
    """Two series that get the same inputs in every round: code from outside, and the baseline beside it. A
    baseline from outside is paired with its own twin, and nothing in that pair is trusted."""

    clock: Clock = "parent"

    def __init__(self, isolation: Isolation, pair: tuple[Series, Series]):
        self.isolation, self.setup, self.pair = isolation, isolation.setup, pair
        self.trusted = frozenset(one for one in pair if one.implementation not in self.setup.outside)
        self.same_question = len({one.implementation.question for one in pair}) == 1
        self.seats: dict[Series, Seat] = {}
        self.round: int | None = None  # its turns begin with this number
        self.numbers: list[int] = []
        self.steps: list[int] = []
        self.drawn: dict[Question, Drawn] = {}
        self.rounds = self.compared = 0
        self._started, self._oracle_seconds = time.perf_counter(), 0.0

    def prepare(self, series: Series) -> bool:
        if not self.seats:
            try:
                self._move_in()
            except BaseException:
                self.end()
                raise
            self.isolation.know_all()
        return False

    def sample(self, turn: Turn) -> Reading:
        self.prepare(turn.series)
        if turn.first != self.round:
            self._open_round(turn.first)
        seat = self.seats[turn.series]
        before = seat.child.vitals()
        with _blaming(turn.series):
            question = seat.implementation.question
            if question not in self.drawn:
                self.drawn[question] = seat.draw(self.numbers, self.steps)
            seconds, tensors = seat.sample(self.drawn[question].first(seat.calls, seat.slot_bytes))
            seat.results = [seat.checker.result(one) for one in tensors]
        if left := self.isolation.end_strangers():
            raise ImplementationError(Status.SUSPECT, f"it left {left} processes running")
        return Reading(
            # at least half is left: code that suddenly does nothing must not get a time of nothing
            seconds=max(seconds - seat.taken_off, seconds / 2) / seat.calls,
            calls=seat.calls, parent_seconds=seconds, rss_before=before.rss_bytes,
            rss_after=seat.child.vitals().rss_bytes, held=seat.held,
            # new threads may wait in a frozen process; those that work are seen by their CPU time
        )  # fmt: skip

    def judge(self, turn: Turn) -> Judged:
        """Compare all results with the partner's. Some are judged in full, by lot; and what should be kept,
        unless one was before."""
        series, seat = turn.series, self.seats[turn.series]
        before = seat.judged
        with _blaming(series):
            if series not in self.trusted:
                self._judge_by_lot(series)
            if turn.keep is not None and not seat.judged and series.role != "beside":
                self._judge(series, self._any_call(seat))
        self._compare()
        return Judged(results=seat.judged - before)

    def finish(self, series: Series) -> str:
        if series in self.trusted:
            return ""
        seat = self.seats[series]
        sample = median(seat.seconds)
        checked = (
            f"each of its {self.compared} timed results was compared with the baseline's"
            if self._partner(series) is not None
            else "its results have no trusted one to be compared with"
        )
        kept = "taken off" if seat.taken_off else "not taken off"
        return (
            f"{series.implementation.name} is from outside: timed by the parent's clock, which costs "
            f"{1e6 * seat.cost:.0f} us of a sample of {1e3 * sample:.3g} ms "
            f"({100 * seat.cost / sample:.1f} %, {kept}); "
            f"{checked}, and {seat.judged} were judged in full: it is as accurate as "
            f"{self.setup.experiment.dtype}, in whatever type it computes"
        )

    def check_weights(self) -> None:
        """Nobody but the parent can write them."""

    def harm(self) -> str:
        return next(filter(None, (seat.child.harm() for seat in self.seats.values())), "")

    def end(self) -> None:
        for seat in self.seats.values():
            seat.close()
        self.seats, self.round = {}, None

    def _move_in(self) -> None:
        """Start both processes; then choose how many calls make the protocol's cost small."""
        secret, trials = self.isolation.secret, self.setup.trials
        seconds = {one: trials[one.implementation].call_seconds for one in self.pair}
        single = self.setup.experiment.cache != "hot"
        single = single or any(trials[one.implementation].about.reuses_output for one in self.pair)
        apart = self._apart(seconds) and not single
        slow, fast = max(seconds.values()), min(seconds.values())
        for series in self.pair:
            longest = seconds[series] if apart else slow
            most = 1 if single else min(MAX_CALLS, math.ceil(MAX_SAMPLE_SECONDS / longest))
            with _blaming(series):
                self.seats[series] = Seat(secret, series.implementation, MAX_SLOT_BYTES, most)
        quiet = self.seats[next(iter(self.trusted), self.pair[0])]
        together = min(seat.most_calls for seat in self.seats.values())
        cost = min(quiet.empty(1)) / MAX_COST
        for series, seat in self.seats.items():
            most, shortest = (seat.most_calls, seconds[series]) if apart else (together, fast)
            seat.calls = max(1, min(most, math.ceil(cost / shortest)))
            seat.cost = median(quiet.empty(min(seat.calls, quiet.most_calls)))
            seat.taken_off = seat.cost if seat.cost <= 2 * MAX_COST * seat.calls * shortest else 0.0

    def _apart(self, seconds: Mapping[Series, float]) -> bool:
        """Is the trusted one several times as fast? Else both make the same number of calls: the first of a
        sample is slower than the rest."""
        slow = max(seconds, key=lambda series: seconds[series])
        return slow not in self.trusted and seconds[slow] > NEAR * min(seconds.values())

    def _open_round(self, first: int) -> None:
        calls = 1 + max(seat.calls for seat in self.seats.values())  # the first is the hot call
        self.round, self.numbers = first, list(self.isolation.secret.numbers(calls))
        self.steps = [(self.rounds + c) % ROUTINGS for c in range(calls)]
        self.rounds += 1
        self.drawn = {}
        for seat in self.seats.values():
            seat.results = []

    def _partner(self, series: Series) -> Series | None:
        """The trusted series whose results this one's are compared with."""
        others = [one for one in self.pair if one != series and one in self.trusted]
        return others[0] if others and self.same_question else None

    def _compare(self) -> None:
        """Compare all calls of a round as soon as both have made them."""
        for series, seat in self.seats.items():
            partner = self._partner(series)
            theirs = [] if partner is None else self.seats[partner].results
            if series in self.trusted or not (seat.results and theirs):
                continue
            drawn = next(iter(self.drawn.values()))
            for call, args in enumerate(drawn.args[1 : 1 + seat.calls]):
                if not seat.checker.alike(seat.results[call], theirs[call], args):
                    with _blaming(series):
                        self._judge(series, call)
            self.compared += seat.calls

    def _judge_by_lot(self, series: Series) -> None:
        """Judge a call in full if the lot says so; without a partner, as many calls as time allows."""
        experiment, dice, seat = self.setup.experiment, self.isolation.secret.random, self.seats[series]
        drawn = dice.random() < experiment.checked / max(experiment.min_rounds, self.rounds)
        if drawn and (self._may_judge() or not seat.judged):
            self._judge(series, self._any_call(seat))
        if self._partner(series) is None:
            for call in dice.sample(range(seat.calls), seat.calls):
                if not self._may_judge():
                    return
                self._judge(series, call)

    def _any_call(self, seat: Seat) -> int:
        return self.isolation.secret.random.randrange(seat.calls)

    def _may_judge(self) -> bool:
        return self._oracle_seconds <= ORACLE_SHARE * (time.perf_counter() - self._started)

    def _judge(self, series: Series, call: int) -> None:
        started, implementation, seat = time.perf_counter(), series.implementation, self.seats[series]
        seat.checker.judge_in_full(
            seat.results[call], self.numbers[call + 1], self.steps[call + 1], implementation,
            self.setup.trials[implementation].about.ties,
        )  # fmt: skip
        seat.judged += 1
        self._oracle_seconds += time.perf_counter() - started


@contextmanager
def _blaming(series: Series) -> Iterator[None]:
    """It may not be the one whose turn it is."""
    try:
        yield
    except ImplementationError as failure:
        failure.series = series
        raise

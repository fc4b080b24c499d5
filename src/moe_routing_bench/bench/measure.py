"""measure: interleaved rounds over the implementations that passed their trial, whatever hosts run them.

Every round takes one sample of each on the same inputs, in a new order, with the baseline's twin. In a few
random rounds the result of a timed call of each is judged; they share the oracle's result. One that is
several times slower than the best leaves after the few rounds that show it. One that fails leaves at once,
and the others go on.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from moe_routing_bench.bench.hosts.host import Host, Reading, Turn
from moe_routing_bench.bench.hosts.isolated import IsolatedHost, Isolation
from moe_routing_bench.bench.hosts.shared import SharedHost
from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.series import Measured, Samples, Series, fewest_rounds, lineup_of, take_rounds
from moe_routing_bench.bench.setup import GATE_CALLS, Numbers, Setup
from moe_routing_bench.bench.status import Status, SubjectError
from moe_routing_bench.bench.verdict import MIN_ROUNDS, compare, stop_reason
from moe_routing_bench.core.fork_server import server_harm
from moe_routing_bench.workloads.experiment import ImplementationRef

WARM_SAMPLES = 2
WARM_CALL = 0.01  # seconds: the calls of its trial were long enough to warm what they use
RESERVE = 0.05  # of the budget, for the last checks, the statistics and the table
MIN_SECONDS = 2.0  # of rounds, even if trials took all the time: what was tried should get a time
LOOK_EVERY = 1.2  # the precision is computed again after this factor more rounds: computing it takes time
LEAK_BYTES = 2**29
LATEST = 1.2  # of the budget: who has no place by then gets none
OVERTIME = 0.1  # of the budget, if a verdict needs no more than that
DECISIVE_ROUNDS = 9  # all on one side they show a difference, if half of the comparisons do
# largest ratio of times of the same code in two processes: 1.29 was seen for calls of 10 us, where one
# process had less to do and so colder caches
MAX_APART = 1.5

OnRound = Callable[[int, Measured], None]  # rounds so far in this set of processes


class BaselineError(Exception):
    """The baseline failed during the rounds, so there is nothing to compare with.

    subjects: all that fail for the same reason
    """

    def __init__(self, failure: SubjectError, subjects: Sequence[ImplementationRef]):
        super().__init__(failure.reason)
        self.failure, self.subjects = failure, subjects


def measure(setup: Setup, shared: Host, alive: Sequence[ImplementationRef], on_round: OnRound) -> Measured:
    """All rounds, in as many sets of processes as the policy says. BaselineError if the first fails; others
    that do are in `failed` and have no samples. shared: the host of our own code."""
    measured = Measured(
        samples={
            series: Samples(calls=setup.calls(series.implementation, alive[0]))
            for series in lineup_of(alive, setup.outside)
        }
    )
    for process in range(setup.experiment.processes):
        # who left in an earlier set of processes stays out: its samples are those of the first rounds
        done = sum(measured.rounds_by_process)
        lineup = [series for series, seen in measured.samples.items() if len(seen.seconds) == done]
        isolation = Isolation(setup)
        rounds = _Rounds(setup, tuple(alive), lineup, hosts_for(setup, shared, isolation, lineup), measured)
        try:
            if process or shared.harm():  # a published figure wants new processes
                shared.end()
            rounds.run(on_round)
        except BaseException:
            shared.end()
            raise
        finally:
            for host in rounds.all_hosts():
                if host is not shared:
                    host.end()
            isolation.close()
    return measured


def hosts_for(
    setup: Setup, shared: Host, isolation: Isolation, lineup: Sequence[Series]
) -> dict[Series, Host]:
    """Our own code shares a host. Code from outside has one with the baseline beside it, or, if it is the
    baseline, with its twin."""
    hosts: dict[Series, Host] = dict.fromkeys(lineup, shared)
    pairs = [(Series("candidate", one.owner), one) for one in lineup if one.role == "beside"]
    if lineup[0].implementation in setup.outside:
        pairs.append((lineup[0], Series("twin", lineup[0].implementation)))
    for pair in pairs:
        subjects = tuple(dict.fromkeys(one.implementation for one in pair))
        host: Host = IsolatedHost(isolation, pair) if setup.can_freeze else SharedHost(setup, subjects)
        hosts |= dict.fromkeys(pair, host)
    return hosts


class _Rounds:
    """The rounds in one set of processes. asked: all implementations, also those that have left."""

    def __init__(
        self, setup: Setup, asked: Sequence[ImplementationRef], lineup: list[Series],
        hosts: dict[Series, Host], measured: Measured,
    ):  # fmt: skip
        self.setup, self.asked, self.lineup, self.hosts = setup, asked, lineup, hosts
        self.measured, self.experiment = measured, setup.experiment
        self.baseline, self.twin = measured.baseline, measured.twin
        self.fewest = min(fewest_rounds(len(self.alive)), self.experiment.max_rounds)
        self.slow = setup.slow_ones(asked)
        self.dice = random.SystemRandom()  # so that no subject can predict which calls are judged
        checks = min(self.experiment.checked - 1, self.fewest)
        self.judged = set(self.dice.sample(range(self.fewest), checks))
        self.before = sum(measured.rounds_by_process)
        self.memory = MemoryWatch()
        self.last: Series | None = None  # whose code from outside ran last
        self.round, self.first, self.place, self.next_look = -1, 0, 0, 0
        self.began = self.longest_round = 0.0
        setup.numbers = Numbers()
        left = setup.budget.left / (self.experiment.processes - len(measured.rounds_by_process))
        self.deadline = time.perf_counter() + max(left - RESERVE * left, MIN_SECONDS)

    def run(self, on_round: OnRound) -> None:
        reason: str | None = None

        def is_over(done: int) -> bool:
            nonlocal reason
            if self.experiment.stages:
                self._take_stages(done - 1)
            self.longest_round = max(self.longest_round, time.perf_counter() - self.began)
            on_round(done, self.measured)
            self._leave(self._who_leaves(done))
            reason = self._why_stop(done)
            return reason is not None

        for series in [*self.lineup]:
            self._warm_up(series)
        take_rounds(self.lineup, self.dice, self._take, is_over)
        with self._blamed(self.alive[-1]):
            self._check_harm()
        self._finish(self.alive)
        self._check_weights()
        self.measured.rounds_by_process.append(len(self._here(self.twin)))
        self.measured.stop_reason = reason or ""

    @property
    def alive(self) -> list[Series]:
        """The lineup without the further copies of the baseline."""
        return [series for series in self.lineup if series.role in ("baseline", "candidate")]

    def all_hosts(self) -> list[Host]:
        return list({id(host): host for host in self.hosts.values()}.values())

    def _here(self, series: Series) -> list[float]:
        """Its samples in this set of processes."""
        return self.measured.samples[series].seconds[self.before :]

    def _take(self, series: Series, done: int) -> None:
        """Its sample in a round; all have the same inputs."""
        if done != self.round:
            self.round, self.began = done, time.perf_counter()
            self.first, self.place = self._numbers_for(self.lineup)
        with self._blamed(series):
            self._check_harm()
        if series not in self.lineup:  # it was to blame
            return
        with self._blamed(series):
            keep = self.place if done in self.judged and series != self.twin else None
            reading = self._sample(series, self.first, step=done % ROUTINGS, keep=keep)
            seen = self.measured.samples[series]
            seen.seconds.append(reading.seconds)
            seen.stages += [dict(reading.stages)] if reading.stages else []

    def _take_stages(self, done: int) -> None:
        for series in self.alive:
            host = self.hosts[series]
            if host.clock == "child":  # the parts of code from outside have no clock
                with self._blamed(series):
                    number, step = self.setup.numbers.take(), done % ROUTINGS
                    reading = host.sample(Turn(series=series, first=number, step=step, stages=True))
                    self.measured.samples[series].stages += [dict(reading.stages)] if reading.stages else []

    def _sample(
        self, series: Series, first: int, *, step: int = 0, keep: int | None = None, warm: bool = True
    ) -> Reading:
        """One turn with all checks. warm: memory kept by first calls, such as prepared weights, is no leak"""
        host, seen = self.hosts[series], self.measured.samples[series]
        trial = self.setup.trials[series.implementation]
        if keep is not None and trial.about.reuses_output:
            keep = seen.calls - 1  # the others are overwritten: it declares reuses_output
        turn = Turn(series=series, first=first, calls=seen.calls, step=step, keep=keep, hot=not trial.long)
        seen.isolated = host.clock == "parent"
        if seen.isolated and series.implementation in self.setup.outside:
            self.last = series
        reading = host.sample(turn)
        seen.calls = reading.calls
        seen.checked += host.judge(turn)
        if warm:
            self.memory.check(series, reading)
        if (touched := self.setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        if reading.new_threads > 0:
            raise SubjectError(Status.SUSPECT, f"it left {reading.new_threads} threads running")
        return reading

    def _warm_up(self, series: Series) -> None:
        if series not in self.lineup:  # dropped with its partner
            return
        with self._blamed(series):
            called = self.hosts[series].prepare(series)
            if called and self.setup.trials[series.implementation].call_seconds > WARM_CALL:
                return
            for _ in range(WARM_SAMPLES):
                self._sample(series, self._numbers_for([series])[0], warm=False)
        self.memory.forget(series)

    def _numbers_for(self, present: Iterable[Series]) -> tuple[int, int]:
        """The first call number of a round, and which call of each sample may be judged: one oracle serves
        all."""
        calls = [self.measured.samples[series].calls for series in present]
        return self.setup.numbers.take(max(calls)), self.dice.randrange(min(calls))

    @contextmanager
    def _blamed(self, series: Series) -> Iterator[None]:
        """Drop the subject whose turn it is if it fails; the others go on, in new processes if it shared or
        harmed theirs. BaselineError if it is the baseline."""
        try:
            yield
        except SubjectError as failure:
            guilty, failure = self._guilty(series, failure)
            if guilty == self.baseline.implementation:
                over = failure.status is Status.NO_TIME
                raise BaselineError(failure, self.asked if over else [guilty]) from None
            its = [host for one, host in self.hosts.items() if one.owner == guilty]
            self._drop(guilty, failure)
            for host in self.all_hosts():
                if host in its or host.harm():
                    host.end()
                    for one in [one for one in self.lineup if self.hosts[one] is host]:
                        self._warm_up(one)

    def _guilty(self, series: Series, failure: SubjectError) -> tuple[ImplementationRef, SubjectError]:
        """If the baseline fails beside code from outside, that code is blamed."""
        series = failure.series if isinstance(failure.series, Series) else series
        if series.role == "beside":
            reason = f"the baseline beside it is {failure.status}: {failure.reason}"
            return series.owner, SubjectError(Status.SUSPECT, reason)
        return series.implementation, failure

    def _check_harm(self) -> None:
        """What happened to a process when it was not its turn was done by the code that had one before."""
        if self.last is None:
            return
        harm = next(filter(None, (host.harm() for host in self.all_hosts())), "") or server_harm()
        if harm:
            reason = f"the process of another implementation {harm} while it was running"
            raise SubjectError(Status.SUSPECT, reason, self.last)

    def _drop(self, guilty: ImplementationRef, failure: SubjectError) -> None:
        """A subject leaves without its samples."""
        self.measured.failed[guilty] = failure
        self.last = None
        self._remove(guilty)
        for series in [one for one in self.measured.samples if one.owner == guilty]:
            del self.measured.samples[series]

    def _remove(self, subject: ImplementationRef) -> None:
        """Its series take no more turns; hosts that have no others end."""
        mine = [series for series in self.lineup if series.owner == subject]
        for series in mine:
            self.lineup.remove(series)
        for host in [self.hosts[series] for series in mine]:
            if all(self.hosts[series] is not host for series in self.lineup):
                host.end()

    def _leave(self, leaving: Sequence[Series]) -> None:
        """Subjects leave with the samples they have."""
        late = self.setup.budget.left < RESERVE * self.setup.budget.seconds
        self._finish(
            [
                series
                for series in leaving
                if not (late and self.measured.samples[series].checked)
                or series.implementation in self.setup.outside
            ]
        )
        for series in leaving:
            self._remove(series.implementation)

    def _who_leaves(self, rounds: int) -> list[Series]:
        """Those five times slower than the best, after the rounds that show it; and whoever is slowest, as
        soon as it has a place, if the others could not get the rounds that decide beside it."""
        left = self.deadline - time.perf_counter() - self.setup.judge.oracle_seconds
        seconds = {series: self._turn_seconds(series) for series in self.alive[1:]}
        whole = self._turn_seconds(self.baseline) + self._turn_seconds(self.twin) + sum(seconds.values())
        # a judged sample of each follows the rounds
        enough = self.fewest if rounds + left / whole - 1 >= self.fewest else DECISIVE_ROUNDS
        leaving = [one for one in self.alive if one.implementation in self.slow and rounds >= enough]
        if rounds < MIN_ROUNDS or rounds >= DECISIVE_ROUNDS:
            return leaving
        for series in sorted(seconds, key=lambda one: -seconds[one])[:-1]:
            if rounds + left / whole - 1 >= DECISIVE_ROUNDS:
                break
            leaving, whole = [*leaving, series], whole - seconds[series]
        return leaving

    def _turn_seconds(self, series: Series) -> float:
        """About what its turn in a round takes, and that of the baseline beside it."""
        partner = self.measured.partner(series)
        both = {series} if partner == self.baseline else {series, partner}
        return sum(
            self.setup.sample_seconds(
                one.implementation, self.measured.samples[one].calls, median(self._here(one))
            )
            for one in both
        )

    def _why_stop(self, rounds: int) -> str | None:
        experiment, budget, others = self.experiment, self.setup.budget, self.alive[1:]
        # what follows the rounds: a judged sample of each, about as long as another round and an oracle
        now = time.perf_counter()
        late = now + 1.5 * self.longest_round + self.setup.judge.oracle_seconds >= self.deadline
        if late and rounds < MIN_ROUNDS and len(others) > 1:
            slowest = max(others, key=lambda series: median(self._here(series)))
            over = f"the time was over after {rounds} rounds; --seconds gives more"
            self._drop(slowest.implementation, SubjectError(Status.NO_TIME, over))
        elif rounds < MIN_ROUNDS and now > self.deadline + (LATEST - 1) * budget.seconds:
            over = f"{rounds} rounds took all the time; --seconds gives more"
            raise BaselineError(SubjectError(Status.NO_TIME, over), self.asked)
        enough = max(experiment.min_rounds, self.fewest)
        if late:  # a few rounds more are worth their time if they bring a verdict
            soon = (self.fewest - rounds) * self.longest_round <= OVERTIME * budget.seconds
            enough = self.fewest if soon else min(MIN_ROUNDS, experiment.max_rounds)
        if rounds < enough:
            return None
        if rounds < self.next_look and not late and rounds < experiment.max_rounds:
            return None
        self.next_look = math.ceil(LOOK_EVERY * rounds)
        reason: str | None = None
        for series in self.alive[1:] or [self.twin]:
            reason = stop_reason(
                self._here(self.measured.partner(series)),
                self._here(series),
                target=experiment.target,
                min_rounds=experiment.min_rounds,
                max_rounds=experiment.max_rounds,
                seconds=budget.seconds if late else 0.0,
                max_seconds=budget.seconds,
            )
            if reason is None:
                return None
        return reason

    def _finish(self, leaving: Sequence[Series]) -> None:
        """After their last round, check again: one call, the clocks, the threads, the baseline beside."""
        if not leaving:
            return
        first, place = self._numbers_for(leaving)
        gate_number, gate_step = GATE_CALLS[0]
        for series in [one for one in leaving if one in self.lineup]:
            with self._blamed(series):
                if series.implementation in self.setup.outside:  # inputs it has never seen
                    self._sample(series, first, keep=place)
                else:  # its trial's inputs, whose right result is known
                    self._sample(series, gate_number, step=gate_step, keep=0)
                self.measured.notes += filter(None, [self.hosts[series].finish(series)])
                self._check_baseline_beside(series)

    def _check_baseline_beside(self, series: Series) -> None:
        """Code from outside that shares a process with the baseline must not slow it down."""
        partner = self.measured.partner(series)
        if partner == self.baseline or self.hosts[series].clock == "parent":
            return
        apart = compare(self._here(self.baseline)[: len(self._here(series))], self._here(partner))
        low, high = apart.interval
        if low > MAX_APART or high < 1 / MAX_APART:
            reason = f"the baseline takes {apart.ratio:.2f} times as long beside it as elsewhere"
            raise SubjectError(Status.SUSPECT, reason)

    def _check_weights(self) -> None:
        """Once for each process: sums over all the weights take a while. So of several subjects in a process
        nobody knows which one changed them. All fail, also those that left early, and the reason says so."""
        for host in self.all_hosts():
            try:
                host.check_weights()
            except SubjectError as failure:
                inside = [
                    one.implementation
                    for one in self.measured.samples
                    if self.hosts.get(one) is host and one.role in ("baseline", "candidate")
                ]
                if len(inside) > 1:
                    names = ", ".join(one.text for one in inside)
                    reason = f"{failure.reason}: those of one of {names}, which share a process"
                    failure = SubjectError(failure.status, reason)
                if self.baseline.implementation in inside:
                    raise BaselineError(failure, inside) from None
                for one in inside:
                    self._drop(one, failure)
                host.end()


class MemoryWatch:
    """Does a series keep memory from call to call?"""

    def __init__(self) -> None:
        self._seen: dict[Series, tuple[int, int]] = {}  # bytes when its rounds began, and kept since then

    def check(self, series: Series, reading: Reading) -> None:
        began, kept = self._seen.get(series, (reading.rss_before, 0))
        kept += reading.rss_after - reading.rss_before
        self._seen[series] = began, kept
        # in a shared process one may fill what another freed, so the process itself must have grown too
        if kept > LEAK_BYTES and reading.rss_after - began > LEAK_BYTES:
            reason = f"it keeps memory from call to call: {kept / 2**30:.1f} GiB over the rounds"
            raise SubjectError(Status.SUSPECT, reason)

    def forget(self, series: Series) -> None:
        """Its process is a new one."""
        self._seen.pop(series, None)

"""measure: interleaved rounds over the implementations that passed their trial, whatever hosts run them.

Every round takes one sample of each on the same inputs, in a new order, with the baseline's twin. In a few
random rounds the result of a timed call of each is judged; they share the oracle's result, and long calls of
our own code take it from their trials. One that is several times slower than the best leaves after the few
rounds that show it. One that fails leaves at once, and the others go on.
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
from moe_routing_bench.bench.series import Measured, Samples, Series, lineup_of, take_rounds
from moe_routing_bench.bench.setup import GATE_CALLS, Numbers, Setup
from moe_routing_bench.bench.status import ImplementationError, Status
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
# largest ratio of times of the same code in two processes: 1.29 was seen for calls of 10 us, where one
# process had less to do and so colder caches
MAX_APART = 1.5

OnRound = Callable[[int, Measured], None]  # rounds so far in this set of processes


class BaselineError(Exception):
    """The baseline failed during the rounds, so there is nothing to compare with.

    implementations: all that fail for the same reason
    """

    def __init__(self, failure: ImplementationError, implementations: Sequence[ImplementationRef]):
        super().__init__(failure.reason)
        self.failure, self.implementations = failure, implementations


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
        implementations = tuple(dict.fromkeys(one.implementation for one in pair))
        host: Host = IsolatedHost(isolation, pair) if setup.can_freeze else SharedHost(setup, implementations)
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
        self.fewest = setup.deciding_rounds(len(self.alive))
        self.slow = setup.slow_ones(asked)
        self.dice = random.SystemRandom()  # so that no implementation can predict which calls are judged
        checks = min(self.experiment.checked - 1, self.fewest)
        self.judged = set(self.dice.sample(range(self.fewest), checks))
        self.before = sum(measured.rounds_by_process)
        self.memory = MemoryWatch()
        self.last: Series | None = None  # whose code from outside ran last
        self.round, self.first, self.step, self.place, self.next_look = -1, 0, 0, 0, 0
        self.began = self.longest_round = 0.0  # without judging
        setup.numbers = Numbers()
        left = setup.budget.left / (self.experiment.processes - len(measured.rounds_by_process))
        self.deadline = time.perf_counter() + max(left - RESERVE * left, MIN_SECONDS)

    def run(self, on_round: OnRound) -> None:
        reason: str | None = None

        def is_over(done: int) -> bool:
            nonlocal reason
            if self.experiment.stages:
                self._take_stages(done - 1)
            judging = self._judging_seconds() if done - 1 in self.judged else 0.0
            self.longest_round = max(self.longest_round, time.perf_counter() - self.began - judging)
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
        """Returns its samples in this set of processes."""
        return self.measured.samples[series].seconds[self.before :]

    def _take(self, series: Series, done: int) -> None:
        """Takes its sample in a round. All series of a round have the same inputs."""
        if done != self.round:
            self.round, self.began = done, time.perf_counter()
            self.first, self.place = self._numbers_for(self.lineup)
            self.step = done % ROUTINGS
            if done in self.judged and self.setup.judges_known([one.implementation for one in self.alive]):
                before = sum(place < done for place in self.judged)
                (self.first, self.step), self.place = GATE_CALLS[before % len(GATE_CALLS)], 0
        with self._blamed(series):
            self._check_harm()
        if series not in self.lineup:  # it was to blame
            return
        with self._blamed(series):
            keep = self.place if done in self.judged and series != self.twin else None
            reading = self._sample(series, self.first, step=self.step, keep=keep)
            seen = self.measured.samples[series]
            seen.seconds.append(reading.seconds)
            seen.used = reading.used
            seen.launches += [reading.launch_seconds] if reading.used else []
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
        seen.calls, seen.held = reading.calls, reading.held
        seen.checked += host.judge(turn).results
        if warm:
            self.memory.check(series, reading)
        if (touched := self.setup.watch()) is not None:
            raise ImplementationError(Status.SUSPECT, touched)
        if reading.new_threads > 0:
            raise ImplementationError(Status.SUSPECT, f"it left {reading.new_threads} threads running")
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
        """Returns the first call number of a round, and which call of each sample may be judged, so that one
        oracle result serves all."""
        calls = [self.measured.samples[series].calls for series in present]
        return self.setup.numbers.take(max(calls)), self.dice.randrange(min(calls))

    @contextmanager
    def _blamed(self, series: Series) -> Iterator[None]:
        """If the implementation whose turn it is fails, it is dropped. The others go on, in new processes if
        it shared or harmed theirs. BaselineError if it is the baseline."""
        try:
            yield
        except ImplementationError as failure:
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

    def _guilty(
        self, series: Series, failure: ImplementationError
    ) -> tuple[ImplementationRef, ImplementationError]:
        """If the baseline fails beside code from outside, that code is blamed."""
        series = failure.series if isinstance(failure.series, Series) else series
        if series.role == "beside":
            reason = f"the baseline beside it is {failure.status}: {failure.reason}"
            return series.owner, ImplementationError(Status.SUSPECT, reason)
        return series.implementation, failure

    def _check_harm(self) -> None:
        """If a process was harmed while it was not its turn, the code that ran before did it."""
        if self.last is None:
            return
        harm = next(filter(None, (host.harm() for host in self.all_hosts())), "") or server_harm()
        if harm:
            reason = f"the process of another implementation {harm} while it was running"
            raise ImplementationError(Status.SUSPECT, reason, self.last)

    def _drop(self, guilty: ImplementationRef, failure: ImplementationError) -> None:
        """An implementation leaves without its samples."""
        self.measured.failed[guilty] = failure
        self.last = None
        self._remove(guilty)
        for series in [one for one in self.measured.samples if one.owner == guilty]:
            del self.measured.samples[series]

    def _remove(self, implementation: ImplementationRef) -> None:
        """Ends the turns of an implementation's series, and hosts that have no others."""
        mine = [series for series in self.lineup if series.owner == implementation]
        for series in mine:
            self.lineup.remove(series)
        for host in [self.hosts[series] for series in mine]:
            if all(self.hosts[series] is not host for series in self.lineup):
                host.end()

    def _leave(self, leaving: Sequence[Series]) -> None:
        """Implementations leave with the samples they have."""
        late = self.setup.budget.left < RESERVE * self.setup.budget.seconds
        self._finish(
            [
                series
                for series in leaving
                if not (late and self.measured.samples[series].checked)
                or series.implementation in self.setup.outside
            ]
        )
        self.longest_round -= sum(map(self._turn_seconds, leaving))
        for series in leaving:
            self._remove(series.implementation)

    def _who_leaves(self, rounds: int) -> list[Series]:
        """Those five times slower than the best, after the rounds that decide; and the slowest, once it has a
        place, if only without it the others can get those rounds."""
        if rounds >= self.fewest:
            return [one for one in self.alive if one.implementation in self.slow]
        if rounds < MIN_ROUNDS:
            return []
        to_judge = sum(place >= rounds for place in self.judged)
        left = self.deadline - time.perf_counter() - to_judge * self._judging_seconds() - self._last_oracles()
        seconds = {series: self._turn_seconds(series) for series in self.alive[1:]}
        whole = self._turn_seconds(self.baseline) + self._turn_seconds(self.twin) + sum(seconds.values())
        leaving: list[Series] = []
        for series in sorted(seconds, key=lambda one: -seconds[one]):
            if (self.fewest - rounds + 1) * whole <= left:  # a judged sample of each follows the rounds
                return leaving
            leaving, whole = [*leaving, series], whole - seconds[series]
        return []  # nobody could be decided

    def _turn_seconds(self, series: Series) -> float:
        """Estimates how long its turn in a round takes, together with the baseline beside it."""
        partner = self.measured.partner(series)
        both = {series} if partner == self.baseline else {series, partner}
        return sum(
            self.setup.sample_seconds(
                one.implementation, self.measured.samples[one].calls, median(self._here(one))
            )
            for one in both
        )

    def _judging_seconds(self) -> float:
        return self.setup.judging_seconds([series.implementation for series in self.alive])

    def _last_oracles(self) -> float:
        """Estimates the seconds for the right results of the last checks, unless they are known (_finish)."""
        outside, known = self.setup.outside, self.setup.judge.knows
        asked = [
            series.implementation
            for series in self.alive
            if series.implementation in outside or not known(*GATE_CALLS[0], series.implementation)
        ]
        return self.setup.judging_seconds(asked)

    def _why_stop(self, rounds: int) -> str | None:
        experiment, budget, others = self.experiment, self.setup.budget, self.alive[1:]
        # what follows the rounds: a judged sample of each, about as long as another round
        now, oracles = time.perf_counter(), self._last_oracles()
        oracles += self._judging_seconds() if rounds in self.judged else 0.0
        late = now + 1.5 * self.longest_round + oracles >= self.deadline
        if late and rounds < MIN_ROUNDS and len(others) > 1:
            slowest = max(others, key=lambda series: median(self._here(series)))
            over = f"the time was over after {rounds} rounds; --seconds gives more"
            self._drop(slowest.implementation, ImplementationError(Status.NO_TIME, over))
        elif rounds < MIN_ROUNDS and now > self.deadline + (LATEST - 1) * budget.seconds:
            over = f"{rounds} rounds took all the time; --seconds gives more"
            raise BaselineError(ImplementationError(Status.NO_TIME, over), self.asked)
        if rounds < (
            min(MIN_ROUNDS, experiment.max_rounds) if late else max(experiment.min_rounds, self.fewest)
        ):
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
        """After the last round, repeats four checks: one result, the clocks, the threads, the baseline beside
        it."""
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
            raise ImplementationError(Status.SUSPECT, reason)

    def _check_weights(self) -> None:
        """Checks the weights once for each process, because sums over all weights take a while. If several
        implementations share a process, nobody knows which one changed them. Then all of them fail, also
        those that left early, and the reason says so."""
        for host in self.all_hosts():
            try:
                host.check_weights()
            except ImplementationError as failure:
                inside = [
                    one.implementation
                    for one in self.measured.samples
                    if self.hosts.get(one) is host and one.role in ("baseline", "candidate")
                ]
                if len(inside) > 1:
                    names = ", ".join(one.text for one in inside)
                    reason = f"{failure.reason}: those of one of {names}, which share a process"
                    failure = ImplementationError(failure.status, reason)
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
            raise ImplementationError(Status.SUSPECT, reason)

    def forget(self, series: Series) -> None:
        """Forgets what is known of a process, because there is a new one."""
        self._seen.pop(series, None)

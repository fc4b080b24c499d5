"""Interleaved rounds over the subjects that passed their trial: shuffled, paired, with the baseline's twin.

Our own implementations share one process. With a process each, caches are colder and a round tells ten times
less (8 subjects of 0.3 ms: 463 against 45 ppm s of variance times time). Code from outside is timed by the
parent (outside/pairs.py), on inputs of its own, and compared with a copy of the baseline timed the same way.
Where that is not possible, on a GPU and outside Linux, it shares a process with that copy, which must then be
about as fast as the baseline elsewhere, and FASTER must hold against both.

Every round takes one sample of each on the same inputs, in a new order. In a few random rounds the result of
a timed call of each is handed over and judged; they share the oracle's result. A subject several times slower
than the best leaves after the few rounds that show it. One that fails leaves at once, and the others go on.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.messages import HandedOver, StagesTimed
from moe_routing_bench.bench.outside.pairs import PairError
from moe_routing_bench.bench.outside.protocol import Protocol
from moe_routing_bench.bench.series import (
    SAMPLE_OVERHEAD,
    TWIN,
    Measured,
    beside,
    calls_of,
    fewest_rounds,
    slow_ones,
)
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Vitals, Worker
from moe_routing_bench.bench.trial import (
    GATE_CALLS,
    Numbers,
    Setup,
    Trial,
    audit,
    check_call,
    check_clocks,
    check_threads,
    check_weights,
)
from moe_routing_bench.bench.verdict import MIN_ROUNDS, compare, stop_reason

WARM_SAMPLES = 2
WARM_CALL = 0.01  # seconds: the calls of its trial were long enough to warm what they use
RESERVE = 0.05  # of the budget, for the last checks, the statistics and the table
MIN_SECONDS = 2.0  # of rounds, even if trials took all the time: what was tried should get a time
LOOK_EVERY = 1.2  # the precision is computed again after this factor more rounds: computing it takes time
LEAK_BYTES = 2**29
LATEST = 1.2  # of the budget: who has no place by then gets none
DECISIVE_ROUNDS = 9  # all on one side they show a difference, if half of the comparisons do
# largest ratio of times of the same code in two processes: 1.29 was seen for calls of 10 us, where one
# process had less to do and so colder caches
MAX_APART = 1.5


class BaselineError(Exception):
    """The baseline failed during the rounds, so there is nothing to compare with.

    subjects: all that fail for the same reason
    """

    def __init__(self, failure: SubjectError, subjects: Sequence[int]):
        super().__init__(failure.reason)
        self.failure, self.subjects = failure, subjects


OnRound = Callable[[int, Measured], None]  # rounds so far


def measure(setup: Setup, alive: list[int], trials: Mapping[int, Trial], on_round: OnRound) -> Measured:
    """All rounds, in as many sets of processes as the policy says. BaselineError if the first fails; others
    that do are in `failed` and have no samples."""
    apart = [s for s in alive[1:] if {s, alive[0]} & setup.outside]
    measured = Measured(
        samples={series: [] for series in (*alive, TWIN, *map(beside, apart))},
        calls=calls_of(alive, trials),
        checked=dict.fromkeys(alive, 0),
    )
    leaving = slow_ones(setup, alive, trials)
    for repeat in range(setup.experiment.processes):
        # who left in an earlier set of processes stays out: its samples are those of the first rounds
        done = sum(measured.rounds_by_process)
        here = [s for s in alive if s not in measured.failed and len(measured.samples[s]) == done]
        _Repeat(setup, here, trials, measured, leaving, repeat).run(on_round)
    return measured


class _Repeat:
    """One set of processes. A series gets one sample in every round: it is a subject, the baseline's TWIN,
    or the baseline beside a subject from outside (beside(s))."""

    def __init__(
        self, setup: Setup, alive: list[int], trials: Mapping[int, Trial], measured: Measured,
        leaving: set[int], repeat: int,
    ):  # fmt: skip
        self.setup, self.alive, self.trials, self.measured = setup, list(alive), trials, measured
        self.experiment, self.judge, self.baseline = setup.experiment, setup.judge, alive[0]
        self.leaving, self.repeat = leaving, repeat
        self.fewest = min(fewest_rounds(len(alive)), self.experiment.max_rounds)
        self.numbers = Numbers()
        self.random = random.SystemRandom()  # so that no subject can predict which calls are judged
        apart = [beside(s) for s in alive if beside(s) in measured.samples]
        self.here: dict[int, list[float]] = {series: [] for series in (*alive, TWIN, *apart)}
        self.spans: dict[int, list[tuple[float, float]]] = {series: [] for series in self.here}
        self.grown = dict.fromkeys(self.here, 0)
        self.least_rss: dict[int, int] = {}  # when the rounds began
        self.warm = False  # memory kept by first calls, such as prepared weights, is no leak
        self.homes: dict[int, tuple[Worker, int]] = {}  # a worker, and the subject's number in it
        self.protocol = Protocol(setup, alive, trials)
        self.next_look, self.longest_round = 0, 0.0
        left = setup.budget.left / (self.experiment.processes - repeat)
        reserve = RESERVE * left
        self.deadline = time.perf_counter() + max(left - reserve, MIN_SECONDS)

    def run(self, on_round: OnRound) -> None:
        judged = self._rounds_to_judge()
        if self.repeat:
            self.setup.close()  # a published figure wants new processes
        try:
            for series in list(self.here):
                self._warm_up(series)
            self.grown, self.warm, self.least_rss = dict.fromkeys(self.here, 0), True, {}
            reason: str | None = None
            while reason is None:
                done, began = len(self.here[TWIN]), time.perf_counter()
                self._round(done, check=done in judged)
                self.longest_round = max(self.longest_round, time.perf_counter() - began)
                self._standing()
                on_round(done + 1, self.measured)
                self._let_go(self._who_leaves(done + 1))
                reason = self._why_stop()
            with self._blamed(self.alive[-1]):
                self.protocol.blame_for_harm([home for home, _ in self.homes.values()])
            self._finish(self.alive)
            self._check_weights()
        except BaseException:
            self.setup.close()
            raise
        finally:
            self.protocol.close()
            for worker, _ in self.homes.values():
                if not self.setup.is_together(worker):
                    worker.close()
        self._standing(final=True)
        self.measured.rounds_by_process.append(len(self.here[TWIN]))
        self.measured.stop_reason = reason

    def _round(self, done: int, *, check: bool) -> None:
        """One sample of each on the same inputs."""
        present = [series for series in self.here if len(self.here[series]) == done]
        first, place = self._numbers_for(present)
        for series in self._in_turn(present):
            with self._blamed(series):
                self.protocol.blame_for_harm([home for home, _ in self.homes.values()])
            if series not in self.here:  # its subject was dropped in this round
                continue
            with self._blamed(series):
                keep = place if check and series != TWIN else -1
                self.here[series].append(self._sample(series, first, step=done % ROUTINGS, keep=keep))
        if self.experiment.stages:
            for s in [s for s in self.alive if s in self.here and len(self.here[s]) == done + 1]:
                if self.protocol.takes(s):
                    continue  # the parts of code from outside have no clock
                with self._blamed(s):
                    self._take_stages(s, done)

    def _in_turn(self, present: Sequence[int]) -> list[int]:
        """A new order for every round, in which a subject and the baseline beside it are neighbours: what
        disturbs one then disturbs both."""
        groups: dict[int, list[int]] = {}
        for series in self.random.sample(present, len(present)):
            groups.setdefault(beside(series) if series < TWIN else series, []).append(series)
        return [series for group in groups.values() for series in group]

    @contextmanager
    def _blamed(self, series: int) -> Iterator[None]:
        """Drop the subject whose turn it is if it fails; the others go on, in a new process if it shared
        theirs. BaselineError if it is the baseline."""
        try:
            yield
        except SubjectError as failure:
            mine = self.homes[series][0] if series in self.homes else None
            subject, failure = self._guilty(series, failure)
            if subject == self.baseline:
                over = failure.status is Status.NO_TIME
                raise BaselineError(failure, [*self.measured.calls] if over else [subject]) from None
            self._drop(subject, failure)
            homes = {id(home): home for home, _ in self.homes.values()}.values()
            for worker in [home for home in homes if home is mine or home.harm()]:
                worker.close()
                self.setup.close()
                lost = [one for one, (home, _) in self.homes.items() if home is worker]
                for one in lost:
                    del self.homes[one]
                for one in [one for one in lost if one in self.here]:
                    self._warm_up(one)

    def _guilty(self, series: int, failure: SubjectError) -> tuple[int, SubjectError]:
        """If the baseline fails in a process with code from outside, that code is blamed."""
        series = failure.series if isinstance(failure, PairError) else series
        for s in self.alive:
            if beside(s) == series:
                reason = f"the baseline beside it is {failure.status}: {failure.reason}"
                return s, SubjectError(Status.SUSPECT, reason)
        return self._subject(series), failure

    def _drop(self, subject: int, failure: SubjectError) -> None:
        """A subject leaves without its samples, and its processes end."""
        self.measured.failed[subject] = failure
        self.alive = [s for s in self.alive if s != subject]  # it may have left before
        self.protocol.drop(subject)
        for series in (subject, beside(subject)):
            self.here.pop(series, None)
            self.measured.samples.pop(series, None)

    def _home(self, series: int) -> tuple[Worker, int]:
        """The worker of a series and its subject's number in it; started when first needed."""
        if series not in self.homes:
            subject, partner = self._subject(series), self._partner(series)
            if partner is not None:
                worker = self.setup.worker(self.baseline, partner)
                self.homes[beside(partner)], self.homes[partner] = (worker, 0), (worker, 1)
            elif subject in self.setup.outside:  # a baseline from outside
                self.homes[series] = self.homes[TWIN] = (self.setup.worker(subject), 0)
            else:
                self.homes[series] = (self.setup.together(), self.setup.place(subject))
        return self.homes[series]

    def _partner(self, series: int) -> int | None:
        """The subject from outside that lives in the series' process, if there is one."""
        return next((s for s in self.alive if series in (s, beside(s)) and beside(s) in self.here), None)

    def _subject(self, series: int) -> int:
        return series if series >= 0 else self.baseline

    def _rounds_to_judge(self) -> set[int]:
        checks = min(self.experiment.checked - 1, self.fewest)
        return set(self.random.sample(range(self.fewest), checks))

    def _numbers_for(self, present: Sequence[int]) -> tuple[int, int]:
        """The first call number of a round, and which call of each sample may be judged: one oracle serves
        all."""
        calls = [self.measured.calls[self._subject(series)] for series in present]
        return self.numbers.take(max(calls)), self.random.randrange(min(calls))

    def _warm_up(self, series: int) -> None:
        if self.trials[self._subject(series)].call_seconds > WARM_CALL and not self.protocol.takes(series):
            worker, place = self._home(series)
            if place in worker.called:
                return
        for _ in range(WARM_SAMPLES):
            if series in self.here:
                with self._blamed(series):
                    self._sample(series, self._numbers_for([series])[0], step=0, keep=-1)

    def _sample(self, series: int, first: int, *, step: int, keep: int) -> float:
        """Seconds per call; the result of call `keep` is judged."""
        if self.protocol.takes(series):
            return self._sample_by_parent(series)
        subject, (worker, place) = self._subject(series), self._home(series)
        calls = self.measured.calls[subject]
        if keep >= 0 and self.trials[subject].about.reuses_output:
            keep = calls - 1  # the others are overwritten: it declares reuses_output
        before = worker.vitals()
        claimed, seen = worker.sample(
            subject=place, first=first, step=step, calls=calls, keep=keep, warm=not self.trials[subject].long
        )
        self.spans[series].append((claimed, seen))
        if keep >= 0:
            answer = worker.ask("hand_over", HandedOver, subject=place, name="timed")
            check_call(
                worker, self.judge, answer, name="timed", number=first + keep,
                step=(step + keep) % ROUTINGS, subject=self.experiment.implementations[subject],
                about=self.trials[subject].about,
            )  # fmt: skip
            self.measured.checked[subject] += series >= 0
        self._look_after(series, before, worker.vitals())
        return claimed / calls

    def _sample_by_parent(self, series: int) -> float:
        worker, subject = self.protocol.worker(series), self._subject(series)
        before = worker.vitals()
        seconds = self.protocol.sample(series)
        self._look_after(series, before, worker.vitals())
        if series >= 0:
            self.measured.calls[subject] = self.protocol.calls(series)
            self.measured.checked[subject] = self.protocol.judged(series)
            self.measured.paired.add(subject)
        return seconds

    def _look_after(self, series: int, before: Vitals, after: Vitals) -> None:
        self.grown[series] += after.rss_bytes - before.rss_bytes
        # in a shared process one may fill what another freed, so the process itself must have grown too
        least = self.least_rss.setdefault(self._subject(series), before.rss_bytes)
        if self.warm and self.grown[series] > LEAK_BYTES and after.rss_bytes - least > LEAK_BYTES:
            reason = (
                f"it keeps memory from call to call: {self.grown[series] / 2**30:.1f} GiB over the rounds"
            )
            raise SubjectError(Status.SUSPECT, reason)
        if (touched := self.setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        # a frozen process may have threads that wait; those that work are seen by their CPU time
        if after.threads > before.threads and not self.protocol.takes(series):
            more = after.threads - before.threads
            raise SubjectError(Status.SUSPECT, f"it left {more} threads running")

    def _take_stages(self, s: int, done: int) -> None:
        worker, place = self._home(s)
        answer = worker.ask(
            "stages", StagesTimed, subject=place, number=self.numbers.take(), step=done % ROUTINGS
        )
        self.measured.stages.setdefault(s, []).append(answer.stages)

    def _let_go(self, leaving: Sequence[int]) -> None:
        """Subjects leave with the samples they have."""
        late = self.setup.budget.left < RESERVE * self.setup.budget.seconds
        known = {s for s in leaving if late and self.measured.checked[s] and s not in self.setup.outside}
        self._finish([s for s in leaving if s not in known])
        for s in [s for s in leaving if s in self.here]:
            self.protocol.drop(s)
            self.here.pop(s)  # its samples stay in `measured`
            self.here.pop(beside(s), None)
            self.alive.remove(s)

    def _who_leaves(self, rounds: int) -> list[int]:
        """Those five times slower than the best, after the rounds that show it; and whoever is slowest, as
        soon as it has a place, if the others could not get the rounds that decide beside it."""
        left = self.deadline - time.perf_counter() - self.judge.oracle_seconds
        seconds = {s: self._turn_seconds(s) for s in self.alive[1:]}
        whole = self._turn_seconds(self.baseline) + self._turn_seconds(TWIN) + sum(seconds.values())
        # a judged sample of each follows the rounds
        enough = self.fewest if rounds + left / whole - 1 >= self.fewest else DECISIVE_ROUNDS
        leaving = [s for s in self.alive if s in self.leaving and rounds >= enough]
        if rounds < MIN_ROUNDS or rounds >= DECISIVE_ROUNDS:
            return leaving
        for s in sorted(seconds, key=lambda s: -seconds[s])[:-1]:
            if rounds + left / whole - 1 >= DECISIVE_ROUNDS:
                break
            leaving, whole = [*leaving, s], whole - seconds[s]
        return leaving

    def _turn_seconds(self, series: int) -> float:
        """About what its turn in a round takes, and that of the baseline beside it."""
        seconds = 0.0
        for one in {series, beside(series) if series >= 0 else series} & self.here.keys():
            subject = self._subject(one)
            trial, calls = self.trials[subject], self.measured.calls[subject]
            before = 0 if trial.long and subject not in self.setup.outside else 1
            seconds += (calls + before) * median(self.here[one]) + SAMPLE_OVERHEAD
        return seconds

    def _standing(self, *, final: bool = False) -> None:
        """Bring `measured` up to date for those who watch; with `final`, for good."""
        for series, samples in self.here.items():
            before = sum(self.measured.rounds_by_process)
            self.measured.samples[series][before:] = samples
        assert not final or len(self.measured.samples[TWIN]) >= len(self.here[TWIN])

    def _why_stop(self) -> str | None:
        experiment, rounds = self.experiment, len(self.here[TWIN])
        # what follows the rounds: a judged sample of each, about as long as another round and an oracle
        now = time.perf_counter()
        late = now + 1.5 * self.longest_round + self.judge.oracle_seconds >= self.deadline
        if late and rounds < MIN_ROUNDS and len(self.alive) > 2:
            slowest = max(self.alive[1:], key=lambda s: median(self.here[s]))
            over = f"the time was over after {rounds} rounds; --seconds gives more"
            self._drop(slowest, SubjectError(Status.NO_TIME, over))
        elif rounds < MIN_ROUNDS and now > self.deadline + (LATEST - 1) * self.setup.budget.seconds:
            over = f"{rounds} rounds took all the time; --seconds gives more"
            raise BaselineError(SubjectError(Status.NO_TIME, over), [*self.measured.calls])
        if rounds < (
            min(MIN_ROUNDS, experiment.max_rounds) if late else max(experiment.min_rounds, self.fewest)
        ):
            return None
        if rounds < self.next_look and not late and rounds < experiment.max_rounds:
            return None
        self.next_look = math.ceil(LOOK_EVERY * rounds)
        budget = self.setup.budget
        reason: str | None = None
        for s in self.alive[1:] or [TWIN]:
            reason = stop_reason(
                self.here[beside(s) if beside(s) in self.here else self.baseline],
                self.here[s],
                target=experiment.target,
                min_rounds=experiment.min_rounds,
                max_rounds=experiment.max_rounds,
                seconds=budget.seconds if late else 0.0,
                max_seconds=budget.seconds,
            )
            if reason is None:
                return None
        return reason

    def _finish(self, subjects: Sequence[int]) -> None:
        """After their last round, check again: one call, the clocks, the threads, the baseline beside."""
        if not subjects:
            return
        first, place = self._numbers_for(subjects)
        gate_number, gate_step = GATE_CALLS[0]
        for s in list(subjects):
            with self._blamed(s):
                if s in self.setup.outside:  # inputs it has never seen
                    self._sample(s, first, step=0, keep=place)
                else:  # its trial's inputs, whose right result is known
                    self._sample(s, gate_number, step=gate_step, keep=0)
                self._check_behaviour(s)

    def _check_behaviour(self, s: int) -> None:
        if s in self.setup.outside and not self.protocol.takes(s):
            self.measured.notes.append(
                f"{self.experiment.implementations[s].name} is from outside and was timed by a clock in its "
                "own process: this system lets nobody read another process's memory, or it computes on a "
                "device"
            )
        if self.protocol.takes(s):
            self.measured.notes += filter(None, [self.protocol.finish(s)])
            self.measured.checked[s] = self.protocol.judged(s)
            return
        worker, place = self._home(s)
        check_threads(worker)
        if s in self.setup.outside:
            check_clocks(self.spans[s], lambda: self._again(s))
            audit(worker, place, self.trials[s].call_seconds, self.numbers)
        if beside(s) in self.here:
            apart = compare(self.here[self.baseline][: len(self.here[s])], self.here[beside(s)])
            low, high = apart.interval
            if low > MAX_APART or high < 1 / MAX_APART:
                reason = f"the baseline takes {apart.ratio:.2f} times as long beside it as elsewhere"
                raise SubjectError(Status.SUSPECT, reason)

    def _check_weights(self) -> None:
        """Once for each process: sums over all the weights take a while. So of several subjects in a process
        nobody knows which one changed them. All fail, also those that left early, and the reason says so."""
        for worker in {id(home): home for home, _ in self.homes.values()}.values():
            inside = [s for s, (home, _) in self.homes.items() if s >= 0 and home is worker]
            try:
                check_weights(worker, self.judge)
            except SubjectError as failure:
                if len(inside) > 1:
                    names = ", ".join(self.experiment.implementations[s].text for s in inside)
                    reason = f"{failure.reason}: those of one of {names}, which share a process"
                    failure = SubjectError(failure.status, reason)
                guilty = [s for s in inside if s in self.measured.samples]
                if self.baseline in guilty:
                    raise BaselineError(failure, guilty) from None
                for s in guilty:
                    self._drop(s, failure)
                self.setup.close()

    def _again(self, s: int) -> tuple[float, float]:
        self._sample(s, self._numbers_for([s])[0], step=0, keep=-1)
        return self.spans[s][-1]

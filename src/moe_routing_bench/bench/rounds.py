"""Interleaved rounds over the subjects that passed their trial: shuffled, paired, with the baseline's twin.

Our own implementations share one process. With a process each, caches are colder and a round tells ten times
less (8 subjects of 0.3 ms: 463 against 45 ppm s of variance times time). Code from outside runs in a process
of its own and is compared with a second copy of the baseline there. So it cannot harm the others, nor look
better by slowing them: that copy must be about as fast as the baseline elsewhere, and FASTER must hold
against both.

Every round takes one sample of each, in a new order. In random rounds, which a subject cannot predict, the
result of a timed call is handed over and judged.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.messages import HandedOver, StagesTimed
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Vitals, Worker
from moe_routing_bench.bench.trial import (
    Numbers,
    Setup,
    Trial,
    audit,
    check_call,
    check_clocks,
    check_threads,
    check_weights,
)
from moe_routing_bench.bench.verdict import compare, stop_reason

TWIN = -1
WARM_SAMPLES = 2
LOOK_EVERY = 1.2  # the precision is computed again after this factor more rounds: computing it takes time
LEAK_BYTES = 2**29
NEAR = 4.0
# largest ratio of times of the same code in two processes: 1.29 was seen for calls of 10 us, where one
# process had less to do and so colder caches
MOST_APART = 1.5

OnRound = Callable[[int], None]  # rounds so far


class BlamedError(Exception):
    """A subject failed during the rounds: which, and how."""

    def __init__(self, subject: int, failure: SubjectError):
        super().__init__(failure.reason)
        self.subject, self.failure = subject, failure


@dataclass(kw_only=True)
class Measured:
    """Seconds per call by series, a list with one number for each round; TWIN is the baseline again."""

    samples: dict[int, list[float]]  # beside(s): the baseline beside a subject s from outside
    calls: dict[int, int]  # in each sample
    stages: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    checked: dict[int, int] = field(default_factory=dict)
    rounds_by_process: list[int] = field(default_factory=list)
    stop_reason: str = ""

    def against(self, s: int) -> int:
        """The series a subject is compared with: the baseline in the same process."""
        return beside(s) if s >= 0 and beside(s) in self.samples else next(iter(self.samples))

    def stage_medians(self, subject: int) -> dict[str, float]:
        seen = self.stages.get(subject, [])
        return {name: median(times.get(name, 0.0) for times in seen) for name in seen[0]} if seen else {}


def measure(setup: Setup, alive: list[int], trials: Mapping[int, Trial], on_round: OnRound) -> Measured:
    """All rounds, in as many sets of processes as the policy says. BlamedError if a subject fails."""
    apart = [s for s in alive[1:] if {s, alive[0]} & setup.outside]
    measured = Measured(
        samples={series: [] for series in (*alive, TWIN, *map(beside, apart))},
        calls=calls_of(alive, trials),
        checked=dict.fromkeys(alive, 0),
    )
    policy = setup.cell.policy
    for repeat in range(policy.processes):
        before = repeat * policy.max_rounds
        _Repeat(setup, alive, trials, measured).run(
            lambda rounds, before=before: on_round(before + rounds)  # type: ignore[misc]
        )
    return measured


def beside(s: int) -> int:
    """The series of the baseline in the process of subject s."""
    return -2 - s


def calls_of(alive: list[int], trials: Mapping[int, Trial]) -> dict[int, int]:
    """Calls in a sample: the baseline's number, unless a subject is several times slower or faster.

    The first call of a sample is slower than the rest, so the times of the same code with 16 and with 4
    calls differ by up to a tenth.
    """
    baseline = trials[alive[0]]

    def calls(trial: Trial) -> int:
        near = 1 / NEAR <= trial.call_seconds / baseline.call_seconds <= NEAR
        return baseline.calls if near else trial.calls

    return {s: calls(trials[s]) for s in alive}


class _Repeat:
    """One set of processes. A series gets one sample in every round: it is a subject, the baseline's TWIN,
    or the baseline beside a subject from outside (beside(s))."""

    def __init__(self, setup: Setup, alive: list[int], trials: Mapping[int, Trial], measured: Measured):
        self.setup, self.alive, self.trials, self.measured = setup, alive, trials, measured
        self.cell, self.judge, self.baseline = setup.cell, setup.judge, alive[0]
        self.numbers = Numbers()
        self.random = random.SystemRandom()  # so that no subject can predict which calls are judged
        self.here: dict[int, list[float]] = {series: [] for series in measured.samples}
        self.spans: dict[int, list[tuple[float, float]]] = {series: [] for series in self.here}
        self.grown = dict.fromkeys(self.here, 0)
        self.warm = False  # memory kept by first calls, such as prepared weights, is no leak
        self.homes: dict[int, tuple[Worker, int]] = {}  # a worker, and the subject's number in it
        self.next_look = 0

    def run(self, on_round: OnRound) -> None:
        policy = self.cell.policy
        to_check = self._choose_rounds_to_check()
        with ExitStack() as stack:
            self._move_in(stack)
            for series in self.here:
                for _ in range(WARM_SAMPLES):
                    self._sample(series, 0, check=False)
            self.grown, self.warm = dict.fromkeys(self.here, 0), True
            started, reason = time.perf_counter(), None
            while reason is None:
                done = len(self.here[TWIN])
                for series in self.random.sample(list(self.here), len(self.here)):
                    check = done in to_check.get(series, ())
                    self.here[series].append(self._sample(series, done, check=check))
                if policy.stages:
                    self._take_stages(done)
                on_round(done + 1)
                reason = self._why_stop(time.perf_counter() - started)
            for s in self.alive:
                self._finish(s)
        for series, samples in self.here.items():
            self.measured.samples[series] += samples
        self.measured.rounds_by_process.append(len(self.here[TWIN]))
        self.measured.stop_reason = reason

    def _move_in(self, stack: ExitStack) -> None:
        together = [s for s in self.alive if beside(s) not in self.here]
        for group in (together, *([self.baseline, s] for s in self.alive if beside(s) in self.here)):
            try:
                worker = stack.enter_context(self.setup.worker(*group))
            except SubjectError as failure:
                raise BlamedError(group[-1], failure) from None
            if group is together:
                self.homes |= {s: (worker, place) for place, s in enumerate(together)}
                self.homes[TWIN] = (worker, 0)
            else:
                self.homes[beside(group[1])] = (worker, 0)
                self.homes[group[1]] = (worker, 1)

    def _subject(self, series: int) -> int:
        return series if series >= 0 else self.baseline

    def _choose_rounds_to_check(self) -> dict[int, set[int]]:
        policy = self.cell.policy
        early, checks = range(policy.min_rounds), min(policy.checked - 1, policy.min_rounds)
        return {series: set(self.random.sample(early, checks)) for series in self.here if series != TWIN}

    def _sample(self, series: int, done: int, *, check: bool) -> float:
        """Seconds per call; with `check` the result of one of the calls is judged."""
        subject, (worker, place_in_worker) = self._subject(series), self.homes[series]
        calls, step = self.measured.calls[subject], done % ROUTINGS
        place = self.random.randrange(calls) if check else -1
        if check and self.trials[subject].about.reuses_output:
            place = calls - 1  # the others are overwritten: it declares reuses_output
        first = self.numbers.take(calls)
        try:
            before = worker.vitals()
            claimed, seen = worker.sample(
                subject=place_in_worker, first=first, step=step, calls=calls, keep=place
            )
            self.spans[series].append((claimed, seen))
            if check:
                answer = worker.ask("hand_over", HandedOver, subject=place_in_worker, name="timed")
                check_call(
                    worker, self.judge, answer, name="timed",
                    number=first + place, step=(step + place) % ROUTINGS,
                    subject=self.cell.subjects[subject], about=self.trials[subject].about,
                )  # fmt: skip
                self.measured.checked[subject] += series >= 0
            self._look_after(series, before, worker.vitals())
        except SubjectError as failure:
            raise self._blame(series, failure) from None
        return claimed / calls

    def _blame(self, series: int, failure: SubjectError) -> BlamedError:
        """If the baseline fails in a process with code from outside, that code is blamed."""
        for s in self.alive:
            if beside(s) == series:
                reason = f"the baseline beside it is {failure.status}: {failure.reason}"
                return BlamedError(s, SubjectError(Status.SUSPECT, reason))
        return BlamedError(self._subject(series), failure)

    def _look_after(self, series: int, before: Vitals, after: Vitals) -> None:
        self.grown[series] += after.rss_bytes - before.rss_bytes
        if self.warm and self.grown[series] > LEAK_BYTES:
            reason = (
                f"it keeps memory from call to call: {self.grown[series] / 2**30:.1f} GiB over the rounds"
            )
            raise SubjectError(Status.SUSPECT, reason)
        if (touched := self.setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        if after.threads > before.threads:
            more = after.threads - before.threads
            raise SubjectError(Status.SUSPECT, f"it left {more} threads running")

    def _take_stages(self, done: int) -> None:
        for s in self.alive:
            try:
                worker, place = self.homes[s]
                answer = worker.ask(
                    "stages", StagesTimed, subject=place, number=self.numbers.take(), step=done % ROUTINGS
                )
            except SubjectError as failure:
                raise BlamedError(s, failure) from None
            self.measured.stages.setdefault(s, []).append(answer.stages)

    def _why_stop(self, seconds: float) -> str | None:
        policy = self.cell.policy
        rounds, late = len(self.here[TWIN]), seconds >= policy.max_seconds
        # n rounds all on one side have the p-value 2 / 2^n, which must reach 1 % after the correction
        fewest = math.ceil(math.log2(200 * len(self.alive)))
        if rounds < (min(fewest, policy.max_rounds) if late else policy.min_rounds):
            return None
        if rounds < self.next_look and not late and rounds < policy.max_rounds:
            return None
        self.next_look = math.ceil(LOOK_EVERY * rounds)
        reason = None
        for s in self.alive[1:] or [TWIN]:
            reason = stop_reason(
                self.here[self.measured.against(s)],
                self.here[s],
                target=policy.target,
                min_rounds=policy.min_rounds,
                max_rounds=policy.max_rounds,
                seconds=seconds,
                max_seconds=policy.max_seconds,
            )
            if reason is None:
                return None
        return reason

    def _finish(self, s: int) -> None:
        """After the last round, check again: one call, the clocks, the weights, the baseline beside it."""
        self._sample(s, 0, check=True)
        worker, place = self.homes[s]
        try:
            check_clocks(self.spans[s], lambda: self._again(s))
            audit(worker, place, self.trials[s].call_seconds, self.numbers)
            check_weights(worker, self.judge)
            check_threads(worker)
            if beside(s) in self.here:
                apart = compare(self.here[self.baseline], self.here[beside(s)])
                low, high = apart.interval
                if low > MOST_APART or high < 1 / MOST_APART:
                    reason = f"the baseline takes {apart.ratio:.2f} times as long beside it as elsewhere"
                    raise SubjectError(Status.SUSPECT, reason)
        except SubjectError as failure:
            raise BlamedError(s, failure) from None

    def _again(self, s: int) -> tuple[float, float]:
        self._sample(s, 0, check=False)
        return self.spans[s][-1]

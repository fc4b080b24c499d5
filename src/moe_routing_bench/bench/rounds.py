"""Interleaved rounds over the subjects that passed their trial: shuffled, paired, with the baseline's twin.

Every subject has a process of its own, on the same cores, and is asked for one sample in every round, in a
new order each time; the others wait meanwhile. What one of them does to its process harms nobody else, and
the twin, in another process than the baseline, shows what the luck of a process is worth. Now and then, at
places a subject cannot know beforehand, the result of a timed call is handed over and judged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from moe_routing_bench.bench.inputs import ROUTINGS
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Worker
from moe_routing_bench.bench.trial import Numbers, Setup, Trial, check_call, check_clocks, check_weights
from moe_routing_bench.bench.verdict import stop_reason

TWIN = -1
WARM_SAMPLES = 2
LOOK_EVERY = 5  # rounds between looks at the precision: a bootstrap takes milliseconds
FEWEST_ROUNDS = 8  # fewer decide nothing, whatever the budget
LEAK_BYTES = 2**29
NEAR = 4.0

Tell = Callable[[int], None]  # rounds so far


class BlamedError(Exception):
    """A subject failed during the rounds: which, and how."""

    def __init__(self, subject: int, failure: SubjectError):
        super().__init__(failure.reason)
        self.subject, self.failure = subject, failure


@dataclass(kw_only=True)
class Measured:
    """Seconds per call by subject, a list with one number for each round; TWIN is the baseline again."""

    samples: dict[int, list[float]]
    calls: dict[int, int]  # in each sample
    stages: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    checked: dict[int, int] = field(default_factory=dict)
    rounds_by_process: list[int] = field(default_factory=list)
    stop_reason: str = ""

    def stage_medians(self, subject: int) -> dict[str, float]:
        seen = self.stages.get(subject, [])
        return {name: median(one[name] for one in seen) for name in seen[0]} if seen else {}


def measure(setup: Setup, alive: list[int], trials: Mapping[int, Trial], tell: Tell) -> Measured:
    """All rounds, in as many sets of processes as the policy says. BlamedError if a subject fails."""
    found = Measured(
        samples={s: [] for s in (*alive, TWIN)},
        calls=calls_of(alive, trials),
        checked=dict.fromkeys(alive, 0),
    )
    policy = setup.cell.policy
    for repeat in range(policy.processes):
        before = repeat * policy.max_rounds
        _Repeat(setup, alive, trials, found).run(
            lambda rounds, before=before: tell(before + rounds)  # type: ignore[misc]
        )
    return found


def calls_of(alive: list[int], trials: Mapping[int, Trial]) -> dict[int, int]:
    """Calls in a sample: as many as the baseline has, unless a subject is several times slower or faster.

    The first call of a sample is slower than the rest, so the same code measured with 16 and with 4 calls
    differs by up to a tenth.
    """
    baseline = trials[alive[0]]

    def calls(trial: Trial) -> int:
        near = 1 / NEAR <= trial.call_seconds / baseline.call_seconds <= NEAR
        return baseline.calls if near else trial.calls

    return {s: calls(trials[s]) for s in alive}


class _Repeat:
    """One set of processes, a process for each subject and one for the twin."""

    def __init__(self, setup: Setup, alive: list[int], trials: Mapping[int, Trial], found: Measured):
        self.setup, self.alive, self.trials, self.found = setup, alive, trials, found
        self.cell, self.judge = setup.cell, setup.judge
        self.numbers = Numbers()
        self.random = random.SystemRandom()  # what a subject could predict it could prepare for
        self.here: dict[int, list[float]] = {s: [] for s in (*alive, TWIN)}
        self.spans: dict[int, list[tuple[float, float]]] = {s: [] for s in self.here}
        self.workers: dict[int, Worker] = {}
        self.memory: dict[int, int] = {}

    def run(self, tell: Tell) -> None:
        policy = self.cell.policy
        to_check = self._choose_rounds_to_check()
        with ExitStack() as stack:
            for s in self.here:
                self._start(s, stack)
            started, reason = time.perf_counter(), None
            while reason is None:
                done = len(self.here[TWIN])
                for s in self.random.sample(list(self.here), len(self.here)):
                    self.here[s].append(self._sample(s, done, check=done in to_check[s]))
                if policy.stages:
                    self._take_stages(done)
                tell(done + 1)
                reason = self._why_stop(time.perf_counter() - started)
            for s in self.alive:
                self._finish(s)
        for s, samples in self.here.items():
            self.found.samples[s] += samples
        self.found.rounds_by_process.append(len(self.here[TWIN]))
        self.found.stop_reason = reason

    def _subject(self, s: int) -> int:
        return self.alive[0] if s == TWIN else s

    def _start(self, s: int, stack: ExitStack) -> None:
        subject = self._subject(s)
        try:
            self.workers[s] = stack.enter_context(self.setup.worker(subject))
        except SubjectError as failure:
            raise BlamedError(subject, failure) from None
        self.memory[s] = 0
        for _ in range(WARM_SAMPLES):
            self._sample(s, 0, check=False)
        self.memory[s] = self.workers[s].memory()

    def _choose_rounds_to_check(self) -> dict[int, set[int]]:
        policy = self.cell.policy
        early = range(policy.min_rounds)
        chosen = {s: set(self.random.sample(early, min(policy.checked - 1, len(early)))) for s in self.alive}
        return {**chosen, TWIN: set()}

    def _sample(self, s: int, done: int, *, check: bool) -> float:
        """Seconds per call; with `check` the result of one of the calls is judged."""
        subject, worker = self._subject(s), self.workers[s]
        calls, step = self.found.calls[subject], done % ROUTINGS
        place = self.random.randrange(calls) if check else -1
        if check and self.trials[subject].about["reuses_output"]:
            place = calls - 1  # earlier results are overwritten, as it says
        first = self.numbers.take(calls)
        try:
            claimed, seen = worker.sample(subject=0, first=first, step=step, calls=calls, keep=place)
            self.spans[s].append((claimed, seen))
            if check:
                check_call(
                    worker, self.judge, worker.ask("hand_over", name="timed"), name="timed",
                    number=first + place, step=(step + place) % ROUTINGS,
                    layout=self.cell.subjects[subject].layout, about=self.trials[subject].about,
                )  # fmt: skip
                self.found.checked[subject] += 1
            self._look_after(s)
        except SubjectError as failure:
            raise BlamedError(subject, failure) from None
        return claimed / calls

    def _look_after(self, s: int) -> None:
        worker = self.workers[s]
        if self.memory[s] and (grown := worker.memory() - self.memory[s]) > LEAK_BYTES:
            told = f"it keeps memory from call to call: {grown / 2**30:.1f} GiB over the rounds"
            raise SubjectError(Status.SUSPECT, told)
        if (touched := self.setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        if (threads := worker.count_threads()) > worker.threads:
            told = f"it left {threads - worker.threads} threads or processes running"
            raise SubjectError(Status.SUSPECT, told)

    def _take_stages(self, done: int) -> None:
        for s in self.alive:
            try:
                answer = self.workers[s].ask(
                    "stages", subject=0, number=self.numbers.take(), step=done % ROUTINGS
                )
            except SubjectError as failure:
                raise BlamedError(s, failure) from None
            stages = {str(name): float(seconds) for name, seconds in answer["stages"].items()}
            self.found.stages.setdefault(s, []).append(stages)

    def _why_stop(self, seconds: float) -> str | None:
        policy, baseline = self.cell.policy, self.here[self.alive[0]]
        rounds, late = len(baseline), seconds >= policy.max_seconds
        if rounds < (FEWEST_ROUNDS if late else policy.min_rounds):
            return None
        if rounds % LOOK_EVERY and not late and rounds < policy.max_rounds:
            return None
        reason = None
        for s in self.alive[1:] or [TWIN]:
            reason = stop_reason(
                baseline, self.here[s], target=policy.target, min_rounds=policy.min_rounds,
                max_rounds=policy.max_rounds, seconds=seconds, max_seconds=policy.max_seconds,
            )  # fmt: skip
            if reason is None:
                return None
        return reason

    def _finish(self, s: int) -> None:
        """Once more after the last round: a judged call, the clock, the weights."""
        self._sample(s, 0, check=True)
        try:
            check_clocks(self.spans[s], lambda: self._again(s))
            check_weights(self.workers[s], self.judge)
        except SubjectError as failure:
            raise BlamedError(s, failure) from None

    def _again(self, s: int) -> tuple[float, float]:
        self._sample(s, 0, check=False)
        return self.spans[s][-1]

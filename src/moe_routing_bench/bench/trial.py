"""Tries each subject by itself: are its results right, does it behave, is its clock honest?

Only subjects that pass take part in the rounds. Code from outside is tried in a process of its own. Our own
implementations are tried one after another in one process, which then measures them too: making weights,
packing them and importing libraries happens once.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.identity import folders_of
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.loaded import not_in_the_key
from moe_routing_bench.bench.messages import (
    Calibrated,
    Called,
    Described,
    HandedOver,
    KitRun,
    Loaded,
    Weights,
)
from moe_routing_bench.bench.outside.memory import can_freeze_and_read
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Worker
from moe_routing_bench.bench.untrusted import read_file
from moe_routing_bench.bench.verdict import MIN_ROUNDS
from moe_routing_bench.bench.worker import MAX_CALLS
from moe_routing_bench.core.accuracy import Verdict
from moe_routing_bench.core.fork_server import server_harm
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import LONG_CALL, Experiment, ImplementationRef

# how much longer the parent's clock may run than the worker's: the time in the pipe, and a share of the span
PIPE_SECONDS = 3e-4
HIDDEN_SHARE = 0.05
SECOND_CHANCES = 50
AUDIT_SECONDS = 0.02
GATE_CALLS = ((0, 0), (10, 1))  # number and step; the first is called twice
PATIENCE = 0.3  # the share of a cell's time that one trial may take
FAR_BEHIND = 10.0  # so many times the best time
MIN_LIMIT = 10.0  # seconds that a request may take even when the time is over

Watch = Callable[[], str | None]


class OutOfTimeError(SubjectError):
    """Its trial took too long; its process has answered everything and can go on."""

    def __init__(self, reason: str):
        super().__init__(Status.NO_TIME, reason)


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


class Reuse:
    """What a cell leaves to the next one with the same weights, or none: them, and the process of our own
    subjects."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.worker: Worker | None = None
        self.call_seconds: dict[ImplementationRef, float] = {}  # of the cell before

    def at_least(self, subject: ImplementationRef, experiment: Experiment) -> float:
        """Seconds that a call takes at least: as many as one with fewer tokens took in the cell before."""
        if self.inputs is None:
            return 0.0
        before, now = self.inputs.experiment, experiment
        alike = (before.span, before.direction) == (now.span, now.direction) and before.T <= now.T
        return self.call_seconds.get(subject, 0.0) if alike else 0.0

    def fits(self, experiment: Experiment, inputs: Inputs) -> bool:
        """Is there a process, unharmed, that can measure this cell too? If not, none is left."""
        before, worker = self.inputs, self.worker
        alike = before is not None and (
            before.weights_key == inputs.weights_key
            or not (before.experiment.weights or inputs.experiment.weights)  # any such cell
        )
        same = worker is not None and values_of(worker.experiment, "how") == values_of(experiment, "how")
        if worker is not None and alike and same and not worker.harm():
            return worker.experiment.include == experiment.include
        self.close()
        return False

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.inputs = self.worker = None
        self.call_seconds = {}


@dataclass(kw_only=True)
class Setup:
    """What stays the same for all trials and rounds of a cell, and the process of our own subjects.

    watch: called after every turn of a subject; returns a sentence if the subject touched something outside,
    such as the results file.
    """

    experiment: Experiment
    judge: Judge
    cores: tuple[int, ...]
    budget: Budget
    watch: Watch = lambda: None
    outside: frozenset[int] = frozenset()  # subjects that are not our own code
    sources: Mapping[ImplementationRef, str] = field(default_factory=dict)  # hashes of the code that runs
    reuse: Reuse = field(default_factory=Reuse)
    best_seconds: float = math.inf  # of a call, of those tried so far
    _together: Worker | None = field(default=None, init=False)

    def worker(self, *indexes: int) -> Worker:
        """A new process for these subjects."""
        experiment = replace(
            self.experiment, implementations=tuple(self.experiment.implementations[i] for i in indexes)
        )
        sandbox = experiment.sandbox and not self.outside.isdisjoint(indexes)
        subject = experiment.implementations[0]

        def meanwhile() -> None:
            self.judge.foresee(GATE_CALLS, subject)
            importlib.import_module("scipy.stats")  # takes a second; the verdicts need it

        worker = Worker(experiment, self.cores, sandbox=sandbox, meanwhile=meanwhile)
        worker.limit = self.limit
        return worker

    def together(self) -> Worker:
        """The process of all our own subjects; started if there is none."""
        if self._together is not None and self._together.harm():
            self.close()
        if self._together is None and self.reuse.worker is not None:
            self._together, self.reuse.worker = self.reuse.worker, None
            try:
                self._together.next_cell(
                    replace(
                        self.experiment,
                        implementations=tuple(self.experiment.implementations[i] for i in self._ours),
                    )
                )
            except SubjectError:
                self.close()
        if self._together is None:
            self._together = self.worker(*self._ours)
        self._together.limit = self.limit
        return self._together

    def place(self, index: int) -> int:
        """A subject's number in the process of our own subjects."""
        return self._ours.index(index)

    def close(self) -> None:
        """End the process of our own subjects: one of them failed in it, or a fresh one is wanted."""
        if self._together is not None:
            self._together.close()
            self._together = None

    def leave(self, call_seconds: Mapping[ImplementationRef, float]) -> None:
        """At the end: the process goes to the next cell, if that may use it."""
        assert self.reuse.worker is None
        self.reuse.call_seconds = dict(call_seconds)
        self.reuse.inputs, self.reuse.worker, self._together = self.judge.inputs, self._together, None

    def is_together(self, worker: Worker) -> bool:
        return worker is self._together

    def too_slow(self, call_seconds: float) -> bool:
        """Is it far behind, and would its trial and the fewest rounds take the time of the others?"""
        needed = (len(GATE_CALLS) + MIN_ROUNDS + 2) * call_seconds
        return call_seconds > FAR_BEHIND * self.best_seconds and needed > PATIENCE * self.budget.seconds

    def blame_for_harm(self) -> None:
        """After code from outside ran alone: is the process of our own subjects as it was?"""
        harm = self._together.harm() if self._together is not None else ""
        if harm := harm or server_harm():
            reason = f"the process of other implementations {harm} while it was running"
            raise SubjectError(Status.SUSPECT, reason)

    @property
    def can_freeze(self) -> bool:
        """Can the parent itself time code from outside here (outside/pairs.py)?"""
        return self.experiment.device == "cpu" and can_freeze_and_read()

    @property
    def _ours(self) -> list[int]:
        return [i for i in range(len(self.experiment.implementations)) if i not in self.outside]

    @property
    def limit(self) -> float:
        """Seconds for one request: a single call must not use up the whole budget and more."""
        return min(self.experiment.step_seconds, max(self.budget.left, MIN_LIMIT))


def try_alone(setup: Setup, index: int) -> Trial:
    subject, outside = setup.experiment.implementations[index], index in setup.outside
    about = Described(label=subject.text)
    seen: dict[str, Any] = {}
    worker, harmless = None, True
    try:
        worker = setup.worker(index) if outside else setup.together()
        place = 0 if outside else setup.place(index)
        worker.begin_watch()
        about = worker.ask("describe", Described, subject=place)
        if outside:  # what it is called and where it comes from is not for itself to say
            origin = "; ".join(sorted(set(span_named(setup.experiment.span).origins(subject.name))))
            about = about.model_copy(update={"label": subject.name, "origin": origin})
        kits, source = PassedKits(setup.experiment, outside=outside), setup.sources.get(subject, "")
        known = bool(source) and kits.knows(subject, source)
        shortest = _gate(worker, place, subject, setup, about, outside, seen)
        if outside or not known:  # sums over all the weights take a while; the rounds end with one
            check_weights(worker, setup.judge)
        if outside or shortest < LONG_CALL:
            seen["calls"], seen["call_seconds"] = _calibrate(worker, place, Numbers(), outside)
        else:
            seen["calls"], seen["call_seconds"] = 1, shortest
        seen["peak_rss_bytes"] = worker.peak_bytes()
        worker.called.add(place)
        if not known:
            with setup.budget.paused() if setup.budget.kit_apart else nullcontext():
                answer = worker.ask("kit", KitRun, subject=place)
            check_kit(answer)
            if source:
                kits.add(subject, source)
        if outside or setup.experiment.include:
            _check_loaded(worker, subject, setup)
        if not (outside and setup.can_freeze):  # what is frozen between turns may have threads that wait
            check_threads(worker)
        if (touched := setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        if outside:
            setup.blame_for_harm()
        seen["checks"] = _checks(subject, about, setup, outside)
        status, reason = Status.PASSED, ""
    except SubjectError as failure:
        status, reason = failure.status, failure.reason
        harmless = isinstance(failure, OutOfTimeError) or status is Status.UNSUPPORTED
    if worker is not None:
        seen.setdefault("peak_rss_bytes", worker.peak_bytes())
        seen["log_tail"] = worker.log_tail()
        if outside:
            worker.close()
        elif not harmless:
            setup.close()
    return Trial(status=status, reason=reason, about=about, **seen)


def _gate(
    worker: Worker, place: int, subject: ImplementationRef, setup: Setup, about: Described, outside: bool,
    seen: dict[str, Any],
) -> float:  # fmt: skip
    """Checks results on two inputs, the first twice, and that inputs, weights and settings are unchanged.
    Returns the seconds of the shortest call."""
    judge, began, shortest, before = setup.judge, setup.budget.used, math.inf, ""
    first, second = GATE_CALLS
    calls = (("first", first, False), ("second", second, True), ("again", first, True))
    for name, (number, step), poison in calls:
        if (used := setup.budget.used - began) > PATIENCE * setup.budget.seconds and place:
            raise OutOfTimeError(
                f"its trial took {used:.0f} s, {seen['first_call']:.2g} s of it for one call; "
                "--seconds gives more time"
            )
        warm = name == "again" or (name == "second" and subject in setup.reuse.call_seconds)
        if warm and setup.too_slow(shortest):
            seen["call_seconds"] = shortest
            raise OutOfTimeError(slow_reason(shortest, setup))
        answer = worker.ask(
            "gate", Called, subject=place, number=number, step=step, poison=poison, name=name, then=outside
        )
        if answer.unsupported is not None:
            raise SubjectError(Status.UNSUPPORTED, answer.unsupported)
        shortest = min(shortest, answer.seconds)
        verdict = check_call(
            worker, judge, answer, name=name, number=number, step=step, subject=subject, about=about
        )
        if not seen:
            seen |= {"verdict": verdict, "first_call": answer.seconds, "runs": answer.runs}
        if answer.aliases:
            raise SubjectError(Status.WRONG_STRUCTURE, "its result shares memory with an input")
        if answer.changed:
            changed = ", ".join(answer.changed)
            raise SubjectError(Status.SUSPECT, f"it changed {changed} for everybody in its process")
        earlier = name if outside else before
        if (
            earlier
            and not about.reuses_output
            and not _same_files(worker.file(earlier), worker.file(f"{earlier}-later"))
        ):
            raise SubjectError(Status.WRONG_VALUE, "the next call overwrote an earlier result")
        before = name
    files = worker.file("first"), worker.file("again")
    number, step = first
    if about.deterministic and not judge.same_bits(*files, number=number, step=step, subject=subject):
        raise SubjectError(Status.NONDETERMINISTIC, "a second run on the same input gave other bits")
    return shortest


def _checks(subject: ImplementationRef, about: Described, setup: Setup, outside: bool) -> tuple[str, ...]:
    """What a subject that passed was checked for, here and in the rounds."""
    span, timed_by_parent = span_named(setup.experiment.span), outside and setup.can_freeze
    ran = {
        "right on two inputs": True,
        "right on the kit's hard cases": bool(span.named(subject.name)),
        "memory poisoned": True,
        "inputs unchanged": True,
        "weights unchanged": span.weights,
        "same bits twice": about.deterministic,
        "earlier results left alone": not about.reuses_output,
        "no threads left": not timed_by_parent,
        "no more cores than threads": timed_by_parent,
        "no processes left": timed_by_parent,
        "torch's settings left alone": True,
        "time agrees with the parent's clock": outside,
    }
    return tuple(name for name, did in ran.items() if did)


def slow_reason(call_seconds: float, setup: Setup) -> str:
    return (
        f"a call takes {call_seconds:.2g} s, {call_seconds / setup.best_seconds:.0f} times the best; "
        "its rounds would take the time of the others; --seconds gives more"
    )


def check_kit(answer: KitRun) -> None:
    """The hard cases of `mrb check`."""
    if answer.failed:
        cases = answer.passed + answer.failed
        reason = f"it fails {answer.failed} of {cases} hard cases (`mrb check`): {answer.first}"
        raise SubjectError(Status.WRONG_VALUE, reason)


def _check_loaded(worker: Worker, subject: ImplementationRef, setup: Setup) -> None:
    """All that its results hang on is in the resume key, or there is no time."""
    files = worker.ask("loaded", Loaded).files
    folders = folders_of(span_named(setup.experiment.span), subject, setup.judge.inputs)
    if strange := not_in_the_key(files, setup.experiment, folders):
        raise SubjectError(
            Status.SUSPECT,
            f"it loaded {strange[0]}, which is not in the folder of --include-path: a change there would go "
            "unnoticed. Put it into the folder, under a name without a dot in front",
        )


def check_call(
    worker: Worker, judge: Judge, answer: Called | HandedOver, *,
    name: str, number: int, step: int, subject: ImplementationRef, about: Described,
) -> Verdict | None:  # fmt: skip
    """Checks a call whose result the worker handed over: type, inputs after the call, values."""
    if answer.wrong_type:
        raise SubjectError(Status.WRONG_STRUCTURE, answer.wrong_type)
    if answer.print != judge.input_print(number, step, subject):
        raise SubjectError(Status.MUTATED_INPUT, "its inputs were not the same after the call")
    finding = judge.judge(worker.file(name), number, step, subject, about.ties)
    if finding.status is not Status.PASSED:
        raise SubjectError(finding.status, finding.reason)
    return finding.verdict


def _same_files(one: Path, other: Path) -> bool:
    """Of two results, the first of which is judged: so its length is known to be reasonable."""
    try:
        first = read_file(one, sys.maxsize)
        return first == read_file(other, len(first))
    except ValueError:
        return False


def check_threads(worker: Worker) -> None:
    if (more := worker.count_threads() - worker.threads) > 0:
        raise SubjectError(Status.SUSPECT, f"it left {more} threads or processes running after its calls")


def check_weights(worker: Worker, judge: Judge) -> None:
    if worker.ask("weights", Weights).print != judge.weights_print:
        raise SubjectError(Status.MUTATED_INPUT, "the experts' weights were not the same after its calls")


def _calibrate(worker: Worker, place: int, numbers: Numbers, outside: bool) -> tuple[int, float]:
    """Calls per sample and seconds per call; SubjectError if the worker's clock and ours disagree."""
    first = numbers.take(4 * MAX_CALLS)
    calls = worker.ask("calibrate", Calibrated, subject=place, first=first).calls

    def sample() -> float:
        first = numbers.take(calls)
        return worker.sample(subject=place, first=first, step=0, calls=calls, keep=-1)[0] / calls

    short = min(sample(), sample())  # a single one may have been interrupted
    return calls, audit(worker, place, short, numbers) if outside else short


def audit(worker: Worker, subject: int, call_seconds: float, numbers: Numbers) -> float:
    """Seconds per call. Both clocks must agree, on spans so long that the time in the pipe is negligible."""
    calls = min(MAX_CALLS, max(1, math.ceil(AUDIT_SECONDS / call_seconds)))

    def again() -> tuple[float, float]:
        return worker.sample(subject=subject, first=numbers.take(calls), step=0, calls=calls, keep=-1)

    spans = [again() for _ in range(3)]
    check_clocks(spans, again)
    return min(claimed for claimed, _ in spans) / calls


def check_clocks(spans: Sequence[tuple[float, float]], again: Callable[[], tuple[float, float]]) -> None:
    """Takes (claimed, seen) seconds of several spans: the smallest difference must be negligible. A busy
    machine can only make single spans worse, so more are taken before a subject is called SUSPECT."""
    taken = list(spans)
    while True:
        hidden, seen = min((seen - claimed, seen) for claimed, seen in taken)
        if hidden <= PIPE_SECONDS + HIDDEN_SHARE * seen:
            return
        if len(taken) >= len(spans) + SECOND_CHANCES:
            break
        taken.append(again())
    raise SubjectError(
        Status.SUSPECT,
        f"it says {1e3 * (seen - hidden):.3g} ms where the parent's clock saw {1e3 * seen:.3g} ms",
    )

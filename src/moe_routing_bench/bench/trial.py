"""Tries each subject alone in its own process: are its results right, does it behave, is its clock honest?

Only subjects that pass take part in the rounds.
"""

from __future__ import annotations

import filecmp
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.messages import Calibrated, Called, Described, HandedOver, Weights
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.bench.supervisor import SubjectError, Worker
from moe_routing_bench.bench.worker import MOST_CALLS

CHECKS = (
    "right on two inputs", "memory poisoned", "inputs unchanged", "weights unchanged", "same bits twice",
    "earlier results left alone", "no threads left", "torch's settings left alone",
    "time agrees with the parent's clock",
)  # fmt: skip
# how much longer the parent's clock may run than the worker's: the time in the pipe, and a share of the span
PIPE_SECONDS = 3e-4
HIDDEN_SHARE = 0.05
SECOND_CHANCES = 50
AUDIT_SECONDS = 0.02

Watch = Callable[[], str | None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a trial: Trial(status=Status.PASSED, about=Described(label="index_add"), calls=4, ...)"""

    status: Status
    reason: str = ""
    about: Described
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


class Numbers:
    """Call numbers that were not used before: take(3) gives the first of three."""

    def __init__(self, first: int = 100):
        self._next = first

    def take(self, calls: int = 1) -> int:
        first, self._next = self._next, self._next + calls + 1
        return first


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What stays the same for all trials and rounds of a cell.

    watch: called after every turn of a subject; returns a sentence if the subject touched something outside,
    such as the results file.
    """

    cell: Cell
    judge: Judge
    cores: tuple[int, ...]
    watch: Watch = lambda: None
    outside: frozenset[int] = frozenset()  # subjects that are not our own code

    def worker(self, *indexes: int) -> Worker:
        return Worker(self.cell.only(tuple(self.cell.subjects[i] for i in indexes)), self.cores)


def try_alone(setup: Setup, index: int) -> Trial:
    cell, judge = setup.cell, setup.judge
    subject = cell.subjects[index]
    about = Described(label=subject.spec)
    seen: dict[str, Any] = {}
    worker: Worker | None = None
    try:
        worker = setup.worker(index)
        about = worker.ask("describe", Described, subject=0)
        seen |= _gate(worker, subject, judge, about)
        seen["calls"], seen["call_seconds"] = _calibrate(worker, Numbers())
        check_threads(worker)
        if (touched := setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        status, reason = Status.PASSED, ""
    except SubjectError as failure:
        status, reason = failure.status, failure.reason
    if worker is not None:
        seen["peak_rss_bytes"] = worker.vitals().peak_bytes or None
        seen["log_tail"] = worker.log_tail()
        worker.close()
    return Trial(status=status, reason=reason, about=about, **seen)


def _gate(worker: Worker, subject: Subject, judge: Judge, about: Described) -> dict[str, Any]:
    """Checks results on two inputs, the first twice, and that inputs, weights and settings are unchanged."""
    seen: dict[str, Any] = {}
    calls = (("first", 0, 0, False), ("second", 10, 1, True), ("again", 0, 0, True))
    for name, number, step, poison in calls:
        answer = worker.ask("gate", Called, subject=0, number=number, step=step, poison=poison, name=name)
        if answer.unsupported is not None:
            raise SubjectError(Status.UNSUPPORTED, answer.unsupported)
        verdict = check_call(
            worker, judge, answer, name=name, number=number, step=step, subject=subject, about=about
        )
        if not seen:
            seen = {"verdict": verdict, "first_call": answer.seconds, "runs": answer.runs}
        if answer.aliases:
            raise SubjectError(Status.WRONG_STRUCTURE, "its result shares memory with an input")
        if answer.changed:
            changed = ", ".join(answer.changed)
            raise SubjectError(Status.SUSPECT, f"it changed {changed} for everybody in its process")
        if not about.reuses_output and not _same_files(worker.file(name), worker.file(f"{name}-later")):
            raise SubjectError(Status.WRONG_VALUE, "the next call overwrote an earlier result")
    files = worker.file("first"), worker.file("again")
    if about.deterministic and not judge.same_bits(*files, number=0, step=0, subject=subject):
        raise SubjectError(Status.NONDETERMINISTIC, "a second run on the same input gave other bits")
    check_weights(worker, judge)
    return seen


def check_call(
    worker: Worker, judge: Judge, answer: Called | HandedOver, *,
    name: str, number: int, step: int, subject: Subject, about: Described,
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
    if not (one.is_file() and other.is_file()) or one.stat().st_size != other.stat().st_size:
        return False
    return filecmp.cmp(one, other, shallow=False)


def check_threads(worker: Worker) -> None:
    if (more := worker.count_threads() - worker.threads) > 0:
        raise SubjectError(Status.SUSPECT, f"it left {more} threads or processes running after its calls")


def check_weights(worker: Worker, judge: Judge) -> None:
    if worker.ask("weights", Weights).print != judge.weights_print:
        raise SubjectError(Status.MUTATED_INPUT, "the experts' weights were not the same after its calls")


def _calibrate(worker: Worker, numbers: Numbers) -> tuple[int, float]:
    """Calls per sample and seconds per call; SubjectError if the worker's clock and ours disagree."""
    calls = worker.ask("calibrate", Calibrated, subject=0, first=numbers.take(3 * MOST_CALLS)).calls

    short = worker.sample(subject=0, first=numbers.take(calls), step=0, calls=calls, keep=-1)[0] / calls
    return calls, audit(worker, 0, short, numbers)


def audit(worker: Worker, subject: int, call_seconds: float, numbers: Numbers) -> float:
    """Seconds per call. Both clocks must agree, on spans so long that the time in the pipe is negligible."""
    calls = min(MOST_CALLS, max(1, math.ceil(AUDIT_SECONDS / call_seconds)))

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

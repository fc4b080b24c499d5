"""Each subject alone in a process of its own: is it right, does it behave, is its clock to be believed?

Only those that pass take part in the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Worker
from moe_routing_bench.bench.worker import MOST_CALLS

CHECKS = (
    "right on two inputs", "memory poisoned", "inputs unchanged", "weights unchanged", "same bits twice",
    "earlier results left alone", "no threads left", "torch's settings left alone",
    "time agrees with the parent's clock",
)  # fmt: skip
# what the parent's clock may see beyond the worker's: the way there and back over the pipe, and a share
PIPE_SECONDS = 3e-4
HIDDEN_SHARE = 0.05
SECOND_CHANCES = 50

Watch = Callable[[], str | None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the trial showed. Trial(status=Status.PASSED, about={"label": "index_add"}, calls=4, ...)"""

    status: Status
    reason: str = ""
    about: dict[str, Any]  # what the implementation says of itself
    verdict: Verdict | None = None
    first_call: float | None = None
    calls: int = 1  # that make a sample long enough for the clock
    call_seconds: float = 0.0  # about, at best
    peak_rss_bytes: int | None = None
    log_tail: str = ""

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED


class Numbers:
    """Call numbers that nobody had before: take(3) gives the first of three."""

    def __init__(self, first: int = 100):
        self._next = first

    def take(self, calls: int = 1) -> int:
        first, self._next = self._next, self._next + calls + 1
        return first


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What stays the same for all trials and rounds of a cell.

    watch: asked after every turn of a subject; a sentence if something outside was touched, such as the
    results file.
    """

    cell: Cell
    judge: Judge
    cores: tuple[int, ...]
    watch: Watch = lambda: None

    def worker(self, index: int) -> Worker:
        return Worker(self.cell.only((self.cell.subjects[index],)), self.cores)


def try_alone(setup: Setup, index: int) -> Trial:
    cell, judge = setup.cell, setup.judge
    subject = cell.subjects[index]
    about: dict[str, Any] = {"label": subject.spec, "origin": "", "deterministic": True, "host_sync": ""}
    found: dict[str, Any] = {}
    worker: Worker | None = None
    try:
        worker = setup.worker(index)
        about = worker.ask("describe", subject=0)
        found["verdict"], found["first_call"] = _gate(worker, subject.layout, judge, about)
        found["calls"], found["call_seconds"] = _calibrate(worker, Numbers())
        if worker.count_threads() > worker.threads:
            more = worker.count_threads() - worker.threads
            raise SubjectError(Status.SUSPECT, f"it left {more} threads or processes running after its calls")
        if (touched := setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        status, reason = Status.PASSED, ""
    except SubjectError as failure:
        status, reason = failure.status, failure.reason
    if worker is not None:
        found["peak_rss_bytes"] = worker.memory("VmHWM") or None
        found["log_tail"] = worker.log_tail()
        worker.close()
    return Trial(status=status, reason=reason, about=about, **found)


def _gate(
    worker: Worker, layout: str, judge: Judge, about: dict[str, Any]
) -> tuple[Verdict | None, float | None]:
    """Right on two inputs, the first twice; inputs, weights and torch's settings as they were."""
    verdict: Verdict | None = None
    first_call: float | None = None
    calls = (("first", 0, 0, False), ("second", 10, 1, True), ("again", 0, 0, True))
    for name, number, step, poison in calls:
        answer = worker.ask("gate", subject=0, number=number, step=step, poison=poison, name=name)
        if "unsupported" in answer:
            raise SubjectError(Status.UNSUPPORTED, str(answer["unsupported"]))
        first_call = first_call or float(answer["seconds"])
        found = check_call(
            worker, judge, answer, name=name, number=number, step=step, layout=layout, about=about
        )
        verdict = verdict or found
        if answer.get("aliases"):
            raise SubjectError(Status.WRONG_STRUCTURE, "its result lies in the memory of an input")
        if answer.get("changed"):
            changed = ", ".join(map(str, answer["changed"]))
            raise SubjectError(Status.SUSPECT, f"it changed {changed} for everybody in its process")
        later = worker.scratch / f"{name}-later.safetensors"
        if not about["reuses_output"] and later.read_bytes() != worker.file(name).read_bytes():
            raise SubjectError(Status.WRONG_VALUE, "the next call overwrote an earlier result")
    same = judge.same_bits(worker.file("first"), worker.file("again"), step=0, layout=layout)
    if about["deterministic"] and not same:
        raise SubjectError(Status.NONDETERMINISTIC, "a second run on the same input gave other bits")
    check_weights(worker, judge)
    return verdict, first_call


def check_call(
    worker: Worker, judge: Judge, answer: dict[str, Any], *,
    name: str, number: int, step: int, layout: str, about: dict[str, Any],
) -> Verdict | None:  # fmt: skip
    """One call whose result the worker handed over: its kind, its inputs afterwards, its values."""
    if answer.get("kind"):
        raise SubjectError(Status.WRONG_STRUCTURE, str(answer["kind"]))
    if answer.get("print") != judge.input_print(number, step, layout):
        raise SubjectError(Status.MUTATED_INPUT, "its inputs were not the same after the call")
    found = judge.judge(worker.file(name), number, step, layout, about["ties"])
    if found.status is not Status.PASSED:
        raise SubjectError(found.status, found.reason)
    return found.verdict


def check_weights(worker: Worker, judge: Judge) -> None:
    if worker.ask("weights").get("print") != judge.weights_print:
        raise SubjectError(Status.MUTATED_INPUT, "the experts' weights were not the same after its calls")


def _calibrate(worker: Worker, numbers: Numbers) -> tuple[int, float]:
    """How many calls make a sample, and that what the worker's clock says is what ours says."""
    calls = worker.ask("calibrate", subject=0, first=numbers.take(3 * MOST_CALLS)).get("calls")
    if not isinstance(calls, int) or not 1 <= calls <= MOST_CALLS:
        raise SubjectError(Status.SUSPECT, "it wrote into the pipe of the benchmark")

    def again() -> tuple[float, float]:
        return worker.sample(subject=0, first=numbers.take(calls), step=0, calls=calls, keep=-1)

    spans = [again() for _ in range(3)]
    while len(spans) < 8 and sum(seen for _, seen in spans) < 0.2:
        spans.append(again())
    check_clocks(spans, again)
    return calls, min(claimed for claimed, _ in spans) / calls


def check_clocks(spans: Sequence[tuple[float, float]], again: Callable[[], tuple[float, float]]) -> None:
    """(claimed, seen) of several spans: the least that was hidden must be next to nothing. A busy machine can
    only make single spans worse, so more are taken before anybody is suspected."""
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

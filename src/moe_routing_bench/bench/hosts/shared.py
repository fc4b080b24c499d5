"""SharedHost: several implementations in one child, which times them itself.

With a process each, caches are colder and a round tells ten times less (8 subjects of 0.3 ms: 463 against 45
ppm s of variance times time). Code from outside is only timed this way where the parent cannot do it, on a
GPU and outside Linux: then it shares a child with a copy of the baseline, and both clocks must agree.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.host import Clock, Reading, Turn
from moe_routing_bench.bench.hosts.messages import Called, StagesTimed, Weights
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.series import Series
from moe_routing_bench.bench.setup import GATE_CALLS, Numbers, Setup
from moe_routing_bench.bench.status import Status, SubjectError
from moe_routing_bench.core.accuracy import Verdict
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

# how much longer the parent's clock may run than the child's: the time in the pipe, and a share of the span
PIPE_SECONDS = 3e-4
HIDDEN_SHARE = 0.05
SECOND_CHANCES = 50
AUDIT_SECONDS = 0.02
Span = tuple[float, float]  # seconds by the child's clock and by the parent's


class Reuse:
    """What a cell leaves to the next one with the same weights, or none: them, and the process of our own
    subjects."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.child: Child | None = None
        self.call_seconds: dict[ImplementationRef, float] = {}  # of the cell before

    def at_least(self, subject: ImplementationRef, experiment: Experiment) -> float:
        """Seconds that a call takes at least: as many as one with fewer tokens took in the cell before."""
        if self.inputs is None:
            return 0.0
        before, now = self.inputs.experiment, experiment
        alike = (before.span, before.direction) == (now.span, now.direction) and before.shape.T <= now.shape.T
        return self.call_seconds.get(subject, 0.0) if alike else 0.0

    def fits(self, experiment: Experiment, inputs: Inputs) -> bool:
        """Is there a process, unharmed, that can measure this cell too? If not, none is left."""
        before, child = self.inputs, self.child
        alike = before is not None and (
            before.weights_key == inputs.weights_key
            or not (before.experiment.weights or inputs.experiment.weights)  # any such cell
        )
        same = child is not None and values_of(child.experiment, "how") == values_of(experiment, "how")
        if child is not None and alike and same and not child.harm():
            return child.experiment.include == experiment.include
        self.close()
        return False

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
        self.inputs = self.child = None
        self.call_seconds = {}


class SharedHost:
    """SharedHost(setup, (staged, native)).sample(Turn(series=Series("candidate", native), first=100))."""

    clock: Clock = "child"

    def __init__(self, setup: Setup, subjects: tuple[ImplementationRef, ...], reuse: Reuse | None = None):
        self.setup, self.subjects, self.reuse = setup, subjects, reuse or Reuse()
        self._child: Child | None = None
        self._handed: Called | None = None
        self._spans: dict[Series, list[Span]] = {}

    @property
    def child(self) -> Child:
        """Its process; started if there is none."""
        if self._child is None and self.reuse.child is not None:
            self._child, self.reuse.child = self.reuse.child, None
            try:
                self._child.next_cell(replace(self.setup.experiment, implementations=self.subjects))
            except SubjectError:
                self.end()
        if self._child is None:
            self._child = self._start()
        self._child.limit = self.setup.limit
        return self._child

    def place(self, subject: ImplementationRef) -> int:
        """A subject's number in the process."""
        return self.subjects.index(subject)

    def prepare(self, series: Series) -> bool:
        return self.place(series.implementation) in self.child.called

    def sample(self, turn: Turn) -> Reading:
        child, place = self.child, self.place(turn.series.implementation)
        if turn.stages:
            answer = child.ask("stages", StagesTimed, subject=place, number=turn.first, step=turn.step)
            return Reading(seconds=sum(answer.stages.values()), stages=answer.stages)
        before = child.vitals()
        timed, seen = child.sample(
            subject=place, first=turn.first, step=turn.step, calls=turn.calls,
            keep=-1 if turn.keep is None else turn.keep, warm=turn.hot,
        )  # fmt: skip
        self._spans.setdefault(turn.series, []).append((timed.seconds, seen))
        if turn.keep is not None:
            self._handed = child.ask("hand_over", Called, subject=place, name="timed")
        after = child.vitals()
        return Reading(
            seconds=timed.seconds / turn.calls, calls=turn.calls, parent_seconds=seen, stages=timed.stages,
            rss_before=before.rss_bytes, rss_after=after.rss_bytes,
            new_threads=after.threads - before.threads,
        )  # fmt: skip

    def judge(self, turn: Turn) -> int:
        if turn.keep is None:
            return 0
        assert self._handed is not None
        subject = turn.series.implementation
        check_call(
            self.child, self.setup.judge, self._handed, name="timed", number=turn.first + turn.keep,
            step=(turn.step + turn.keep) % ROUTINGS, subject=subject,
            ties=self.setup.trials[subject].about.ties,
        )  # fmt: skip
        return 1

    def finish(self, series: Series) -> str:
        child, subject = self.child, series.implementation
        check_threads(child)
        if subject not in self.setup.outside:
            return ""
        calls = self.setup.trials[subject].calls

        def again() -> Span:
            reading = self.sample(Turn(series=series, first=self.setup.numbers.take(calls), calls=calls))
            return reading.seconds * calls, reading.parent_seconds

        check_clocks(self._spans[series], again)
        audit(child, self.place(subject), self.setup.trials[subject].call_seconds, self.setup.numbers)
        return (
            f"{subject.name} is from outside and was timed by a clock in its own process: this system lets "
            "nobody read another process's memory, or it computes on a device"
        )

    def check_weights(self) -> None:
        if self._child is None:
            return
        if self._child.ask("weights", Weights).print != self.setup.judge.weights_print:
            reason = "the experts' weights were not the same after its calls"
            raise SubjectError(Status.MUTATED_INPUT, reason)

    def harm(self) -> str:
        return "" if self._child is None else self._child.harm()

    def end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._spans = None, {}

    def leave(self, call_seconds: Mapping[ImplementationRef, float]) -> None:
        """At the end: the process goes to the next experiment, if that may use it."""
        self.reuse.inputs, self.reuse.call_seconds = self.setup.judge.inputs, dict(call_seconds)
        if self._child is not None:
            self.reuse.child, self._child = self._child, None

    def _start(self) -> Child:
        setup, experiment = self.setup, replace(self.setup.experiment, implementations=self.subjects)
        sandbox = experiment.sandbox and not setup.outside.isdisjoint(self.subjects)
        child = Child(experiment, setup.cores, shared_worker.serve, sandbox=sandbox)
        return child.ready(self._meanwhile)

    def _meanwhile(self) -> None:
        self.setup.judge.foresee(GATE_CALLS, self.subjects[0])
        importlib.import_module("scipy.stats")  # takes a second; the verdicts need it


def check_call(
    child: Child, judge: Judge, answer: Called, *,
    name: str, number: int, step: int, subject: ImplementationRef, ties: str,
) -> Verdict | None:  # fmt: skip
    """Checks a call whose result was handed over: type, inputs after the call, values."""
    if answer.wrong_type:
        raise SubjectError(Status.WRONG_STRUCTURE, answer.wrong_type)
    if answer.print != judge.input_print(number, step, subject):
        raise SubjectError(Status.MUTATED_INPUT, "its inputs were not the same after the call")
    finding = judge.judge(child.file(name), number, step, subject, ties)
    if finding.status is not Status.PASSED:
        raise SubjectError(finding.status, finding.reason)
    return finding.verdict


def check_threads(child: Child) -> None:
    if (more := child.count_threads() - child.threads) > 0:
        raise SubjectError(Status.SUSPECT, f"it left {more} threads or processes running after its calls")


def audit(child: Child, place: int, call_seconds: float, numbers: Numbers) -> float:
    """Seconds per call. Both clocks must agree, on spans so long that the time in the pipe is negligible."""
    calls = min(shared_worker.MAX_CALLS, max(1, math.ceil(AUDIT_SECONDS / call_seconds)))

    def again() -> Span:
        timed, seen = child.sample(subject=place, first=numbers.take(calls), step=0, calls=calls, keep=-1)
        return timed.seconds, seen

    spans = [again() for _ in range(3)]
    check_clocks(spans, again)
    return min(claimed for claimed, _ in spans) / calls


def check_clocks(spans: Sequence[Span], again: Callable[[], Span]) -> None:
    """Of several spans, the smallest difference of the clocks must be negligible. A busy machine can only
    make single spans worse, so more are taken before a subject is called SUSPECT."""
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

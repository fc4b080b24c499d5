"""SharedHost: several implementations in one child, which times them itself.

With a process each, caches are colder and a round tells ten times less (8 implementations of 0.3 ms: 463
against 45 ppm s of variance times time). Code from outside is only timed this way where the parent cannot do
it, on a GPU and outside Linux: then it shares a child with a copy of the baseline, and both clocks must
agree.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.holding import can_hold
from moe_routing_bench.bench.hosts.host import Clock, Judged, Reading, Turn
from moe_routing_bench.bench.hosts.messages import (
    Described,
    DeviceSaid,
    HandedOver,
    KitRun,
    Loaded,
    StagesTimed,
    Weights,
)
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs
from moe_routing_bench.bench.kit import can_judge_kit, judge_kit
from moe_routing_bench.bench.series import Series
from moe_routing_bench.bench.setup import GATE_CALLS, Setup
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.untrusted import read_file
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

# how much longer the parent's clock may run than the child's: the time in the pipe, and a share of the span
PIPE_SECONDS = 3e-4
HIDDEN_SHARE = 0.05
SECOND_CHANCES = 50
AUDIT_SECONDS = 0.02
MAX_CALLS = 256  # in one sample: each has its own inputs, all made before the sample
Span = tuple[float, float]  # seconds by the child's clock and by the parent's


class Reuse:
    """What a cell leaves to the next one with the same weights, or to any without weights: the inputs, and
    the process of our own implementations."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.child: Child | None = None
        self.call_seconds: dict[ImplementationRef, float] = {}  # of the cell before

    def at_least(self, implementation: ImplementationRef, experiment: Experiment) -> float:
        """A lower limit for the seconds of a call: the time of a call with fewer tokens in the cell
        before."""
        if self.inputs is None:
            return 0.0
        before, now = self.inputs.experiment, experiment
        alike = (before.span, before.direction) == (now.span, now.direction) and before.shape.T <= now.shape.T
        return self.call_seconds.get(implementation, 0.0) if alike else 0.0

    def fits(self, experiment: Experiment, inputs: Inputs) -> bool:
        """True if there is an unharmed process that can measure this cell too. Otherwise the process is
        ended."""
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
    max_calls = MAX_CALLS

    def __init__(
        self, setup: Setup, implementations: tuple[ImplementationRef, ...], reuse: Reuse | None = None
    ):
        self.setup, self.implementations, self.reuse = setup, implementations, reuse or Reuse()
        self._child: Child | None = None
        self._handed: HandedOver | None = None
        self._named = ""  # the result before, if it must not change
        self._spans: dict[Series, list[Span]] = {}

    @property
    def child(self) -> Child:
        """Its process; started if there is none."""
        if self._child is None and self.reuse.child is not None:
            self._child, self.reuse.child = self.reuse.child, None
            try:
                self._child.next_cell(replace(self.setup.experiment, implementations=self.implementations))
            except ImplementationError:
                self.end()
        if self._child is None:
            self._child = self._start()
        self._child.limit = self.setup.limit
        return self._child

    def place(self, implementation: ImplementationRef) -> int:
        """An implementation's number in the process."""
        return self.implementations.index(implementation)

    def describe(self, implementation: ImplementationRef) -> Described:
        """What it declares. From here on, threads and memory of the process are counted as its own."""
        self.child.begin_watch()
        self._named = ""  # the trial before may have ended early
        return self.child.ask("describe", Described, place=self.place(implementation))

    def kit(self, implementation: ImplementationRef) -> KitRun:
        """The hard cases of `mrb check`, all of them in the process. If the code is from outside, its results
        are judged here: what it says of itself must be so."""
        experiment, outside = self.setup.experiment, implementation in self.setup.outside
        judged_here = outside and can_judge_kit(experiment, implementation)
        name = "kit" if judged_here else ""
        answer = self.child.ask("kit", KitRun, place=self.place(implementation), name=name)
        if answer.failed or not outside:
            return answer
        ties = self.setup.about(implementation).ties
        try:
            if judged_here:
                judge_kit(self.child.file("kit"), experiment, implementation, ties, answer.refused)
            elif not answer.passed and span_named(experiment.span).named(implementation.name):
                raise ImplementationError(Status.UNSUPPORTED, "it says that it ran none of the hard cases")
        except (ValueError, SafetensorError) as error:
            reason = f"its results of the hard cases: {error}"
            raise ImplementationError(Status.WRONG_STRUCTURE, reason) from None
        return answer

    def loaded(self) -> tuple[str, ...]:
        """Files that the process has loaded from elsewhere than Python, the system and this package: by its
        own word, and libraries by the system's."""
        return (*self.child.ask("loaded", Loaded).files, *self.child.mapped())

    def left_running(self) -> int:
        """How many processes code from outside has started that still run."""
        return self.child.left_running()

    def others(self) -> str:
        """A sentence if another process used the GPU when its process began; empty if none did."""
        alive = self._child is not None and not self._child.harm()
        return self.child.ask("device", DeviceSaid).others if alive else ""

    def memory_and_log(self) -> tuple[int | None, str]:
        """The most memory since `describe`, and the end of what was printed."""
        return (None, "") if self._child is None else (self._child.peak_bytes(), self._child.log_tail())

    def prepare(self, series: Series) -> bool:
        return self.place(series.implementation) in self.child.called

    def sample(self, turn: Turn) -> Reading:
        child, place = self.child, self.place(turn.series.implementation)
        if turn.stages:
            answer = child.ask("stages", StagesTimed, place=place, number=turn.first, step=turn.step)
            return Reading(seconds=sum(answer.stages.values()), stages=answer.stages)
        before = child.vitals()
        timed, seen = child.sample(
            place=place, first=turn.first, step=turn.step, calls=turn.calls,
            keep=-1 if turn.keep is None else turn.keep, warm=turn.hot, poison=turn.poison,
        )  # fmt: skip
        child.called.add(place)
        self._spans.setdefault(turn.series, []).append((timed.seconds, seen))
        if turn.keep is not None:
            self._handed = child.ask("hand_over", HandedOver, place=place, name=turn.name)
        after = child.vitals()
        return Reading(
            seconds=timed.seconds / turn.calls, calls=turn.calls, parent_seconds=seen, stages=timed.stages,
            rss_before=before.rss_bytes, rss_after=after.rss_bytes,
            new_threads=after.threads - before.threads, used=timed.used,
            launch_seconds=timed.launch_seconds / turn.calls,
        )  # fmt: skip

    def judge(self, turn: Turn) -> Judged:
        """Checks the type of the kept result, the inputs after the call and the values. Then it checks shared
        memory, changed settings, and that the named result before is unchanged."""
        if turn.keep is None:
            return Judged()
        assert self._handed is not None
        judge, answer, implementation = self.setup.judge, self._handed, turn.series.implementation
        about, file = self.setup.about(implementation), self.child.file(turn.name or shared_worker.TIMED)
        number, step = turn.first + turn.keep, (turn.step + turn.keep) % ROUTINGS
        earlier, self._named = self._named, turn.name
        if answer.wrong_type:
            raise ImplementationError(Status.WRONG_STRUCTURE, answer.wrong_type)
        if answer.print != judge.input_print(number, step, implementation):
            raise ImplementationError(Status.MUTATED_INPUT, "its inputs were not the same after the call")
        finding = judge.judge(file, number, step, implementation, about.ties)
        if finding.status is not Status.PASSED:
            raise ImplementationError(finding.status, finding.reason)
        if answer.aliases:
            raise ImplementationError(Status.WRONG_STRUCTURE, "its result shares memory with an input")
        if answer.changed:
            changed = ", ".join(answer.changed)
            raise ImplementationError(Status.SUSPECT, f"it changed {changed} for everybody in its process")
        files = (self.child.file(name) for name in (earlier, f"{earlier}-later"))
        if earlier and not about.reuses_output and not _same_files(*files):
            raise ImplementationError(Status.WRONG_VALUE, "the next call overwrote an earlier result")
        return Judged(results=1, verdict=finding.verdict, runs=answer.runs, file=file)

    def finish(self, series: Series) -> str:
        implementation = series.implementation
        self.check_threads()
        if implementation not in self.setup.outside:
            return ""
        trial = self.setup.trials[implementation]
        check_clocks(self._spans[series], lambda: self._span(series, trial.calls))
        self.audit(series, trial.call_seconds)
        return (
            f"{implementation.name} is from outside and was timed by a clock in its own process: this system "
            "lets nobody read another process's memory, or it computes on a device"
        )

    def audit(self, series: Series, call_seconds: float) -> float:
        """Returns the seconds of a call. Both clocks must agree on spans so long that the time in the pipe is
        negligible."""
        calls = min(self.max_calls, max(1, math.ceil(AUDIT_SECONDS / call_seconds)))
        spans = [self._span(series, calls) for _ in range(3)]
        check_clocks(spans, lambda: self._span(series, calls))
        return min(claimed for claimed, _ in spans) / calls

    def _span(self, series: Series, calls: int) -> Span:
        reading = self.sample(Turn(series=series, first=self.setup.numbers.take(calls), calls=calls))
        return reading.seconds * calls, reading.parent_seconds

    def check_threads(self) -> None:
        if (more := self.child.count_threads() - self.child.threads) > 0:
            raise ImplementationError(
                Status.SUSPECT, f"it left {more} threads or processes running after its calls"
            )

    def check_weights(self) -> None:
        if self._child is None:
            return
        if self._child.ask("weights", Weights).print != self.setup.judge.weights_print:
            reason = "the experts' weights were not the same after its calls"
            raise ImplementationError(Status.MUTATED_INPUT, reason)

    def harm(self) -> str:
        return "" if self._child is None else self._child.harm()

    def end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._spans, self._named = None, {}, ""

    def leave(self, call_seconds: Mapping[ImplementationRef, float]) -> None:
        """Hands the process to the next experiment, if that may use it."""
        self.reuse.inputs, self.reuse.call_seconds = self.setup.judge.inputs, dict(call_seconds)
        if self._child is not None:
            self.reuse.child, self._child = self._child, None

    def _start(self) -> Child:
        setup, experiment = self.setup, replace(self.setup.experiment, implementations=self.implementations)
        outside = not setup.outside.isdisjoint(self.implementations)
        held = outside and can_hold()
        child = Child(
            experiment, setup.cores, shared_worker.serve, "outside" if held else "ours",
            sandbox=experiment.sandbox and outside, held=held,
        )  # fmt: skip
        return child.ready(self._meanwhile)

    def _meanwhile(self) -> None:
        self.setup.judge.foresee(GATE_CALLS, self.implementations[0])
        importlib.import_module("scipy.stats")  # takes a second; the verdicts need it


def _same_files(one: Path, other: Path) -> bool:
    """True if two files of results are equal. The first one is judged, so its length is known to be
    reasonable."""
    try:
        first = read_file(one, sys.maxsize)
        return first == read_file(other, len(first))
    except ValueError:
        return False


def check_clocks(spans: Sequence[Span], again: Callable[[], Span]) -> None:
    """The smallest difference of the clocks over several spans must be negligible. A busy machine can only
    make single spans worse, so more are taken before an implementation is called SUSPECT."""
    taken = list(spans)
    while True:
        hidden, seen = min((seen - claimed, seen) for claimed, seen in taken)
        if hidden <= PIPE_SECONDS + HIDDEN_SHARE * seen:
            return
        if len(taken) >= len(spans) + SECOND_CHANCES:
            break
        taken.append(again())
    raise ImplementationError(
        Status.SUSPECT,
        f"it says {1e3 * (seen - hidden):.3g} ms where the parent's clock saw {1e3 * seen:.3g} ms",
    )

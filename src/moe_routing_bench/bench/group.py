"""run_group measures a cell on several ranks: each rank a process, all calls together, every result judged.

A sample is from the moment the last rank begins to the moment the last one ends. Subjects take turns in every
round, on the same inputs and in a new order, with the baseline's twin, as in one process. Caches, calls
before the first sample and sets of processes are as the policy says. The policy's threads are those of a
rank. The trial is shorter than in one process: two judged calls, poisoned memory, the same bits twice, and
the kit on one rank. Only our own code is measured, so nobody looks for harm done to other processes. What
fails ends its group; the others go on in a new one.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.calls import Result, tensors_by_name
from moe_routing_bench.bench.cores import judging_threads
from moe_routing_bench.bench.floor import beaten_roofs, floor_seconds, roof_seconds
from moe_routing_bench.bench.group_worker import serve
from moe_routing_bench.bench.identity import identify
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs
from moe_routing_bench.bench.judging import Judge, Judgement
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.messages import KitRun
from moe_routing_bench.bench.noise import NoiseDuring, weather
from moe_routing_bench.bench.outcome import CellOutcome, SubjectOutcome, Wire
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.rounds import WARM_SAMPLES
from moe_routing_bench.bench.runner import OnProgress, Progress, work_and_load
from moe_routing_bench.bench.series import TWIN
from moe_routing_bench.bench.spans.parallel import STAGES, placement_of
from moe_routing_bench.bench.spans.span import all_threads, is_ours, span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError
from moe_routing_bench.bench.trial import check_kit
from moe_routing_bench.bench.verdict import MIN_ROUNDS, aa_floor, compare_cells, stop_reason
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.moe.expert_parallel import EXPERTS
from moe_routing_bench.planner.flow import TRANSPORTS, count_flow
from moe_routing_bench.workloads.experiment import LONG_CALL, Experiment, ImplementationRef

# numbers of calls that are not timed begin here
TRIAL_CALLS = 1_000_000
WARM_CALLS = 2_000_000
START_SECONDS = 300.0  # importing torch in W processes on a busy machine


class Group:
    """W processes that run the same calls."""

    def __init__(self, experiment: Experiment):
        self.experiment, self._place = experiment, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(experiment.W):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, experiment.to_json(), self._place.name), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def call(
        self, subject: int, number: int, *, keep: bool = False, warm: int | None = None, poison: bool = False
    ) -> np.ndarray[Any, Any]:
        """When the last rank began and ended each stage; with `keep` the results are files until the next.
        The rest is as in group_worker.py."""
        answers = self._ask(
            "call", subject=subject, number=number, step=number % ROUTINGS, keep=keep, warm=warm,
            poison=poison,
        )  # fmt: skip
        return np.array([answer["stamps"] for answer in answers]).max(0)

    def kit(self, subject: int) -> KitRun:
        return KitRun.model_validate(self._ask("kit", subject=subject)[0])

    def _ask(self, what: str, **details: Any) -> list[dict[str, Any]]:
        """The answers of all ranks to one request."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(json.dumps({"do": what, **details}).encode())
            except OSError:
                raise SubjectError(Status.CRASHED, f"the process of rank {rank} died") from None
        return self._answers(self.experiment.step_seconds)

    def result(self) -> Result:
        """Of the last call that was kept: the tokens of all ranks and the gradients of all experts. What
        every rank has must be the same on all of them."""
        parts = [
            load_file(Path(self._place.name) / f"{rank}.safetensors") for rank in range(self.experiment.W)
        ]
        whole = {}
        for name, first in parts[0].items():
            if name in ("y_TD", "x_TD") or name.startswith(EXPERTS):
                whole[name] = torch.cat([part[name] for part in parts])
            elif all(torch.equal(part[name], first) for part in parts):
                whole[name] = first
            else:
                raise SubjectError(Status.WRONG_VALUE, f"ranks have different gradients of {name}")
        return Result(out=whole.pop("y_TD"), gradients=whole)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        answered: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + seconds
        while len(answered) < len(self._pipes):
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answered]
            ready = wait(left, max(0.0, until - time.monotonic()))
            if not ready:
                missing = sorted(set(range(len(self._pipes))) - set(answered))
                raise SubjectError(Status.TIMEOUT, f"ranks {missing} gave no answer within {seconds:g} s")
            for pipe in ready:
                rank = next(r for r, one in enumerate(self._pipes) if one is pipe)
                try:
                    answer = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise SubjectError(Status.CRASHED, f"the process of rank {rank} died") from None
                if "error" in answer:
                    status = Status.UNSUPPORTED if answer["unsupported"] else Status.RUNTIME_ERROR
                    raise SubjectError(status, f"rank {rank}: {answer['error']}")
                answered[rank] = answer
        return [answered[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._place.cleanup()


@dataclass(kw_only=True)
class _Series:
    """What was seen of one subject."""

    status: Status = Status.PASSED
    reason: str = ""
    checks: tuple[str, ...] = ()
    finding: Judgement | None = None
    first_call: float = 0.0
    call_seconds: float = math.inf  # the shortest call of its trial
    samples: list[float] = field(default_factory=list)
    stages: list[list[float]] = field(default_factory=list)
    checked: int = 0


class _Session:
    """A group that is started again when something failed in it."""

    def __init__(self, experiment: Experiment, judge: Judge, sources: Mapping[ImplementationRef, str]):
        self.experiment, self.judge, self.sources = experiment, judge, sources
        self._group: Group | None = None

    @property
    def group(self) -> Group:
        self._group = self._group or Group(self.experiment)
        return self._group

    def end(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def judged(self, result: Result, subject: int, number: int) -> Judgement:
        return self.judge.judge_result(
            result, number, number % ROUTINGS, self.experiment.implementations[subject]
        )

    def warm_up(self, subject: int) -> None:
        for number in range(WARM_SAMPLES):
            self.group.call(subject, WARM_CALLS + number)

    def timed(self, subject: int, seen: _Series, number: int, look: bool, hot: bool) -> None:
        warm = WARM_CALLS + WARM_SAMPLES + number if hot else None
        ends = self.group.call(subject, number, keep=look, warm=warm)
        seen.samples.append(float(ends[-1] - ends[0]))
        seen.stages.append(np.diff(ends).tolist())
        if look:
            finding = self.judged(self.group.result(), subject, number)
            if finding.status is not Status.PASSED:
                raise SubjectError(finding.status, f"{finding.reason} (during the rounds)")
            seen.checked += 1

    def trial(self, subject: int, seen: _Series) -> None:
        results = []
        for number, poison in ((TRIAL_CALLS, False), (TRIAL_CALLS + 1, True), (TRIAL_CALLS, True)):
            ends = self.group.call(subject, number, keep=True, poison=poison)
            seconds = float(ends[-1] - ends[0])
            seen.first_call = seen.first_call or seconds
            seen.call_seconds = min(seen.call_seconds, seconds)
            result = self.group.result()
            finding = self.judged(result, subject, number)
            if finding.status is not Status.PASSED:
                raise SubjectError(finding.status, finding.reason)
            seen.finding = finding
            results.append(tensors_by_name(result))
        about = self.experiment.implementations[subject]
        same = all(torch.equal(results[2][name], tensor) for name, tensor in results[0].items())
        promised = all(part.deterministic for part in span_named(self.experiment.span).parts(about.name))
        if promised and not same:
            raise SubjectError(Status.NONDETERMINISTIC, "two runs gave different bits")
        kits = PassedKits(self.experiment, outside=False)
        if not kits.knows(about, self.sources[about]):
            check_kit(self.group.kit(subject))
            kits.add(about, self.sources[about])
        bits = ("same bits twice",) if promised else ()
        seen.checks = ("right on two inputs", "right on the kit's hard cases", "memory poisoned", *bits)


def run_group(
    experiment: Experiment, *, roofs: Roofs | None = None, on_progress: OnProgress = lambda progress: None,
    budget: Budget | None = None,
) -> CellOutcome:  # fmt: skip
    """Measure one cell on cell.W ranks. A failing implementation never raises here."""
    budget, before = budget or Budget(experiment.max_seconds), weather()
    identity, inputs = identify(experiment, this_machine()), Inputs(experiment)
    seen = {place: _Series() for place in range(len(experiment.implementations))}

    def report(what: str) -> None:
        share = min(1.0, budget.used / budget.seconds)
        on_progress(Progress(what=what, share=share, left=max(0.0, budget.left)))

    reason = _refused(experiment, inputs)
    for place, subject in enumerate(experiment.implementations):
        why = reason or _cannot(experiment, inputs, place)
        if why:
            seen[place].status, seen[place].reason = Status.UNSUPPORTED, f"{subject.name}: {why}"
    alive = [place for place in seen if seen[place].status is Status.PASSED]
    session = _Session(experiment, Judge(span_named(experiment.span), inputs), identity.sources)
    stopped, rounds = "nothing passed its trial", list[int]()
    try:
        with judging_threads():
            for place in list(alive):
                report(f"trying {experiment.implementations[place].name}")
                _guarded(session, seen, alive, place, partial(session.trial, place, seen[place]))
            while alive and not rounds:
                stopped, rounds = _rounds(session, seen, alive, budget, report)
    finally:
        session.end()
    outcomes = _outcomes(experiment, inputs, seen, alive, roofs)
    return CellOutcome(
        experiment=experiment, identity=identity, outcomes=outcomes, rounds=sum(rounds),
        rounds_by_process=tuple(rounds), stop_reason=stopped,
        aa_floor=aa_floor(seen[alive[0]].samples, seen[TWIN].samples) if alive else None,
        routing_checksum="" if reason else inputs.workload(0).checksum,
        weather=NoiseDuring(before=before, after=weather()), seconds=budget.used,
        notes=_notes(experiment, outcomes),
    )  # fmt: skip


def _notes(experiment: Experiment, outcomes: tuple[SubjectOutcome, ...]) -> tuple[str, ...]:
    wires = [
        f"{one.subject.name} {one.wire.sent / 1e6:.3g} MB, {one.wire.sent / one.wire.least:.2f} of the least"
        for one in outcomes
        if one.wire is not None and one.role != "twin" and one.wire.least
    ]
    timed = [one for one in outcomes if one.samples and one.role != "twin" and not one.roof_busy]
    return (
        f"{experiment.W} ranks are processes on one machine, joined by Gloo over the loopback, "
        f"with {all_threads(experiment)} threads in all",
        *([f"rows that leave their rank in a forward pass, both ways: {'; '.join(wires)}"] if wires else []),
        *beaten_roofs({one.label: (median(one.samples), one.roof_seconds) for one in timed}),
    )


def _refused(experiment: Experiment, inputs: Inputs) -> str:
    try:
        inputs.workload(0)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _cannot(experiment: Experiment, inputs: Inputs, place: int) -> str:
    subject = experiment.implementations[place]
    if not all(map(is_ours, span_named(experiment.span).origins(subject.name))):
        return "on several ranks code from outside is not measured"
    if Layout.parse(subject.layout).kind != "compact":
        return "on several ranks only the compact layout is measured: what others drop depends on the rank"
    try:
        args = span_named(experiment.span).arguments(inputs.at(0, 0, subject.layout))
        return span_named(experiment.span).why_not(subject, inputs, args) or ""
    except NotImplementedError as error:
        return str(error)


def _guarded(
    session: _Session, seen: dict[int, _Series], alive: list[int], place: int, work: Callable[[], Any]
) -> bool:
    """Whether it went well; else the subject is out, and the group with it."""
    try:
        work()
    except SubjectError as failure:
        one = seen[place]
        one.status, one.reason = failure.status, failure.reason
        alive.remove(place)
        session.end()
        return False
    return True


def _rounds(
    session: _Session,
    seen: dict[int, _Series],
    alive: list[int],
    budget: Budget,
    report: Callable[[str], None],
) -> tuple[str, list[int]]:
    """Why they stopped, and their number in each set of processes; none if a subject failed: then they begin
    again without it."""
    experiment, by_process, stopped = session.experiment, list[int](), ""
    for place in (*alive, TWIN):
        seen[place] = replace(seen.get(place, _Series()), samples=[], stages=[], checked=0)
    for process in range(experiment.processes):
        if process:
            session.end()
        until = budget.used + budget.left / (experiment.processes - process)
        reason = _rounds_of_one_set(session, seen, alive, budget, until, sum(by_process), report)
        if reason is None:
            return "a subject failed during the rounds", []
        by_process.append(len(seen[TWIN].samples) - sum(by_process))
        stopped = reason
    return stopped, by_process


def _rounds_of_one_set(
    session: _Session, seen: dict[int, _Series], alive: list[int], budget: Budget, until: float, before: int,
    report: Callable[[str], None],
) -> str | None:  # fmt: skip
    """Rounds until every ratio is known or so much of the budget is used; None if a subject failed.

    before: rounds in earlier sets of processes
    """
    experiment, dice = session.experiment, random.SystemRandom()
    for place in list(alive):
        if not _guarded(session, seen, alive, place, partial(session.warm_up, place)):
            return None
    looks = {
        0,
        *dice.sample(range(1, experiment.min_rounds), min(experiment.checked, experiment.min_rounds) - 1),
    }
    hot = {s: experiment.cache == "hot" and seen[s].call_seconds < LONG_CALL for s in alive}
    done = 0
    while True:
        order = [*alive, TWIN]
        dice.shuffle(order)
        for place in order:
            subject = alive[0] if place == TWIN else place
            look = done in looks and place != TWIN
            timed = partial(session.timed, subject, seen[place], before + done, look, hot[subject])
            if not _guarded(session, seen, alive, subject, timed):
                return None
        done += 1
        report(f"round {before + done}")
        if done < MIN_ROUNDS or (done < experiment.min_rounds and budget.used < until):
            continue
        why = [
            stop_reason(
                seen[alive[0]].samples[before:], seen[place].samples[before:], target=experiment.target,
                min_rounds=experiment.min_rounds, max_rounds=experiment.max_rounds, seconds=budget.used,
                max_seconds=until,
            )
            for place in (alive[1:] or [TWIN])
        ]  # fmt: skip
        if all(why):
            return str(why[0])


def _outcomes(
    experiment: Experiment, inputs: Inputs, seen: dict[int, _Series], alive: list[int], roofs: Roofs | None
) -> tuple[SubjectOutcome, ...]:
    outcomes, stages, span = [], STAGES[experiment.direction], span_named(experiment.span)
    for place, subject in enumerate(experiment.implementations):
        one = seen[place]
        about: dict[str, Any] = {
            "subject": subject, "label": subject.name, "status": one.status, "reason": one.reason,
        }  # fmt: skip
        if one.status is Status.PASSED:
            parts = span.parts(subject.name)
            cost, load = work_and_load(span, subject, inputs)
            least = roof_seconds(experiment, subject, cost, roofs)
            verdict = one.finding.verdict if one.finding else None
            about |= {
                "label": "+".join(part.label for part in parts), "origin": parts[0].origin,
                "runs": "; ".join(f"{op}: {label}" for op, label in span.resolved(subject, inputs)),
                "role": "baseline" if place == alive[0] else "candidate",
                "deterministic": all(part.deterministic for part in parts),
                "host_sync": next((part.host_sync for part in parts if part.host_sync), ""),
                "checks": one.checks, "checked_timed_calls": one.checked, "first_call": one.first_call,
                "samples": tuple(one.samples), "cost": cost, "load": load,
                "stages": {name: median(s[i] for s in one.stages) for i, name in enumerate(stages)},
                "wire": wire_of(inputs, experiment.W, parts[0].name),
                "max_error": verdict and verdict.max_error, "max_bound": verdict and verdict.max_bound,
                "error": verdict and verdict.relative_error,
                "floor_seconds": floor_seconds(experiment, cost, roofs), "roof_seconds": least,
                "roof_busy": least is not None and roofs is not None and bool(roofs.busy),
            }  # fmt: skip
        outcomes.append(SubjectOutcome(**about))
    if not alive:
        return tuple(outcomes)
    baseline, twin = outcomes[alive[0]], tuple(seen[TWIN].samples)
    outcomes.append(replace(baseline, role="twin", samples=twin, stages={}, checked_timed_calls=0))
    others = [*alive[1:], len(outcomes) - 1]
    floor = aa_floor(baseline.samples, twin)
    compared = compare_cells(
        [(baseline.samples, outcomes[place].samples) for place in others],
        aa_floor=floor,
        target=experiment.target,
    )
    for place, comparison in zip(others, compared, strict=True):
        outcomes[place] = replace(outcomes[place], comparison=comparison)
    return tuple(outcomes)


def wire_of(inputs: Inputs, W: int, transport: str) -> Wire | None:
    """Bytes of rows that leave their rank in the first call, both ways, and the least that any transport
    needs in a forward pass: a token once to each rank with one of its experts, and one sum back."""
    if transport not in TRANSPORTS:
        return None
    plan, tokens_W = inputs.at(0, 0, "compact").plan, inputs.workload(0).tokens_W
    expert_TK, ends = plan.expert_TK().numpy(), np.cumsum([0, *tokens_W])
    placement = placement_of(inputs.experiment.E, W)
    flow = count_flow(lambda rank: expert_TK[ends[rank] : ends[rank + 1]], placement)
    row = 2 * inputs.experiment.D * inputs.experiment.element_size
    sent = sum(int(rows_WW.sum() - np.trace(rows_WW)) for rows_WW in flow.phases(transport))
    return Wire(sent=row * sent, least=row * int(flow.to_WW.sum() - np.trace(flow.to_WW)))

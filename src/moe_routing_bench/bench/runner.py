"""run_cell measures a cell: first every subject alone, then all that passed together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.clock import last_level_cache_bytes
from moe_routing_bench.bench.identity import Identity, identify
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.outcome import CellOutcome, SubjectOutcome
from moe_routing_bench.bench.roofs import TOLERANCE, Roofs
from moe_routing_bench.bench.rounds import TWIN, BlamedError, Measured, beside, measure
from moe_routing_bench.bench.spans.span import Load, Span, is_ours
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.bench.supervisor import SubjectError, quiet_cores
from moe_routing_bench.bench.trial import CHECKS, Setup, Trial, Watch, try_alone
from moe_routing_bench.bench.verdict import aa_floor, compare, compare_cells
from moe_routing_bench.bench.weather import WeatherSpan, weather
from moe_routing_bench.cost import Cost
from moe_routing_bench.machine import this_machine
from moe_routing_bench.routers.router import include_folder


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress(what="rounds", share=0.4): two fifths of the cell are done."""

    what: str
    share: float


OnProgress = Callable[[Progress], None]
WorkAndLoad = tuple[Cost, Load]  # for one Subject.question
TRIAL_SHARE = 0.4  # the trials take about this share of a cell's time


def run_cell(
    cell: Cell,
    *,
    roofs: Roofs | None = None,
    on_progress: OnProgress = lambda progress: None,
    watch: Watch = lambda: None,
) -> CellOutcome:
    """Measure one cell. A failing implementation never raises here; its outcome has the status."""
    started, before = time.perf_counter(), weather()
    for folder in cell.include:
        include_folder(folder)  # only registers names; workers load the code
    span, identity = cell.span, identify(cell, this_machine())
    try:
        inputs = cell.inputs()
        workload = inputs.workload(0)
        facts = {s.question: _facts(span, s, inputs) for s in cell.subjects}
    except (ValueError, NotImplementedError) as reason:
        return _cannot(cell, identity, str(reason), WeatherSpan(before=before, after=weather()))
    judge = Judge(span, inputs)
    ours = [all(map(is_ours, span.origins(subject.spec))) for subject in cell.subjects]
    setup = Setup(
        cell=cell,
        judge=judge,
        cores=quiet_cores(cell.policy.threads),
        watch=watch,
        outside=frozenset(i for i, mine in enumerate(ours) if not mine),
    )
    trials = {}
    for index, subject in enumerate(cell.subjects):
        on_progress(Progress(what=f"trying {subject.spec}", share=TRIAL_SHARE * index / len(cell.subjects)))
        trials[index] = try_alone(setup, index)

    measured: Measured | None = None
    per_round = (1 - TRIAL_SHARE) / (cell.policy.processes * cell.policy.max_rounds)
    alive = [index for index, trial in trials.items() if trial.passed]
    while alive and measured is None:
        try:
            measured = measure(
                setup, alive, trials,
                lambda done: on_progress(Progress(what="rounds", share=TRIAL_SHARE + per_round * done)),
            )  # fmt: skip
            for index in alive:
                cost, _ = facts[cell.subjects[index].question]
                _hold_to_the_floor(index, median(measured.samples[index]), floor_seconds(cell, cost, roofs))
        except BlamedError as blame:
            failure = blame.failure
            trials[blame.subject] = replace(
                trials[blame.subject], status=failure.status, reason=f"{failure.reason} (during the rounds)"
            )
            alive.remove(blame.subject)
            measured = None
    return CellOutcome(
        cell=cell,
        identity=identity,
        outcomes=_outcomes(cell, trials, measured, alive, facts, roofs),
        rounds=len(measured.samples[TWIN]) if measured else 0,
        rounds_by_process=tuple(measured.rounds_by_process) if measured else (),
        stop_reason=measured.stop_reason if measured else "nothing passed its trial",
        aa_floor=aa_floor(measured.samples[alive[0]], measured.samples[TWIN]) if measured else None,
        routing_checksum=workload.checksum,
        weather=WeatherSpan(before=before, after=weather()),
        seconds=time.perf_counter() - started,
        notes=_notes(cell, trials, alive),
    )


def _cannot(cell: Cell, identity: Identity, reason: str, weather_span: WeatherSpan) -> CellOutcome:
    """The outcome if these sizes cannot have the workload. It must not end a sweep."""
    return CellOutcome(
        cell=cell,
        identity=identity,
        outcomes=tuple(
            SubjectOutcome(
                subject=subject,
                label=subject.spec,
                status=Status.UNSUPPORTED,
                reason=reason,
            )
            for subject in cell.subjects
        ),
        stop_reason="these sizes cannot have this workload",
        weather=weather_span,
    )


def _outcomes(
    cell: Cell, trials: dict[int, Trial], measured: Measured | None, alive: list[int],
    facts: Mapping[tuple[str, str, str], WorkAndLoad], roofs: Roofs | None,
) -> tuple[SubjectOutcome, ...]:  # fmt: skip
    outcomes = []
    for index, subject in enumerate(cell.subjects):
        trial, (cost, load) = trials[index], facts[subject.question]
        about: dict[str, Any] = {
            "subject": subject,
            "label": trial.about.label,
            "status": trial.status,
            "reason": trial.reason,
            "origin": trial.about.origin,
            "runs": trial.runs,
            "deterministic": trial.about.deterministic,
            "host_sync": trial.about.host_sync,
            "first_call": trial.first_call,
            "calls_per_sample": measured.calls[index] if measured and index in alive else trial.calls,
            "cost": cost,
            "load": load,
            "peak_rss_bytes": trial.peak_rss_bytes,
            "log_tail": trial.log_tail,
        }
        if trial.passed and measured is not None:
            about |= {
                "role": "baseline" if index == alive[0] else "candidate",
                "checks": CHECKS,
                "checked_timed_calls": measured.checked[index],
                "samples": tuple(measured.samples[index]),
                "stages": measured.stage_medians(index),
                "floor_seconds": floor_seconds(cell, cost, roofs),
            }
            if trial.verdict is not None:
                about |= {"max_error": trial.verdict.max_error, "max_bound": trial.verdict.max_bound}
        outcomes.append(SubjectOutcome(**about))
    if measured is None:
        return tuple(outcomes)
    baseline = outcomes[alive[0]]
    outcomes.append(
        replace(
            baseline, role="twin", samples=tuple(measured.samples[TWIN]), stages={}, checked_timed_calls=0
        )
    )
    floor = aa_floor(baseline.samples, outcomes[-1].samples)
    pairs = {place: measured.samples[measured.against(place)] for place in alive[1:]}
    pairs[len(outcomes) - 1] = measured.samples[alive[0]]
    comparisons = compare_cells(
        [(against, outcomes[place].samples) for place, against in pairs.items()], aa_floor=floor
    )
    for place, comparison in zip(pairs, comparisons, strict=True):
        outcomes[place] = replace(outcomes[place], comparison=comparison)
    for s in alive[1:]:
        if beside(s) in measured.samples:
            outcomes[s] = _held_to_both(outcomes[s], baseline, floor)
            reason = f"the baseline beside {outcomes[s].subject.spec}, in its process"
            samples = tuple(measured.samples[beside(s)])
            outcomes.append(
                replace(
                    baseline, role="beside", reason=reason, samples=samples, stages={}, checked_timed_calls=0
                )
            )
    return tuple(outcomes)


def _held_to_both(one: SubjectOutcome, baseline: SubjectOutcome, floor: float) -> SubjectOutcome:
    """Code from outside may have slowed the baseline beside it, so FASTER must also hold elsewhere."""
    comparison = one.comparison
    if comparison is None or comparison.verdict != "FASTER":
        return one
    if compare(baseline.samples, one.samples, aa_floor=floor).verdict == "FASTER":
        return one
    reason = f"{comparison.reason}; but it is not faster than the baseline in another process"
    return replace(one, comparison=replace(comparison, verdict="UNDECIDED", more_rounds=None, reason=reason))


def _facts(span: Span, subject: Subject, inputs: Inputs) -> WorkAndLoad:
    """Cost and load of a subject; empty if it cannot exist, and its trial says why."""
    try:
        cost, load = span.facts(subject, inputs)
    except (ValueError, NotImplementedError):
        return Cost(), {}
    # backward has twice the products of forward and moves about as much; the floor must not be too high
    flops, moved = {"forward": (1, 1), "backward": (2, 1), "train": (3, 2)}[inputs.case.direction]
    return cost.times(flops=flops, bytes=moved), load


def floor_seconds(cell: Cell, cost: Cost, roofs: Roofs | None) -> float | None:
    """The least time a call can take under the cell's cache policy. None if the roofs are not known: only
    the CPU's are measured.

    With hot caches, bytes count only if the caches cannot hold them all.
    """
    threads, dtype = cell.policy.threads, cell.case.dtype
    if cell.policy.device != "cpu":
        return None
    if roofs is None or threads not in roofs.read_bytes or threads not in roofs.gemm_flops.get(dtype, {}):
        return None
    moved = {"cold": cost.bytes, "weights-cold": cost.weight_bytes, "hot": 0}[cell.policy.cache]
    if cell.policy.cache == "hot" and cost.bytes > 2 * last_level_cache_bytes():
        moved = cost.bytes
    memory = max(roofs.read_bytes[threads], roofs.copy_bytes[threads])
    return max(moved / memory, cost.useful_flops / roofs.gemm_flops[dtype][threads])


def _hold_to_the_floor(index: int, seconds: float, floor: float | None) -> None:
    if floor is not None and seconds * TOLERANCE < floor:
        reason = (
            f"it says {1e3 * seconds:.3g} ms, but this machine cannot do the work in less than "
            f"{1e3 * floor:.3g} ms: {100 * floor / seconds:.0f} % of a measured roof. The timer, the cost "
            "model or the roofs are wrong (`mrb doctor --again`)"
        )
        raise BlamedError(index, SubjectError(Status.SUSPECT, reason))


def _notes(cell: Cell, trials: dict[int, Trial], alive: list[int]) -> tuple[str, ...]:
    notes = cell.span.notes(cell.case)
    if cell.case.scaled_from:
        notes.append(
            f"{cell.case.scaled_from} is too big for this machine; {cell.case.shape} was measured instead, "
            "which says nothing about the full size"
        )
    if alive and alive[0] != 0:
        notes.append(
            f"{cell.subjects[0].spec} was to be the baseline but is {trials[0].status}; "
            f"{cell.subjects[alive[0]].spec} is the baseline instead"
        )
    return tuple(notes)

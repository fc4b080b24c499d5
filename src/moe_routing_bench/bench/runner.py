"""run_cell measures a cell: first every subject alone, then all that passed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.compiling import compile_first
from moe_routing_bench.bench.cores import judging_threads, quiet_cores
from moe_routing_bench.bench.floor import beaten_roofs, floor_seconds, roof_seconds, too_fast
from moe_routing_bench.bench.identity import Identity, identify
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.messages import Described
from moe_routing_bench.bench.noise import NoiseDuring, weather
from moe_routing_bench.bench.outcome import CellOutcome, SubjectOutcome
from moe_routing_bench.bench.outside.sandbox import check_sandbox
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.rounds import DECISIVE_ROUNDS, WARM_SAMPLES, BaselineError, measure
from moe_routing_bench.bench.series import TWIN, Measured, beside, round_seconds, slow_ones
from moe_routing_bench.bench.spans.span import Load, Span, is_ours, span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError
from moe_routing_bench.bench.trial import Reuse, Setup, Trial, Watch, slow_reason, try_alone
from moe_routing_bench.bench.verdict import (
    DELTA,
    DELTA_APART,
    MIN_ROUNDS,
    aa_floor,
    compare,
    compare_cells,
)
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef, Question


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a subject stands so far: Standing(label="native", seconds=0.012, ratio=0.31)."""

    label: str
    seconds: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress(what="round 14", share=0.4, left=36.0): two fifths of the time are used, 36 s are left.

    standing: the fastest first, as soon as there are a few rounds.
    """

    what: str
    share: float
    left: float
    standing: tuple[Standing, ...] = ()


OnProgress = Callable[[Progress], None]
WorkAndLoad = tuple[Cost, Load]  # for one ImplementationRef.question
ROUNDS_TO_RANK = 5
OVER = "the time was over before this case; --seconds gives more"


def run_cell(
    experiment: Experiment,
    *,
    roofs: Roofs | None = None,
    on_progress: OnProgress = lambda progress: None,
    watch: Watch = lambda: None,
    budget: Budget | None = None,
    for_rounds: Callable[[float], float] | None = None,
    reuse: Reuse | None = None,
) -> CellOutcome:
    """Measure one cell. A failing implementation never raises here; its outcome has the status.

    budget: its time, if not the policy's from now on. for_rounds: how much of it is for the rounds, given
    what a decision needs, if others share it. reuse: what the cell before left, and this one leaves.
    """
    if experiment.sandbox:
        check_sandbox()
    budget, before = budget or Budget(experiment.max_seconds), weather()
    if budget.left <= 0:
        span_of = NoiseDuring(before=before, after=before)
        return _not_run(experiment, identify(experiment, this_machine()), Status.NO_TIME, OVER, OVER, span_of)
    on_progress(_progress("preparing", budget))
    for folder in experiment.include:
        include_folder(folder)  # only registers names; workers load the code
    span, identity = span_named(experiment.span), identify(experiment, this_machine())
    own = Reuse() if reuse is None else reuse
    try:
        inputs = Inputs(experiment)
        cores = _cores(experiment, inputs, own)
        workload = inputs.workload(0)
        asked = {s.question: s for s in experiment.implementations}
        facts = {question: work_and_load(span, s, inputs) for question, s in asked.items()}
    except (ValueError, NotImplementedError) as reason:
        stopped, after = "these sizes cannot have this workload", weather()
        span_of = NoiseDuring(before=before, after=after)
        return _not_run(experiment, identity, Status.UNSUPPORTED, str(reason), stopped, span_of)
    ours = [all(map(is_ours, span.origins(subject.name))) for subject in experiment.implementations]
    setup = Setup(
        experiment=experiment,
        judge=Judge(span, inputs),
        cores=cores,
        budget=budget,
        reuse=own,
        watch=watch,
        outside=frozenset(i for i, mine in enumerate(ours) if not mine),
        sources=identity.sources,
    )
    with judging_threads(), closing(own) if reuse is None else nullcontext(), closing(setup):
        with budget.paused():
            compile_first([experiment], lambda what: on_progress(_progress(what, budget)))
        floors = {
            i: floor_seconds(experiment, facts[s.question][0], roofs)
            for i, s in enumerate(experiment.implementations)
        }
        busy = roofs is not None and bool(roofs.busy)
        least = {
            i: roof_seconds(experiment, s, facts[s.question][0], roofs)
            for i, s in enumerate(experiment.implementations)
        }
        trials = _tried(setup, floors, on_progress)
        alive = [index for index, trial in trials.items() if trial.passed]
        if for_rounds is not None:
            budget.leave(for_rounds(_deciding_seconds(setup, alive, trials)))
        measured = _rounds(setup, trials, alive, floors, on_progress)
        setup.leave(
            {
                s: trials[i].call_seconds
                for i, s in enumerate(experiment.implementations)
                if trials[i].call_seconds
            }
        )
    return CellOutcome(
        experiment=experiment,
        identity=identity,
        outcomes=_outcomes(experiment, trials, measured, alive, facts, floors, least, busy),
        rounds=len(measured.samples[TWIN]) if measured else 0,
        rounds_by_process=tuple(measured.rounds_by_process) if measured else (),
        stop_reason=measured.stop_reason if measured else "nothing passed its trial",
        aa_floor=aa_floor(measured.samples[alive[0]], measured.samples[TWIN]) if measured else None,
        routing_checksum=workload.checksum,
        weather=NoiseDuring(before=before, after=weather()),
        seconds=budget.used,
        notes=(
            *_notes(experiment, trials, alive),
            *(measured.notes if measured else ()),
            *([] if busy else _beaten_roofs(experiment, measured, alive, least)),
        ),
    )


def _cores(experiment: Experiment, inputs: Inputs, reuse: Reuse) -> tuple[int, ...]:
    """Takes what the cell before left; the cores are then those of its process."""
    if reuse.fits(experiment, inputs) and reuse.worker is not None and reuse.inputs is not None:
        inputs.take_weights(reuse.inputs)
        return reuse.worker.cores
    return quiet_cores(experiment.threads)


def _tried(setup: Setup, floors: Mapping[int, float | None], on_progress: OnProgress) -> dict[int, Trial]:
    """A trial of every subject, as long as those before it can still have their few rounds; of the second,
    as long as there is any time."""
    trials: dict[int, Trial] = {}
    for index, subject in enumerate(setup.experiment.implementations):
        on_progress(_progress(f"trying {subject.text}", setup.budget))
        passed = [i for i, trial in trials.items() if trial.passed]
        if index and _least_seconds(setup, passed[1:] and passed, trials) > setup.budget.left:
            reason = (
                f"the trials of {index} others took {setup.budget.used:.0f} s, and what is left is for their "
                "rounds; --seconds gives more"
            )
            about = Described(label=subject.text)
            trials[index] = Trial(status=Status.NO_TIME, reason=reason, about=about)
            continue
        if setup.too_slow(least := setup.reuse.at_least(subject, setup.experiment)):
            trials[index] = Trial(
                status=Status.NO_TIME,
                reason=f"with fewer tokens, {slow_reason(least, setup)}",
                about=Described(label=subject.text),
            )
            continue
        trials[index] = trial = try_alone(setup, index)
        if trial.passed:
            setup.best_seconds = min(setup.best_seconds, trial.call_seconds)
    _hold_to_the_floor(setup, trials, {i: t.call_seconds for i, t in trials.items() if t.passed}, floors)
    return trials


def _rounds(
    setup: Setup, trials: dict[int, Trial], alive: list[int], floors: Mapping[int, float | None],
    on_progress: OnProgress,
) -> Measured | None:  # fmt: skip
    """Rounds over `alive`, from which failures are removed; again without the baseline if that fails."""
    while alive:
        _make_room(setup, trials, alive)
        try:
            measured = measure(
                setup, alive, trials,
                lambda done, now: on_progress(
                    _progress(f"round {done}", setup.budget, _standing(setup.experiment, now, alive))
                ),
            )  # fmt: skip
        except BaselineError as blame:
            for index in blame.subjects:
                _fail(trials, index, blame.failure)
                alive.remove(index)
            continue
        for index, failure in measured.failed.items():
            _fail(trials, index, failure)
            alive.remove(index)
        _hold_to_the_floor(setup, trials, {i: median(measured.samples[i]) for i in alive}, floors)
        alive[:] = [index for index in alive if trials[index].passed]
        if alive and alive[0] in measured.samples and next(iter(measured.samples)) == alive[0]:
            return measured
    return None


def _make_room(setup: Setup, trials: dict[int, Trial], alive: list[int]) -> None:
    """The slowest give up their place until a few rounds of each fit into the time left."""
    while len(alive) > 2 and _least_seconds(setup, alive, trials) > setup.budget.left:
        slowest = max(alive[1:], key=lambda s: trials[s].call_seconds)
        reason = (
            f"a call takes about {trials[slowest].call_seconds:.2g} s, and there was no time for the rounds "
            "it needs; --seconds gives more"
        )
        trials[slowest] = replace(trials[slowest], status=Status.NO_TIME, reason=reason)
        alive.remove(slowest)


def _least_seconds(setup: Setup, alive: list[int], trials: Mapping[int, Trial]) -> float:
    """About how long the fewest rounds take that give each a place, with a last judged sample."""
    if not alive:
        return 0.0
    questions = len({setup.experiment.implementations[s].question for s in alive})
    judging = setup.experiment.checked * questions * setup.judge.oracle_seconds
    return (MIN_ROUNDS + 1) * sum(round_seconds(setup, alive, trials).values()) + judging


def _deciding_seconds(setup: Setup, alive: list[int], trials: Mapping[int, Trial]) -> float:
    """About how long the rounds take that decide every comparison, and what precedes and follows them. Slow
    ones leave as soon as they have a place."""
    slow = slow_ones(setup, alive, trials)
    turns = round_seconds(setup, alive, trials)
    rounds = {s: MIN_ROUNDS if s in slow else DECISIVE_ROUNDS + WARM_SAMPLES for s in alive}
    return (
        sum((rounds[s] + 1) * turns[s] for s in alive) + setup.experiment.checked * setup.judge.oracle_seconds
    )


def _fail(trials: dict[int, Trial], index: int, failure: SubjectError) -> None:
    reason = f"{failure.reason} (during the rounds)"
    trials[index] = replace(trials[index], status=failure.status, reason=reason)


def _progress(what: str, budget: Budget, standing: tuple[Standing, ...] = ()) -> Progress:
    share = min(1.0, budget.used / max(budget.seconds, 1e-9))
    return Progress(what=what, share=share, left=max(0.0, budget.left), standing=standing)


def _standing(experiment: Experiment, measured: Measured, alive: list[int]) -> tuple[Standing, ...]:
    rows = []
    for s in alive:
        if len(times := measured.samples.get(s, [])) >= ROUNDS_TO_RANK:
            ratio = median(b / a for a, b in zip(measured.against(s), times, strict=True))
            rows.append(
                Standing(label=experiment.implementations[s].text, seconds=median(times), ratio=ratio)
            )
    return tuple(sorted(rows, key=lambda row: row.ratio))


def _not_run(
    experiment: Experiment,
    identity: Identity,
    status: Status,
    reason: str,
    stop_reason: str,
    weather_span: NoiseDuring,
) -> CellOutcome:
    """The outcome if these sizes cannot have the workload, or the time is over. It must not end a sweep."""
    return CellOutcome(
        experiment=experiment,
        identity=identity,
        outcomes=tuple(
            SubjectOutcome(
                subject=subject,
                label=subject.text,
                status=status,
                reason=reason,
            )
            for subject in experiment.implementations
        ),
        stop_reason=stop_reason,
        weather=weather_span,
    )


def _outcomes(
    experiment: Experiment, trials: dict[int, Trial], measured: Measured | None, alive: list[int],
    facts: Mapping[Question, WorkAndLoad], floors: Mapping[int, float | None],
    least: Mapping[int, float | None], busy: bool,
) -> tuple[SubjectOutcome, ...]:  # fmt: skip
    outcomes = []
    for index, subject in enumerate(experiment.implementations):
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
                "checks": trial.checks,
                "checked_timed_calls": measured.checked[index],
                "samples": tuple(measured.samples[index]),
                "stages": measured.stage_medians(index),
                "floor_seconds": floors[index],
                "roof_seconds": least[index],
                "roof_busy": busy and least[index] is not None,
            }
            if trial.verdict is not None:
                about |= {"max_error": trial.verdict.max_error, "max_bound": trial.verdict.max_bound}
                about["error"] = trial.verdict.relative_error
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
    pairs = {place: measured.against(place) for place in alive[1:]}
    pairs[len(outcomes) - 1] = measured.samples[alive[0]]
    isolated = alive[0] in measured.paired  # then the twin is too, and the floor is that of such processes
    apart = {place: place in measured.paired or (place == len(outcomes) - 1 and isolated) for place in pairs}
    comparisons = compare_cells(
        [(against, outcomes[place].samples) for place, against in pairs.items()],
        aa_floor=[floor if apart[place] == isolated else 0.0 for place in pairs],
        delta=[DELTA_APART if apart[place] else DELTA for place in pairs],
        target=experiment.target,
    )
    for place, comparison in zip(pairs, comparisons, strict=True):
        outcomes[place] = replace(outcomes[place], comparison=comparison)
    for s in alive[1:]:
        if beside(s) in measured.samples:
            if s not in measured.paired:
                outcomes[s] = _held_to_both(outcomes[s], baseline, floor)
            where = "timed as it is" if s in measured.paired else "in its process"
            reason = f"the baseline beside {outcomes[s].subject.text}, {where}"
            samples = tuple(measured.samples[beside(s)])
            outcomes.append(
                replace(
                    baseline,
                    role="beside",
                    beside=outcomes[s].subject,
                    reason=reason,
                    samples=samples,
                    stages={},
                    checked_timed_calls=0,
                )
            )
    return tuple(outcomes)


def _held_to_both(one: SubjectOutcome, baseline: SubjectOutcome, floor: float) -> SubjectOutcome:
    """Code from outside may have slowed the baseline beside it, so FASTER must also hold elsewhere."""
    comparison = one.comparison
    if comparison is None or comparison.verdict != "FASTER":
        return one
    elsewhere = baseline.samples[: len(one.samples)]
    if compare(elsewhere, one.samples, aa_floor=floor, delta=DELTA_APART).verdict == "FASTER":
        return one
    reason = f"{comparison.reason}; but it is not faster than the baseline in another process"
    return replace(one, comparison=replace(comparison, verdict="UNDECIDED", more_rounds=None, reason=reason))


def work_and_load(span: Span, subject: ImplementationRef, inputs: Inputs) -> WorkAndLoad:
    """Cost and load of a subject; empty if it cannot exist, and its trial says why."""
    try:
        cost, load = span.facts(subject, inputs)
    except (ValueError, NotImplementedError):
        return Cost(), {}
    # backward has twice the products of forward and moves about as much; the floor must not be too high
    flops, moved = {"forward": (1, 1), "backward": (2, 1), "train": (3, 2)}[inputs.experiment.direction]
    return cost.times(flops=flops, bytes=moved), load


def _hold_to_the_floor(
    setup: Setup, trials: dict[int, Trial], times: Mapping[int, float], floors: Mapping[int, float | None]
) -> None:
    for index, reason in too_fast(times, floors, setup.outside).items():
        trials[index] = replace(trials[index], status=Status.SUSPECT, reason=reason)


def _beaten_roofs(
    experiment: Experiment, measured: Measured | None, alive: list[int], least: Mapping[int, float | None]
) -> list[str]:
    if measured is None:
        return []
    return beaten_roofs(
        {experiment.implementations[i].text: (median(measured.samples[i]), least[i]) for i in alive}
    )


def _notes(experiment: Experiment, trials: dict[int, Trial], alive: list[int]) -> tuple[str, ...]:
    notes = span_named(experiment.span).notes(experiment)
    if experiment.fewer_tokens:
        notes.append(
            f"{experiment.scaled_from} takes too long here: {experiment.T} tokens were measured instead, "
            "with weights of the full size (--full insists, and --seconds gives more time)"
        )
    elif experiment.scaled_from:
        notes.append(
            f"{experiment.scaled_from} is too big for this machine or for a minute; {experiment.shape} was "
            "measured instead, which says nothing about the full size (--full insists)"
        )
    if alive and alive[0] != 0:
        notes.append(
            f"{experiment.implementations[0].text} was to be the baseline but is {trials[0].status}; "
            f"{experiment.implementations[alive[0]].text} is the baseline instead"
        )
    return tuple(notes)

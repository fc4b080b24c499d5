"""run_cell measures a cell: it tries every implementation alone, then times all that passed together."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import psutil

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.compiling import compile_first
from moe_routing_bench.bench.cores import judging_threads, quiet_cores
from moe_routing_bench.bench.floor import beaten_roofs, floor_seconds, roof_seconds, too_fast
from moe_routing_bench.bench.hosts.children import HELD
from moe_routing_bench.bench.hosts.messages import Described
from moe_routing_bench.bench.hosts.sandbox import check_sandbox
from moe_routing_bench.bench.hosts.shared import Reuse, SharedHost
from moe_routing_bench.bench.identity import Identity, identify
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.measure import RESERVE, WARM_SAMPLES, BaselineError, measure
from moe_routing_bench.bench.noise import NoiseDuring, noise_now
from moe_routing_bench.bench.outcome import CellOutcome, ImplementationOutcome, Wire
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.series import Measured, Series
from moe_routing_bench.bench.setup import Setup, Trial, Watch
from moe_routing_bench.bench.spans.span import Load, Span, all_threads, is_ours, ranked, span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.trial import slow_reason, try_alone
from moe_routing_bench.bench.verdict import MIN_ROUNDS, Comparison, Paired, aa_floor, compare_cell
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef, Question


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How an implementation stands so far: Standing(label="native", seconds=0.012, ratio=0.31)."""

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
Floors = Mapping[ImplementationRef, float | None]
ROUNDS_TO_RANK = 5
SLOWED = 1.5  # times as long in a quarter of the rounds or more: noise is not so large for so long
ROUNDS_TO_SLOW = 20  # fewer do not show it
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
    budget, before = budget or Budget(experiment.max_seconds), noise_now()
    if (why_not := _why_not_begun(experiment, budget)) is not None:
        (status, reason), span_of = why_not, NoiseDuring(before=before, after=before)
        return _not_run(experiment, identify(experiment, this_machine()), status, reason, reason, span_of)
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
        stopped, after = "these sizes cannot have this workload", noise_now()
        span_of = NoiseDuring(before=before, after=after)
        return _not_run(experiment, identity, Status.UNSUPPORTED, str(reason), stopped, span_of)
    ours = tuple(s for s in experiment.implementations if all(map(is_ours, span.origins(s.name))))
    setup = Setup(
        experiment=experiment,
        judge=Judge(span, inputs),
        cores=cores,
        budget=budget,
        watch=watch,
        outside=frozenset(experiment.implementations) - frozenset(ours),
        sources=identity.sources,
    )
    shared = _shared_host(setup, ours, own)
    with judging_threads(), closing(own) if reuse is None else nullcontext():
        try:
            with budget.paused():
                compile_first([experiment], lambda what: on_progress(_progress(what, budget)))
            floors = {
                s: floor_seconds(experiment, facts[s.question][0], roofs) for s in experiment.implementations
            }
            _try_all(shared, floors, on_progress)
            alive = [implementation for implementation, trial in setup.trials.items() if trial.passed]
            if for_rounds is not None:
                budget.leave(for_rounds(_deciding_seconds(setup, alive)))
            measured = _rounds(shared, alive, floors, on_progress)
            others = shared.others() if experiment.device != "cpu" else ""
            if not ranked(experiment):
                shared.leave({s: t.call_seconds for s, t in setup.trials.items() if t.call_seconds})
        finally:
            shared.end()
    outcomes = _outcomes(setup, measured, alive, facts, floors, roofs)
    return CellOutcome(
        experiment=experiment,
        identity=identity,
        outcomes=outcomes,
        rounds=sum(measured.rounds_by_process) if measured else 0,
        rounds_by_process=tuple(measured.rounds_by_process) if measured else (),
        stop_reason=measured.stop_reason if measured else "nothing passed its trial",
        aa_floor=_noise_floor(measured) if measured else None,
        routing_checksum=workload.checksum,
        weather=NoiseDuring(before=before, after=noise_now()),
        seconds=budget.used,
        notes=(
            *_notes(setup, alive, outcomes),
            *(measured.notes if measured else ()),
            *filter(None, [others, _slowed(experiment, measured)]),
            *_beaten_roofs(outcomes),
        ),
    )


def _why_not_begun(experiment: Experiment, budget: Budget) -> tuple[Status, str] | None:
    if budget.left <= 0:
        return Status.NO_TIME, OVER
    needed, room = (size / 2**30 for size in (experiment.needed_bytes, psutil.virtual_memory().total))
    if needed > room:  # the system would kill the bench
        return Status.OOM, f"this case needs {needed:.1f} GiB of memory; this machine has {room:.1f}"
    return None


def _shared_host(setup: Setup, ours: tuple[ImplementationRef, ...], reuse: Reuse) -> SharedHost:
    """Returns the host of our own code. The host of ranks is loaded by its name, so that only the key of a
    cell with ranks depends on it (ParallelSpan.roots)."""
    if not ranked(setup.experiment):
        return SharedHost(setup, ours, reuse)
    ranks = importlib.import_module("moe_routing_bench.bench.hosts.ranks")
    host: SharedHost = ranks.RanksHost(setup, ours)
    return host


def _cores(experiment: Experiment, inputs: Inputs, reuse: Reuse) -> tuple[int, ...]:
    """Takes over what the cell before left. Then the cores are those of its process."""
    if reuse.fits(experiment, inputs) and reuse.child is not None and reuse.inputs is not None:
        inputs.take_weights(reuse.inputs)
        return reuse.child.cores
    return quiet_cores(all_threads(experiment))


def _try_all(shared: SharedHost, floors: Floors, on_progress: OnProgress) -> None:
    """Tries one implementation after the other, as long as those before it can still have their few rounds.
    The second one is tried if there is any time."""
    setup, trials = shared.setup, shared.setup.trials
    for index, implementation in enumerate(setup.experiment.implementations):
        on_progress(_progress(f"trying {implementation.text}", setup.budget))
        passed = [s for s, trial in trials.items() if trial.passed]
        if index and _least_seconds(setup, passed[1:] and passed) > setup.budget.left:
            reason = (
                f"the trials of {index} others took {setup.budget.used:.0f} s, and what is left is for their "
                "rounds; --seconds gives more"
            )
            trials[implementation] = _no_time(implementation, reason)
            continue
        if setup.too_slow(least := shared.reuse.at_least(implementation, setup.experiment)):
            late = _no_time(implementation, f"with fewer tokens, {slow_reason(least, setup)}")
            trials[implementation] = replace(late, at_least=least)
            continue
        trials[implementation] = trial = try_alone(shared, implementation)
        if trial.passed:
            setup.best_seconds = min(setup.best_seconds, trial.call_seconds)
    _hold_to_the_floor(setup, {s: t.call_seconds for s, t in trials.items() if t.passed}, floors)


def _in_trial(trial: Trial) -> str:
    """The milliseconds of a call that had no rounds, as words: ~1,400, or >1,400 with fewer tokens."""
    if not (seconds := trial.call_seconds or trial.at_least):
        return ""
    return f"{'~' if trial.call_seconds else '>'}{1e3 * seconds:,.{0 if seconds > 0.1 else 1}f}"


def _no_time(implementation: ImplementationRef, reason: str) -> Trial:
    return Trial(status=Status.NO_TIME, reason=reason, about=Described(label=implementation.text))


def _rounds(
    shared: SharedHost, alive: list[ImplementationRef], floors: Floors, on_progress: OnProgress
) -> Measured | None:
    """Times the implementations in `alive` in rounds and removes those that fail. If the baseline fails, it
    starts again without it."""
    setup = shared.setup
    while alive:
        _make_room(setup, alive)
        try:
            measured = measure(
                setup, shared, alive,
                lambda done, now: on_progress(_progress(f"round {done}", setup.budget, _standing(now))),
            )  # fmt: skip
        except BaselineError as blame:
            for implementation in blame.implementations:
                _fail(setup, implementation, blame.failure)
                alive.remove(implementation)
            continue
        for implementation, failure in measured.failed.items():
            _fail(setup, implementation, failure)
            alive.remove(implementation)
        times = {s: median(measured.samples[measured.of(s)].seconds) for s in alive}
        _hold_to_the_floor(setup, times, floors)
        alive[:] = [implementation for implementation in alive if setup.trials[implementation].passed]
        if alive and alive[0] == measured.baseline.implementation:
            return measured
    return None


def _make_room(setup: Setup, alive: list[ImplementationRef]) -> None:
    """Drops the slowest implementations until a few rounds of each fit into the time left."""
    while len(alive) > 2 and _least_seconds(setup, alive) > setup.budget.left:
        slowest = max(alive[1:], key=lambda s: setup.trials[s].call_seconds)
        reason = (
            f"a call takes about {setup.trials[slowest].call_seconds:.2g} s, and there was no time for the "
            "rounds it needs; --seconds gives more"
        )
        setup.trials[slowest] = replace(setup.trials[slowest], status=Status.NO_TIME, reason=reason)
        alive.remove(slowest)


def _least_seconds(setup: Setup, alive: list[ImplementationRef]) -> float:
    """Estimates how long the fewest rounds take that give each implementation a time, with a last judged
    sample."""
    if not alive:
        return 0.0
    rounds = (MIN_ROUNDS + 1) * sum(setup.round_seconds(alive).values())
    return rounds + setup.all_judging_seconds(alive)


def _deciding_seconds(setup: Setup, alive: list[ImplementationRef]) -> float:
    """About how long the rounds take that decide every comparison, and what precedes and follows them. Slow
    ones leave as soon as they have a place."""
    slow, turns = setup.slow_ones(alive), setup.round_seconds(alive)
    decided = setup.deciding_rounds(len(alive)) + WARM_SAMPLES
    rounds = sum(((MIN_ROUNDS if s in slow else decided) + 1) * turns[s] for s in alive)
    return (rounds + setup.all_judging_seconds(alive)) / (1 - RESERVE)


def _fail(setup: Setup, implementation: ImplementationRef, failure: ImplementationError) -> None:
    reason = f"{failure.reason} (during the rounds)"
    setup.trials[implementation] = replace(setup.trials[implementation], status=failure.status, reason=reason)


def _progress(what: str, budget: Budget, standing: tuple[Standing, ...] = ()) -> Progress:
    share = min(1.0, budget.used / max(budget.seconds, 1e-9))
    return Progress(what=what, share=share, left=max(0.0, budget.left), standing=standing)


def _standing(measured: Measured) -> tuple[Standing, ...]:
    rows = []
    for series, seen in measured.samples.items():
        if series.role in ("baseline", "candidate") and len(seen.seconds) >= ROUNDS_TO_RANK:
            ratio = median(b / a for a, b in zip(measured.against(series), seen.seconds, strict=True))
            label = series.implementation.text
            rows.append(Standing(label=label, seconds=median(seen.seconds), ratio=ratio))
    return tuple(sorted(rows, key=lambda row: row.ratio))


def _not_run(
    experiment: Experiment,
    identity: Identity,
    status: Status,
    reason: str,
    stop_reason: str,
    weather_span: NoiseDuring,
) -> CellOutcome:
    """Returns the outcome of a cell that cannot have this workload, does not fit in memory, or whose time is
    over. Such a cell must not end a sweep."""
    return CellOutcome(
        experiment=experiment,
        identity=identity,
        outcomes=tuple(
            ImplementationOutcome(
                implementation=implementation,
                label=implementation.text,
                status=status,
                reason=reason,
            )
            for implementation in experiment.implementations
        ),
        stop_reason=stop_reason,
        weather=weather_span,
    )


def _outcomes(
    setup: Setup, measured: Measured | None, alive: list[ImplementationRef],
    facts: Mapping[Question, WorkAndLoad], floors: Floors, roofs: Roofs | None,
) -> tuple[ImplementationOutcome, ...]:  # fmt: skip
    """Returns the outcomes of all implementations, then those of the further copies of the baseline."""
    outcomes = []
    for implementation in setup.experiment.implementations:
        trial, (cost, load) = setup.trials[implementation], facts[implementation.question]
        about: dict[str, Any] = {
            "implementation": implementation,
            "label": trial.about.label,
            "status": trial.status,
            "reason": trial.reason,
            "origin": trial.about.origin,
            "runs": trial.runs,
            "deterministic": trial.about.deterministic,
            "host_sync": trial.about.host_sync,
            "first_call": trial.first_call,
            "calls_per_sample": trial.calls,
            "cost": cost,
            "load": load,
            "peak_rss_bytes": trial.peak_rss_bytes,
            "log_tail": trial.log_tail,
        }
        if trial.status is Status.NO_TIME:
            about["trial_ms"] = _in_trial(trial)
        if trial.passed and measured is not None:
            series = measured.of(implementation)
            seen = measured.samples[series]
            least = roof_seconds(setup.experiment, implementation, cost, roofs)
            wire = setup.judge.span.wire(implementation, setup.judge.inputs)
            about |= {
                "role": series.role,
                "checks": trial.checks,
                "held": seen.held,
                "calls_per_sample": seen.calls,
                "checked_timed_calls": seen.checked,
                "samples": tuple(seen.seconds),
                "stages": seen.stage_medians(),
                "clock": seen.used,
                "launch_seconds": median(seen.launches) if seen.launches else None,
                "floor_seconds": floors[implementation],
                "roof_seconds": least,
                "roof_busy": least is not None and roofs is not None and bool(roofs.busy),
                "wire": None if wire is None else Wire(sent=wire[0], least=wire[1]),
            }
            if trial.verdict is not None:
                about |= {"max_error": trial.verdict.max_error, "max_bound": trial.verdict.max_bound}
                about["error"] = trial.verdict.relative_error
        outcomes.append(ImplementationOutcome(**about))
    if measured is None:
        return tuple(outcomes)
    by_series = {measured.of(one.implementation): one for one in outcomes if one.samples}
    candidates = [series for series in by_series if series.role == "candidate"]
    compared = _compared(setup, measured, candidates)
    baseline = by_series[measured.baseline]
    for place, one in enumerate(outcomes):
        series = measured.of(one.implementation)
        if one.samples and series in compared:
            outcomes[place] = replace(one, comparison=compared[series])
    for series, seen in measured.samples.items():
        if series.role in ("twin", "beside") and (series.beside is None or series.beside in alive):
            where = "timed as it is" if seen.isolated else "in its process"
            outcomes.append(
                replace(
                    baseline,
                    role=series.role,
                    beside=series.beside,
                    reason=f"the baseline beside {series.beside.text}, {where}" if series.beside else "",
                    held=seen.held,
                    samples=tuple(seen.seconds),
                    stages={},
                    checked_timed_calls=0,
                    comparison=compared.get(series),
                )
            )
    return tuple(outcomes)


def _compared(setup: Setup, measured: Measured, candidates: list[Series]) -> dict[Series, Comparison]:
    """Compares every candidate and the twin with the baseline that is timed in the same way."""

    def paired(series: Series) -> Paired:
        seen, against = measured.samples[series], measured.against(series)
        shares = measured.partner(series) != measured.baseline and not seen.isolated
        elsewhere = measured.samples[measured.baseline].seconds[: len(seen.seconds)] if shares else None
        trusted = series.implementation not in setup.outside or seen.held == HELD or setup.experiment.trust
        return Paired(
            own=seen.seconds, against=against, isolated=seen.isolated, elsewhere=elsewhere, trusted=trusted
        )

    twin, target = measured.twin, setup.experiment.target
    found = compare_cell([paired(series) for series in candidates], paired(twin), target=target)
    return dict(zip([*candidates, twin], found, strict=True))


def _noise_floor(measured: Measured) -> float:
    return aa_floor(*(measured.samples[one].seconds for one in (measured.baseline, measured.twin)))


def work_and_load(span: Span, implementation: ImplementationRef, inputs: Inputs) -> WorkAndLoad:
    """Returns the cost and the load of an implementation; both are empty if it cannot exist, and its trial
    reports why."""
    try:
        cost, load = span.facts(implementation, inputs)
    except (ValueError, NotImplementedError):
        return Cost(), {}
    # backward has twice the products of forward and moves about as much; the floor must not be too high
    flops, moved = {"forward": (1, 1), "backward": (2, 1), "train": (3, 2)}[inputs.experiment.direction]
    return cost.times(flops=flops, bytes=moved), load


def _hold_to_the_floor(setup: Setup, times: Mapping[ImplementationRef, float], floors: Floors) -> None:
    for implementation, reason in too_fast(times, floors, setup.outside).items():
        setup.trials[implementation] = replace(
            setup.trials[implementation], status=Status.SUSPECT, reason=reason
        )


def _beaten_roofs(outcomes: tuple[ImplementationOutcome, ...]) -> list[str]:
    timed = [one for one in outcomes if one.samples and one.role in ("baseline", "candidate")]
    return beaten_roofs(
        {
            one.implementation.text: (median(one.samples), one.roof_seconds)
            for one in timed
            if not one.roof_busy
        }
    )


def _slowed(experiment: Experiment, measured: Measured | None) -> str:
    """A sentence if a GPU became much slower during the rounds; empty if it did not. Ratios are within
    rounds, so they stay right, but the times are those of two speeds."""
    seconds = measured.samples[measured.baseline].seconds if measured and experiment.device != "cpu" else []
    places = range(len(seconds) // 4, 3 * len(seconds) // 4 + 1) if len(seconds) >= ROUNDS_TO_SLOW else ()
    ratio = max((median(seconds[n:]) / median(seconds[:n]) for n in places), default=1.0)
    if ratio < SLOWED:
        return ""
    return (
        f"The baseline took {ratio:.1f} times as long in later rounds: the GPU's clock fell, or another "
        "process began to use it. Ratios hold, times do not: cool it or lock its clock, and measure again"
    )


def _notes(
    setup: Setup, alive: list[ImplementationRef], outcomes: tuple[ImplementationOutcome, ...]
) -> tuple[str, ...]:
    experiment, trials = setup.experiment, setup.trials
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
    first = experiment.implementations[0]
    if alive and alive[0] != first:
        notes.append(
            f"{first.text} was to be the baseline but is {trials[first].status}; "
            f"{alive[0].text} is the baseline instead"
        )
    if ranked(experiment):
        notes.append(
            f"{experiment.W} ranks are processes on one machine, joined by Gloo over the loopback, "
            f"with {all_threads(experiment)} threads in all"
        )
    wires = [
        f"{one.implementation.name} {one.wire.sent / 1e6:.3g} MB, "
        f"{one.wire.sent / one.wire.least:.2f} of the least"
        for one in outcomes
        if one.wire is not None and one.role != "twin" and one.wire.least
    ]
    if wires:
        notes.append(f"rows that leave their rank in a forward pass, both ways: {'; '.join(wires)}")
    by_clock: dict[str, list[str]] = {}
    for one in outcomes:
        if one.clock and one.role != "twin":
            by_clock.setdefault(one.clock, []).append(one.implementation.text)
    if len(by_clock) > 1:
        who = "; ".join(f"{clock}: {', '.join(names)}" for clock, names in by_clock.items())
        notes.append(
            f"Not all were timed in the same way ({who}). Events include the gaps between launches, a graph "
            "has none, so part of their ratio is of the clocks; --view cuda_events times all by events"
        )
    return tuple(notes)

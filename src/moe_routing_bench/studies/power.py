"""The power study: how often does the benchmark call equal code different, and how often does it detect a
known slow-down?

A sitting is a run as users make it: new processes, a baseline, its twin and several candidates in shuffled
rounds until the policy stops them, and verdicts. A trial is one comparison of a sitting. Baseline and
candidates are the same code; a candidate also spins for a known percentage of its own time
(power_kernels/combine/slowed.py).
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.cores import quiet_cores
from moe_routing_bench.bench.hosts.shared import SharedHost
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.measure import BaselineError, measure
from moe_routing_bench.bench.noise import NoiseDuring, noise_now
from moe_routing_bench.bench.setup import Setup, Trial
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.trial import try_alone
from moe_routing_bench.bench.verdict import aa_floor, compare_cells
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.text import first_problem
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SLOWDOWNS = (1, 2, 3, 5, 8)
KERNELS = Path(__file__).parent / "power_kernels"
# about 0.3 ms a call on a server core: a dozen calls make a sample
CASE = Experiment(
    case="power/512x256-e16-k2", span="combine", T=512, D=256, F=256, E=16, K=2, dtype="float32"
)
PER_SITTING = 7
# sittings between two gates: a gate also chooses the calls in a sample, which varies, so it must be repeated
GATE_EVERY = 10
MAX_FILE_BYTES = 2**26
MAX_TRIALS = 100_000

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
TrialVerdict = Literal["FASTER", "SLOWER", "SAME", "TOO_FEW_ROUNDS", "UNDECIDED", "FAILED"]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per call in paired rounds: Times(a=[0.010, ...], twin=[0.010, ...], b=([0.0105, ...], ...),
    stop_reason="precision: the ratio is known to 1.0 % after 20 rounds"). a is the baseline; b has the
    candidates in the order of the request."""

    a: Sequence[float]
    twin: Sequence[float]
    b: Sequence[Sequence[float]]
    stop_reason: str
    calls: int = 1  # in a sample


class FailedTrialError(Exception):
    """The benchmark refused correct code during a trial; the message says why."""


TakeTimes = Callable[[Sequence[int]], Times]  # of candidates slowed by these percents
OnStep = Callable[[int, int], None]  # trials done, trials in all


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PowerTrial(_Document):
    """One comparison. PowerTrial(percent=5, verdict="SLOWER", ratio=1.049, interval=(1.041, 1.058),
    aa_floor=0.003, rounds=25, calls=16, seconds=1.4, reason="precision: ... after 25 rounds").

    calls: in a sample. seconds: its share of the sitting. FAILED has no ratio; its reason says why the
    benchmark refused the code.
    """

    percent: int = Field(ge=0, le=1000)
    verdict: TrialVerdict
    ratio: Positive | None = None
    interval: tuple[Positive, Positive] | None = None
    aa_floor: Annotated[Finite, Field(ge=0)] | None = None
    rounds: int = Field(ge=0)
    calls: int | None = None
    seconds: Annotated[Finite, Field(ge=0)]
    reason: str = Field(max_length=2000)

    @model_validator(mode="after")
    def _numbers_unless_failed(self) -> Self:
        for value in (self.ratio, self.interval, self.aa_floor):
            if (value is None) != (self.verdict == "FAILED"):
                raise ValueError("a trial has a ratio, an interval and a floor, or it has FAILED")
        return self


class PowerRow(_Document):
    """All trials of one percent. 100 trials at 5 %, 97 of them SLOWER:

    PowerRow(percent=5, trials=100, verdicts={"SLOWER": 97, "UNDECIDED": 3}, share=0.97,
             interval=(0.915, 0.994), median_ratio=1.050, median_rounds=40, median_seconds=1.9)

    share: the trials that were SLOWER, of all. At 0 %, where the code is the same: those that were FASTER or
    SLOWER, of the trials that did not fail. interval: Clopper and Pearson's, 95 %.
    """

    percent: int
    trials: int
    verdicts: dict[TrialVerdict, int]
    share: Share
    interval: tuple[Share, Share]
    median_ratio: Positive | None
    median_rounds: Finite
    median_seconds: Finite


class PowerStudy(_Document):
    """A study as it is in its file: a row for each percentage, the trials in the order they were measured,
    and the conditions.

    finished is False if somebody stopped it; the rows then count what was measured before that.
    """

    schema_version: Literal[1] = 1
    command: str = Field(max_length=2000)
    machine: dict[str, Any]
    case: str
    policy: dict[str, Any]
    seed: int
    planned: dict[int, int]
    finished: bool
    seconds: Annotated[Finite, Field(ge=0)]
    weather: dict[str, float | int | None]
    rows: tuple[PowerRow, ...]
    trials: tuple[PowerTrial, ...] = Field(max_length=MAX_TRIALS)

    @model_validator(mode="after")
    def _rows_are_counted_from_the_trials(self) -> Self:
        if self.rows != count(self.trials):
            raise ValueError("the rows are not what its trials give")
        return self

    def row(self, percent: int) -> PowerRow | None:
        return next((row for row in self.rows if row.percent == percent), None)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> PowerStudy:
        if len(text) > MAX_FILE_BYTES:
            raise ValueError("this is too long to be a power study; run `mrb doctor --power` again")
        try:
            return PowerStudy.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(
                f"this is not a power study ({first_problem(error)}); run `mrb doctor --power` again"
            ) from None


def plan_trials(trials: int) -> dict[int, int]:
    """Plans `trials` of the same code and half as many of each slow-down: the small false rate needs more
    trials.

    plan_trials(200) == {0: 200, 1: 100, 2: 100, 3: 100, 5: 100, 8: 100}
    """
    if not 1 <= trials <= 10_000:
        raise ValueError(f"{trials} trials; give between 1 and 10000")
    return {0: trials, **dict.fromkeys(SLOWDOWNS, (trials + 1) // 2)}


def study_power(
    planned: Mapping[int, int],
    *,
    experiment: Experiment | None = None,
    seed: int = 0,
    command: str = "",
    take_times: TakeTimes | None = None,
    on_progress: OnStep = lambda done, total: None,
) -> PowerStudy:
    """All trials in one shuffled order, so that a busy minute affects every percent alike. Ctrl-C ends it and
    keeps what there is. planned: trials by percent. take_times: real rounds unless a test gives its own."""
    experiment = experiment or CASE
    order = [percent for percent, number in planned.items() for _ in range(number)]
    random.Random(seed).shuffle(order)
    started, before = time.perf_counter(), noise_now()
    trials: list[PowerTrial] = []
    finished = False
    try:
        on_progress(0, len(order))
        take = take_times or RealTimes(experiment, seed)
        for begin in range(0, len(order), PER_SITTING):
            trials += _one_sitting(order[begin : begin + PER_SITTING], take)
            on_progress(len(trials), len(order))
        finished = True
    except KeyboardInterrupt:
        if not trials:
            raise
    return PowerStudy(
        command=command,
        machine=_as_in_json(this_machine().to_dict()),
        case=CASE.case,
        policy=_as_in_json(values_of(experiment, "how")),
        seed=seed,
        planned=dict(planned),
        finished=finished,
        seconds=time.perf_counter() - started,
        weather=NoiseDuring(before=before, after=noise_now()).to_dict(),
        rows=count(trials),
        trials=tuple(trials),
    )


def count(trials: Sequence[PowerTrial]) -> tuple[PowerRow, ...]:
    """Returns a row for every percentage that was tried, the smallest first."""
    rows = []
    for percent in sorted({trial.percent for trial in trials}):
        these = [trial for trial in trials if trial.percent == percent]
        verdicts = Counter(trial.verdict for trial in these)
        hits, of = verdicts["SLOWER"], len(these)
        if percent == 0:
            hits, of = hits + verdicts["FASTER"], of - verdicts["FAILED"]
        ratios = [trial.ratio for trial in these if trial.ratio is not None]
        rows.append(
            PowerRow(
                percent=percent,
                trials=len(these),
                verdicts=dict(sorted(verdicts.items())),
                share=hits / of if of else 0.0,
                interval=share_interval(hits, of),
                median_ratio=median(ratios) if ratios else None,
                median_rounds=median(trial.rounds for trial in these),
                median_seconds=median(trial.seconds for trial in these),
            )
        )
    return tuple(rows)


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """Returns Clopper and Pearson's 95 % interval of a share: (0, 0.018) for 0 of 200."""
    from scipy import stats  # a second to import

    if of == 0:
        return 0.0, 1.0
    interval = stats.binomtest(hits, of).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _as_in_json(document: dict[str, Any]) -> dict[str, Any]:
    """Makes lists of tuples, so that a study equals what is read back from its file."""
    return json.loads(json.dumps(document))


def _one_sitting(percents: Sequence[int], take: TakeTimes) -> list[PowerTrial]:
    started = time.perf_counter()
    try:
        times = take(percents)
    except FailedTrialError as failure:
        seconds = (time.perf_counter() - started) / len(percents)
        reason = str(failure)[:2000]
        return [
            PowerTrial(percent=percent, verdict="FAILED", rounds=0, seconds=seconds, reason=reason)
            for percent in percents
        ]
    floor = aa_floor(times.a, times.twin)
    # the twin is compared too, as in runner.py, because the correction for many comparisons counts it
    comparisons = compare_cells([(times.a, b) for b in (*times.b, times.twin)], aa_floor=floor)
    return [
        PowerTrial(
            percent=percent,
            verdict=compared.verdict,
            ratio=compared.ratio,
            interval=compared.interval,
            aa_floor=floor,
            rounds=compared.rounds,
            calls=times.calls,
            seconds=(time.perf_counter() - started) / len(percents),
            reason=times.stop_reason,
        )
        for percent, compared in zip(percents, comparisons[:-1], strict=True)
    ]


class RealTimes:
    """Rounds on this machine: RealTimes(CASE, 0)((0, 5)) gives the times of two candidates.

    The gate is repeated after every GATE_EVERY sittings.
    """

    def __init__(self, experiment: Experiment, seed: int):
        self.experiment, self.seed = experiment, seed
        self.gates: dict[int, Trial] = {}
        self.taken = 0
        self.judge: Judge | None = None

    def __call__(self, percents: Sequence[int]) -> Times:
        specs = [
            f"slowed(percent={percent},role=number_{place})" for place, percent in enumerate((0, *percents))
        ]
        experiment = replace(
            self.experiment,
            workload="uniform",
            implementations=tuple(ImplementationRef(name=spec, layout=CASE.layout) for spec in specs),
            seed=self.seed,
            include=(str(KERNELS),),
        )
        self.judge = self.judge or Judge(span_named(experiment.span), Inputs(experiment))
        budget = Budget(experiment.max_seconds)
        setup = Setup(
            experiment=experiment, judge=self.judge, cores=quiet_cores(experiment.threads), budget=budget
        )
        if self.taken % GATE_EVERY == 0:
            self.gates = {}
        self.taken += 1
        shared = SharedHost(setup, experiment.implementations)
        for implementation, percent in zip(experiment.implementations, (0, *percents), strict=True):
            if percent not in self.gates:
                self.gates[percent] = _gate(shared, implementation)
            setup.trials[implementation] = self.gates[percent]
        try:
            measured = measure(setup, shared, experiment.implementations, lambda rounds, now: None)
        except BaselineError as blame:
            raise FailedTrialError(f"{blame.failure.status}: {blame.failure.reason}") from None
        finally:
            shared.end()
        for failure in measured.failed.values():
            raise FailedTrialError(f"{failure.status}: {failure.reason}")
        seen = [
            measured.samples[measured.of(implementation)] for implementation in experiment.implementations
        ]
        return Times(
            a=seen[0].seconds,
            twin=measured.samples[measured.twin].seconds,
            b=[one.seconds for one in seen[1:]],
            stop_reason=measured.stop_reason,
            calls=seen[0].calls,
        )


def _gate(shared: SharedHost, implementation: ImplementationRef) -> Trial:
    include_folder(KERNELS)  # only registers names; workers load the code
    gate = try_alone(shared, implementation)
    if not gate.passed:
        raise FailedTrialError(f"at the gate, {gate.status}: {gate.reason}")
    return gate

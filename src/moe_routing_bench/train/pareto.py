"""Quality against cost: what each rule of a study reached, what it cost, and which rules others dominate.

A rule and the baseline with the same seed start with the same weights and see the same bytes, so differences
are paired. Intervals over seeds are Student's t, 95 %. Seconds are the number of steps times the time of a
step, measured in turns (times.json). The loss at equal seconds is that of runs which end there, if the study
has them; otherwise it is interpolated between two evaluations, in the middle of a schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from moe_routing_bench.bench.verdict import Comparison, compare
from moe_routing_bench.results.read import is_plain_file
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.train.looks import Decision, decisions
from moe_routing_bench.train.study import PLACES, STUDY, TIMES, TUNING, USED
from moe_routing_bench.train.study_rules import HOME

CONFIDENCE = 0.95
COSTS = ("seconds", "train_flops", "parameters", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over seeds with its interval, which is None with one seed."""

    mean: float
    interval: tuple[float, float] | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return Spread(mean=values[0], interval=None)
        from scipy import stats

        mean, half = fmean(values), stdev(values) / math.sqrt(len(values))
        half *= float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1))
        return Spread(mean=mean, interval=(mean - half, mean + half))

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def said(self, sign: str = "") -> str:
        """1.842 ±0.077: the mean and half of the interval; sign="+" for differences."""
        mean = f"{self.mean:{sign}.3f}"
        return mean if self.interval is None else f"{mean} ±{(self.interval[1] - self.interval[0]) / 2:.3f}"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One rule: Standing(rule="switch", loss=..., step_seconds=0.14, step_ratio=0.83, ...)."""

    rule: str
    seeds: int
    learning_rate: float
    sees_future: bool
    loss: Spread  # held-out nats per byte at equal tokens
    difference: Spread  # from the baseline, paired by seed
    at_equal_seconds: Spread
    step_seconds: float
    step_ratio: float
    step_interval: tuple[float, float]
    seconds: float  # of all steps
    train_flops: float
    flops_per_token: float
    parameters: int
    active_parameters: float
    peak_bytes: int
    experts_per_token: float
    max_violation: float | None  # mean over layers and seeds, at the end
    drop_rate: float | None
    collapsed: int  # layers of all seeds that were collapsed at some evaluation
    dominated_by: dict[str, str]  # cost -> the rule with less of it and a lower loss
    decode: dict[int, float]  # tokens a second by batch
    prefill: dict[int, float]
    why_not_decoded: str

    @property
    def title(self) -> str:
        return f"{self.rule} (sees the future)" if self.sees_future else self.rule


@dataclass(frozen=True, kw_only=True)
class Pareto:
    study: str
    question: str
    baseline: str
    trigram: float
    tokens: int
    budget: float  # seconds at which losses are compared: those of the fastest rule
    standings: tuple[Standing, ...]  # lowest loss first; rules that see the future last
    made: dict[str, Any]
    decisions: dict[str, dict[str, Decision]]  # by where runs end ("tokens", "0.5", ...) and rule

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def pareto(folder: Path) -> Pareto:
    if not is_plain_file(folder / STUDY):
        raise ValueError(f"{folder} holds no study; mrb train study routers --out {folder} makes one")
    about = json.loads((folder / STUDY).read_text())
    timed = next((folder / name for name in (TIMES, PLACES) if is_plain_file(folder / name)), None)
    if timed is None:
        raise ValueError(
            f"the study in {folder} is not finished: steps are not timed; the same command goes on"
        )
    times = json.loads(timed.read_text())
    used = json.loads((folder / USED).read_text())["rules"] if is_plain_file(folder / USED) else {}
    by_rule: dict[str, dict[int, Training]] = {}
    ends: dict[str, dict[int, dict[int, Training]]] = {}  # by rule, steps and seed
    for training in read_trainings(folder):
        if not training.study.endswith(TUNING):
            ends.setdefault(training.rule, {}).setdefault(training.steps, {})[training.seed] = training
            if training.steps == about["like"]["steps"]:
                by_rule.setdefault(training.rule, {})[training.seed] = training
    by_rule.pop(HOME.rule.name, None)  # other rules only start from it
    base = by_rule.get(about["baseline"])
    if base is None:
        raise ValueError(f"the baseline {about['baseline']} is not trained yet; the same command goes on")
    first = times["seconds"][about["baseline"]]
    compared = {rule: compare(first, times["seconds"][rule]) for rule in by_rule if rule != about["baseline"]}
    # by the ratio within rounds, because a busy moment affects both times of a round
    step = {rule: median(first) * (compared[rule].ratio if rule in compared else 1.0) for rule in by_rule}
    budget = min(step[rule] * next(iter(runs.values())).steps for rule, runs in by_rule.items())
    lengths: dict[str, dict[str, int]] = {}
    decided: dict[str, dict[str, Decision]] = {}
    if is_plain_file(folder / PLACES):
        lengths = json.loads((folder / PLACES).read_text())["lengths"]
        budget = median(first) * about["like"]["steps"]
        reported = [run for by_steps in ends.values() for runs in by_steps.values() for run in runs.values()]
        decided = {
            end: decisions(
                reported, baseline=about["baseline"], lengths=lengths, looks=tuple(about["looks"]),
                ends_at=end,
            )
            for end in lengths[about["baseline"]]
        }  # fmt: skip
    standings = [
        _standing(
            rule, runs, base, compared.get(rule), step[rule], budget, used.get(rule, {}),
            [*ends[rule].get(lengths.get(rule, {}).get("1", 0), {}).values()],
        )
        for rule, runs in by_rule.items()
    ]  # fmt: skip
    standings.sort(key=lambda standing: (standing.sees_future, standing.loss.mean))
    return Pareto(
        study=about["study"],
        question=about["question"],
        baseline=about["baseline"],
        trigram=about["trigram"],
        tokens=next(iter(base.values())).tokens,
        budget=budget,
        standings=tuple(_with_dominance(standing, standings) for standing in standings),
        made=times["made"],
        decisions=decided,
    )


def _standing(
    rule: str, runs: dict[int, Training], base: dict[int, Training], compared: Comparison | None,
    step: float, budget: float, used: dict[str, Any], in_time: list[Training],
) -> Standing:  # fmt: skip
    each = [runs[seed] for seed in sorted(runs)]
    paired = [runs[seed].loss - base[seed].loss for seed in sorted(runs) if seed in base]
    violations = [layer.max_violation for run in each for layer in run.layers]
    drops = [layer.drop_rate for run in each for layer in run.layers if layer.drop_rate is not None]
    rates = used.get("rates", ())
    first = each[0]
    return Standing(
        rule=rule,
        seeds=len(each),
        learning_rate=first.learning_rate,
        sees_future=first.sees_future,
        loss=Spread.of([run.loss for run in each]),
        difference=Spread.of(paired or [math.nan]),
        at_equal_seconds=Spread.of(
            [run.loss for run in in_time] or [_loss_at(run, budget / step) for run in each]
        ),
        step_seconds=step,
        step_ratio=1.0 if compared is None else compared.ratio,
        step_interval=(1.0, 1.0) if compared is None else compared.interval,
        seconds=step * first.steps,
        train_flops=fmean(run.train_flops for run in each),
        flops_per_token=fmean(run.flops_per_token for run in each),
        parameters=first.parameters,
        active_parameters=fmean(run.active_parameters for run in each),
        peak_bytes=int(median(run.peak_bytes for run in each)),
        experts_per_token=fmean(run.experts_per_token for run in each),
        max_violation=fmean(violations) if violations else None,
        drop_rate=fmean(drops) if drops else None,
        collapsed=sum(len(run.collapsed) for run in each),
        dominated_by={},
        decode={rate["batch"]: rate["decode"] for rate in rates},
        prefill={rate["batch"]: rate["prefill"] for rate in rates},
        why_not_decoded=used.get("why_not", ""),
    )


def _loss_at(run: Training, steps: float) -> float:
    """Returns the held-out loss after so many steps, interpolated between two evaluations."""
    points = run.curve
    for before, after in pairwise(points):
        if steps <= after.step:
            share = (steps - before.step) / (after.step - before.step)
            return before.loss + share * (after.loss - before.loss)
    return points[-1].loss


def _with_dominance(standing: Standing, others: Sequence[Standing]) -> Standing:
    """Adds, for each cost, the rule with the lowest loss among those with lower cost and lower loss. A rule
    that sees the future dominates nothing: its loss is not comparable, because it cannot generate text."""
    by_cost = {}
    for cost in COSTS:
        better = [
            other
            for other in others
            if not other.sees_future
            and other.loss.mean < standing.loss.mean
            and getattr(other, cost) <= getattr(standing, cost)
            and other.rule != standing.rule
        ]
        if better:
            by_cost[cost] = min(better, key=lambda other: other.loss.mean).rule
    return replace(standing, dominated_by=by_cost)


def sentences(reached: Pareto) -> list[str]:
    """Returns findings in sentences, derived only from the numbers."""
    lines = []
    front = [
        standing.rule
        for standing in reached.standings
        if not standing.sees_future and "seconds" not in standing.dominated_by
    ]
    lines.append(f"Not dominated, held-out loss against seconds: {', '.join(front)}.")
    for standing in reached.standings:
        if standing.sees_future or "seconds" not in standing.dominated_by:
            continue
        by = next(other for other in reached.standings if other.rule == standing.dominated_by["seconds"])
        gap = standing.loss.mean - by.loss.mean
        lines.append(
            f"{standing.rule} is dominated by {by.rule}: {gap:.3f} nats worse, "
            f"{standing.seconds / by.seconds:.2f} times the seconds."
        )
    for end, compared in reached.decisions.items():
        where = "at equal tokens" if end == "tokens" else f"after {end} of the seconds"
        for rule, one in compared.items():
            low, high = one.interval
            word = ("worse" if one.difference > 0 else "better") if one.decided else "open"
            lines.append(
                f"{rule} against {reached.baseline} {where}: {one.difference:+.4f} bits per byte "
                f"({low:+.4f} to {high:+.4f}, {one.seeds} seeds), {word}; {one.detectable:.4f} would be "
                "found."
            )
    for standing in [] if reached.decisions else reached.standings:
        if standing.rule == reached.baseline or standing.sees_future:
            continue
        spread = standing.difference
        if spread.interval is None:
            continue
        low, high = spread.interval
        word = ("worse" if spread.mean > 0 else "better") if spread.clear else "not clearly different"
        lines.append(
            f"{standing.rule} against {reached.baseline}: {spread.mean:+.4f} nats "
            f"({low:+.4f} to {high:+.4f}), {word}."
        )
    lines += [
        f"{standing.rule} sees later tokens: its loss of {standing.loss.mean:.3f} is not that of a language "
        "model."
        for standing in reached.standings
        if standing.sees_future
    ]
    above = [standing.rule for standing in reached.standings if standing.loss.mean >= reached.trigram]
    lines.append(
        f"The byte-trigram model has {reached.trigram:.3f} nats; "
        + (f"above it: {', '.join(above)}." if above else "every rule is below it.")
    )
    return lines

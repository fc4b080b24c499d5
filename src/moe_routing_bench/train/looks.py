"""Looks at paired differences after 4, 6, 8, ... seeds without finding by looking often what is not there.

O'Brien and Fleming's way to spend the error alpha over looks, in the form of Lan and DeMets:

    spent(n) = 2 - 2 Phi(z_(1 - alpha/2) / sqrt(n / N))          N seeds at the last look

A look rejects "no difference" where |t|, Student's statistic of the n paired differences, is above its bound.
The bounds come from a simulation with t, not from normal statistics, because n is small: of SIMULATED studies
without a difference, a share of spent(n) has been rejected after each look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

from moe_routing_bench.results.trainings import Training

SIMULATED = 200_000
POWER = 0.8
ALPHA = 0.05  # shared by the comparisons of all rules with the baseline


@cache
def bounds(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """Returns the bound of |t| at each look: bounds((4, 6, 8, 10), 0.05) is about (10, 4.0, 2.9, 2.5)."""
    from scipy import stats

    if list(looks) != sorted(set(looks)) or looks[0] < 2:
        raise ValueError(f"looks are growing numbers of seeds, at least 2; not {looks}")
    draw = np.random.default_rng(0).standard_normal((SIMULATED, looks[-1]))
    z = float(stats.norm.ppf(1 - alpha / 2))
    alive, found = np.ones(SIMULATED, dtype=bool), []
    for n in looks:
        seen = draw[:, :n]
        t = np.abs(seen.mean(1) / seen.std(1, ddof=1)) * math.sqrt(n)
        spent = 2 - 2 * float(stats.norm.cdf(z / math.sqrt(n / looks[-1])))
        rejected = round(spent * SIMULATED) - int((~alive).sum())
        largest = np.sort(t[alive])[::-1]
        found.append(float(largest[rejected]) if rejected > 0 else math.inf)
        alive &= t <= found[-1]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a comparison came to: at which look, by how much, and what could have been seen."""

    seeds: int
    difference: float
    interval: tuple[float, float]  # at the last look's error, shared over all comparisons
    deviation: float  # of the paired differences
    decided: bool
    detectable: float  # the difference that would be found with a probability of 0.8 at the last look


def decide(differences: Sequence[float], looks: tuple[int, ...], alpha: float) -> Decision:
    """Goes through the looks that the differences suffice for and stops at the first that decides."""
    from scipy import stats

    limit = bounds(looks, alpha)
    reached = [(n, bound) for n, bound in zip(looks, limit, strict=True) if n <= len(differences)]
    if not reached:
        raise ValueError(f"the first look is after {looks[0]} seeds; there are {len(differences)}")
    for n, bound in reached:
        seen = differences[:n]
        mean, deviation = fmean(seen), stdev(seen)
        error = deviation / math.sqrt(n)
        if decided := abs(mean) > bound * error:
            break
    N = looks[-1]
    more = limit[-1] + float(stats.t.ppf(POWER, N - 1))
    return Decision(
        seeds=n, difference=mean, interval=(mean - bound * error, mean + bound * error), deviation=deviation,
        decided=decided, detectable=more * deviation / math.sqrt(N),
    )  # fmt: skip


def decisions(
    trainings: Iterable[Training], *, baseline: str, lengths: Mapping[str, Mapping[str, int]],
    looks: tuple[int, ...], ends_at: str = "tokens",
) -> dict[str, Decision]:  # fmt: skip
    """Compares rules with the baseline, in bits per byte, paired by seed. The rules share the error ALPHA.

    lengths: the steps of each rule's runs by what they end at, "tokens" or a share of seconds. A rule with
    fewer seeds than the first look is left out.
    """
    losses: dict[str, dict[int, float]] = {}
    for run in trainings:
        if lengths.get(run.rule, {}).get(ends_at) == run.steps:
            losses.setdefault(run.rule, {})[run.seed] = run.bits_per_byte
    base = losses.pop(baseline, {})
    compared = {}
    for rule, by_seed in losses.items():
        each = [by_seed[seed] - base[seed] for seed in sorted(by_seed.keys() & base.keys())]
        if len(each) >= looks[0]:
            compared[rule] = decide(each, looks, ALPHA / (len(lengths) - 1))
    return compared

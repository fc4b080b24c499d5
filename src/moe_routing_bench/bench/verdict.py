"""Faster, slower, the same, or not decided: the statistics of two implementations timed in paired rounds.

The rule, for B against the baseline A, with the ratio B / A taken within each round:

1. SLOWER (or FASTER) has three conditions: the 99 % interval of the median ratio lies on one side of 1; the
   ratio is further from 1 than `delta`, and than the ratio of A's twin to A in this session; the signed-rank
   p-value, corrected for the number of cells, is at most 1 %.
2. SAME needs the whole interval, and the twin, within `delta` of 1.
3. TOO_FEW_ROUNDS is what more rounds would decide, and about how many.
4. UNDECIDED is a near-tie: the ratio is known as well as was asked for, and is too close to `delta`; or the
   session is too noisy for the question, by the baseline's twin. More rounds would not tell.

Why these rules, by `measurements/bench/verdict_power.py` (a round shuffles the order of implementations):

- Median of paired ratios, not ratio of medians: noise that hits both in a round cancels. Its standard
  deviation over 80 rounds is 0.58 % against 0.92 % under drift and 0.69 % against 1.49 % under all noises at
  once; it is worse only under spikes alone, by a twentieth.
- Signed ranks: if A and B are the same, shuffling makes every sign of log(B / A) an independent fair coin,
  whatever spikes, drift and bursts do to its size, so the test keeps its level under all of them. For the
  same reason rounds are resampled singly and not in blocks: bursts lose no coverage.
- Percentile bootstrap: BCa has the same coverage to 0.2 % and costs a jackknife. Of the 99 % intervals, 97 %
  hold the truth at 10 rounds, 98 % at 20 and 98.5 % to 99 % from 40 on.
- Code from outside has a process of its own, and two processes of the same code are not equally lucky with
  memory: of 200 comparisons of equal code (`measurements/bench/outside_power.json`), 3 were apart by 2.2 to
  2.4 % with an interval beside 1. So `delta` is 3 % there, and 2 % elsewhere. The baseline's twin shares the
  process of our own implementations, so its ratio says nothing about isolated processes and is not used for
  them. They have no twin: it would be one more process in every round, which takes time from the others.
- With 3 % of jitter a difference of 5 % is found in 40 rounds (98 % of the time; under all noises at once it
  takes 80), and the same code is called different in at most 0.65 % of comparisons.

All arithmetic is on logarithms: swapping A and B swaps FASTER and SLOWER, and the unit of time is irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Verdict: TypeAlias = Literal["FASTER", "SLOWER", "SAME", "TOO_FEW_ROUNDS", "UNDECIDED"]
OPEN: tuple[Verdict, ...] = ("TOO_FEW_ROUNDS", "UNDECIDED")
Floats: TypeAlias = NDArray[np.float64]

DELTA = 0.02
DELTA_APART = 0.03  # for two processes
TARGET = DELTA / 2  # a ratio known so well needs no more rounds
CONFIDENCE = 0.99
MIN_ROUNDS = 5
# with 1999, the ends of a 99 % interval are the 10th smallest and the 10th largest
RESAMPLES = 1_999
# if more rounds are needed, the ratio is too close to the threshold to decide on which side it lies
MAX_ROUNDS = 10_000
# logarithms are rounded to 1e-12, so that 1.02 is on the threshold whatever the unit of time and the
# direction of the comparison
DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B against A over paired rounds. ratio is B / A, interval its confidence interval.

    forty rounds, A about 10.0 ms, B about 10.5 ms, 3 % of jitter in each:
      Comparison(ratio=1.050, interval=(1.035, 1.059), p_value=9.7e-10, p_adjusted=9.7e-10, rounds=40,
                 verdict="SLOWER", more_rounds=None, reason="B takes 1.050 times as long as A, 99 % interval
                 1.035 to 1.059: a difference of more than 2.0 %, with p = 9.7e-10")

    p_adjusted: p_value after Benjamini-Hochberg over the cells compared together.
    more_rounds: with TOO_FEW_ROUNDS, how many to add for about an even chance of a decision; else None.
    aa_floor: how far the baseline's twin was from it, where that counts; else 0.
    """

    ratio: float
    interval: tuple[float, float]
    p_value: float
    p_adjusted: float
    rounds: int
    verdict: Verdict
    reason: str
    more_rounds: int | None
    aa_floor: float = 0.0


def compare(
    a: ArrayLike,
    b: ArrayLike,
    *,
    aa_floor: float = 0.0,
    delta: float = DELTA,
    target: float = TARGET,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Compares the times of A and B in one cell, paired by round. `aa_floor` is the result of the function of
    that name."""
    return compare_cells(
        [(a, b)], aa_floor=aa_floor, delta=delta, target=target, confidence=confidence, seed=seed
    )[0]


def compare_cells(
    cells: Sequence[tuple[ArrayLike, ArrayLike]],
    *,
    aa_floor: float | Sequence[float] = 0.0,
    delta: float | Sequence[float] = DELTA,
    target: float = TARGET,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> list[Comparison]:
    """Many cells at once, (times of A, times of B) each: of the differences found, at most 1 % are false.

    aa_floor, delta: one for all cells, or one for each. target: how well the ratio was to be known.
    """
    deltas = np.broadcast_to(np.asarray(delta, dtype=np.float64), len(cells))
    if not (np.isfinite(deltas) & (deltas > 0)).all():
        raise ValueError(f"delta must be a positive fraction such as 0.02, not {delta}")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must be from 0.5 to below 1, not {confidence}")
    if not cells:
        return []
    floors = np.broadcast_to(np.asarray(aa_floor, dtype=np.float64), len(cells))
    if not (np.isfinite(floors) & (floors >= 0)).all():
        raise ValueError(f"aa_floor must be zero or a positive fraction, not {aa_floor}")
    logs = [_log_ratios(a, b) for a, b in cells]
    p_values = _signed_rank_ps(logs)
    from scipy import stats  # takes a second to import, which no other command should pay

    adjusted = stats.false_discovery_control(p_values)
    decided = [
        _decide(log, p, float(q), _log1p(floor), _log1p(least), _log1p(target), confidence, seed)
        for log, p, q, floor, least in zip(logs, p_values, adjusted, floors, deltas, strict=True)
    ]
    return [replace(one, aa_floor=float(floor)) for one, floor in zip(decided, floors, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The samples of one implementation, and those of the baseline timed as it is in the same rounds.

    isolated: both by the parent, each in a process of its own
    elsewhere: the baseline in a process without code from outside, where that shares one with `against`
    trusted: our own code, or what the system held (hosts/holding.py), or what the user trusts
    """

    own: ArrayLike
    against: ArrayLike
    isolated: bool = False
    elsewhere: ArrayLike | None = None
    trusted: bool = True


def compare_cell(pairs: Sequence[Paired], twin: Paired, *, target: float = TARGET) -> list[Comparison]:
    """All comparisons of a cell by the rule above, the twin's last. The twin's distance counts only for those
    in processes like its own."""
    floor = aa_floor(twin.against, twin.own)
    found = compare_cells(
        [(one.against, one.own) for one in (*pairs, twin)],
        aa_floor=[floor if one.isolated == twin.isolated else 0.0 for one in (*pairs, twin)],
        delta=[DELTA_APART if one.isolated else DELTA for one in (*pairs, twin)],
        target=target,
    )
    return [_believed(*both, floor) for both in zip(found, (*pairs, twin), strict=True)]


def _believed(comparison: Comparison, pair: Paired, floor: float) -> Comparison:
    """Code from outside may have slowed the baseline beside it, so FASTER must also hold elsewhere; and it is
    not said of code that could have worked while it was to stand still."""
    if comparison.verdict != "FASTER":
        return comparison
    if not pair.trusted:
        why = "nothing here holds code from outside (ptrace, seccomp and Landlock do); --trust believes it"
    elif pair.elsewhere is None:
        return comparison
    elif compare(pair.elsewhere, pair.own, aa_floor=floor, delta=DELTA_APART).verdict == "FASTER":
        return comparison
    else:
        why = "it is not faster than the baseline in another process"
    reason = f"{comparison.reason}; but {why}"
    return replace(comparison, verdict="UNDECIDED", more_rounds=None, reason=reason)


def aa_floor(a: ArrayLike, a_twin: ArrayLike) -> float:
    """How far the baseline was from its own twin in this session: 0.013 is 1.3 %, in either direction.

    Every interval already contains its random part. The floor adds what shuffling cannot remove, such as
    lucky memory addresses. One pair is one draw of that luck: of several cells' floors, use the largest.
    """
    return math.expm1(abs(float(np.median(_log_ratios(a, a_twin)))))


def precision_reached(
    a: ArrayLike, b: ArrayLike, target: float, *, confidence: float = CONFIDENCE, seed: int = 0
) -> bool:
    """Is the ratio known to within a factor of 1 + target? The ratio itself does not matter."""
    low, high = _interval(_log_ratios(a, b), confidence, seed)
    return (high - low) / 2 <= _log1p(target)


def stop_reason(
    a: ArrayLike,
    b: ArrayLike,
    *,
    target: float = TARGET,
    min_rounds: int = 20,
    max_rounds: int = 200,
    seconds: float = 0.0,
    max_seconds: float = math.inf,
) -> str | None:
    """Why measuring may stop now, or None to go on.

    It depends on the width of the interval and never on the verdict: measuring until a difference shows
    finds differences that do not exist.
    """
    rounds = np.size(a)
    if rounds >= max_rounds:
        return f"rounds: {rounds} of at most {max_rounds}"
    if seconds >= max_seconds:
        return f"time: {seconds:.0f} s of at most {max_seconds:.0f} s, after {rounds} rounds"
    if rounds >= max(min_rounds, MIN_ROUNDS) and precision_reached(a, b, target):
        return f"precision: the ratio is known to {100 * target:.1f} % after {rounds} rounds"
    return None


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What choosing one implementation for every cell costs against the best of each cell.

    X takes 10 ms and 13 ms where the best take 10 ms and 10 ms, and is shown to be slower in the second cell:
      Regret(implementation="X", median_loss=0.15, worst_loss=0.3, worst_cell="T=64", ties=("T=8",),
             missing=())

    ties: cells where it is the best, or not shown to be slower than the best.
    missing: cells where it has no time. There the loss is infinite: it cannot be the choice for all.
    """

    implementation: str
    median_loss: float
    worst_loss: float
    worst_cell: str
    ties: tuple[str, ...]
    missing: tuple[str, ...]


def regret(
    table: Mapping[str, Mapping[str, float]], against_best: Mapping[str, Mapping[str, Comparison]]
) -> list[Regret]:
    """Every implementation as the choice for all cells, least worst loss first.

    table: median time by cell and implementation. against_best: by cell and implementation, the comparison
    with the cell's fastest in the table as A; the fastest itself may be left out.
    """
    if not table or not all(table.values()):
        raise ValueError("regret needs at least one cell, and a time in every cell")
    best = {cell: min(times, key=lambda name: times[name]) for cell, times in table.items()}
    rows = []
    for name in sorted({name for times in table.values() for name in times}):
        loss = {cell: ts[name] / ts[best[cell]] - 1 if name in ts else math.inf for cell, ts in table.items()}
        missing = tuple(cell for cell in table if name not in table[cell])
        compared = [cell for cell in table if name in table[cell] and name != best[cell]]
        for cell in compared:
            if name not in against_best.get(cell, {}):
                raise ValueError(f"{name} was not compared with {best[cell]}, the fastest in cell {cell}")
        slower = {cell for cell in compared if against_best[cell][name].verdict == "SLOWER"}
        worst = max(loss, key=lambda cell: loss[cell])
        rows.append(
            Regret(
                implementation=name,
                median_loss=median(loss.values()),
                worst_loss=loss[worst],
                worst_cell=worst,
                ties=tuple(cell for cell in table if cell not in slower and name in table[cell]),
                missing=missing,
            )
        )
    return sorted(rows, key=lambda row: (row.worst_loss, row.median_loss))


def _decide(
    log: Floats, p: float, q: float, floor: float, delta: float, target: float, confidence: float, seed: int
) -> Comparison:
    rounds, centre = len(log), float(np.median(log))
    low, high = _interval(log, confidence, seed)
    effect, counts, alpha = abs(centre), max(delta, floor), 1 - confidence
    # n rounds all on one side have the two-sided p-value 2 / 2^n: with fewer, no data could reach alpha
    fewest = math.ceil(1 - math.log2(alpha))
    # the interval shrinks like 1 / sqrt(n), and the test's z-score grows like sqrt(n)
    half = max(centre - low, high - centre)
    verdict: Verdict = "UNDECIDED"
    needed = 0.0
    if rounds < fewest:
        needed = fewest
        why = (
            f"{rounds} rounds cannot give {100 * confidence:g} % confidence whatever they show, {fewest} can"
        )
    elif effect > counts:
        if (low > 0 or high < 0) and q <= alpha:
            verdict = "SLOWER" if centre > 0 else "FASTER"
            why = f"a difference of more than {_percent(counts)}, with p = {q:.2g}"
        else:
            holds = low <= 0 <= high
            needed = max(rounds * (half / effect) ** 2, _rounds_for_p(rounds, p, q, alpha))
            needed = math.inf if holds and half <= target else needed
            cause = "the interval holds 1" if holds else f"p = {q:.2g} is above {alpha:.2g}"
            why = f"perhaps a difference of more than {_percent(counts)}, but {cause}"
    elif floor > delta:
        needed = math.inf
        why = f"in this session the baseline's own twin is {_percent(floor)} away from it"
    elif max(-low, high) <= delta:
        verdict = "SAME"
        why = f"no difference of more than {_percent(delta)}"
    else:
        known = half <= target or effect >= delta
        needed = math.inf if known else rounds * (half / (delta - effect)) ** 2
        why = f"perhaps no difference of more than {_percent(delta)}, but the interval reaches further"
    more = None
    if verdict == "UNDECIDED" and needed <= MAX_ROUNDS:
        verdict, more = "TOO_FEW_ROUNDS", max(1, math.ceil(needed) - rounds)
        why += f"; about {more} more rounds would tell"
    ratio, ends = math.exp(centre), (math.exp(low), math.exp(high))
    return Comparison(
        ratio=ratio,
        interval=ends,
        p_value=p,
        p_adjusted=q,
        rounds=rounds,
        verdict=verdict,
        reason=f"B takes {ratio:.3f} times as long as A, {100 * confidence:g} % interval {ends[0]:.3f} to "
        f"{ends[1]:.3f}: {why}",
        more_rounds=more,
    )


def _signed_rank_ps(logs: Sequence[Floats]) -> list[float]:
    # "auto" uses the normal law above 50 rounds, but with ties it permutes up to 13 rounds, which takes 5 s.
    # "exact" ignores the ties of a coarse clock: at the 1 % level it then rejects 0 to 1.0 % (simulated,
    # clock steps of 0.1 to 2 sigma). zsplit: two equal times count half for each side
    from scipy import stats

    by_rounds: dict[int, list[int]] = {}
    for place, log in enumerate(logs):
        by_rounds.setdefault(len(log), []).append(place)
    p_values = [1.0] * len(logs)
    for rounds, places in by_rounds.items():  # a call costs as much as a hundred cells in it
        method: Literal["exact", "auto"] = "exact" if rounds <= 50 else "auto"
        together = [places] if rounds <= 50 else [[place] for place in places]
        for some in together:
            tested = stats.wilcoxon(
                np.stack([logs[place] for place in some]), zero_method="zsplit", method=method, axis=1
            )
            for place, p in zip(some, np.atleast_1d(tested.pvalue), strict=True):
                p_values[place] = float(p)
    return p_values


def _rounds_for_p(rounds: int, p: float, q: float, alpha: float) -> float:
    """Returns the rounds until p falls to alpha, with the present correction for many cells."""
    if q <= alpha:
        return 0.0
    from scipy import stats

    now = float(stats.norm.isf(p / 2))
    return rounds * (float(stats.norm.isf(alpha * p / q / 2)) / now) ** 2 if now > 0 else math.inf


def _interval(log: Floats, confidence: float, seed: int) -> tuple[float, float]:
    """Returns the numbers of scipy.stats.bootstrap(method="percentile") in a tenth of its time: from
    the smallest value up, how much of each resample has been seen? Half of it is seen at its median."""
    rounds, order = len(log), np.argsort(log)
    times_NR = _drawn(rounds, seed)
    seen_R, lower_R, upper_R = (np.zeros(RESAMPLES, times_NR.dtype) for _ in range(3))
    for place in order:
        seen_R += times_NR[place]
        lower_R += (seen_R <= (rounds - 1) // 2).view(np.uint8)
        upper_R += (seen_R <= rounds // 2).view(np.uint8)
    ordered = log[order]
    medians = np.sort((ordered[lower_R] + ordered[upper_R]) / 2)
    tail = (1 - confidence) / 2
    return _between(medians, tail), _between(medians, 1 - tail)


def _between(ordered: Floats, share: float) -> float:
    """numpy.percentile of what is in order already."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return round(float(ordered[below] + (ordered[above] - ordered[below]) * (place - below)), DIGITS)


@lru_cache(maxsize=8)
def _drawn(rounds: int, seed: int) -> NDArray[Any]:
    """Returns how often each resample draws each round. It uses bytes if they are large enough, because
    adding bytes is 16 times as fast."""
    draws = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
    resample = np.arange(RESAMPLES)[:, None]
    counts = np.bincount((draws * RESAMPLES + resample).ravel(), minlength=rounds * RESAMPLES)
    return counts.reshape(rounds, RESAMPLES).astype(np.uint8 if rounds < 256 else np.int32)


def _log_ratios(a: ArrayLike, b: ArrayLike) -> Floats:
    times_a, times_b = (np.asarray(times, dtype=np.float64) for times in (a, b))
    if times_a.ndim != 1 or times_a.shape != times_b.shape:
        raise ValueError(
            f"A has times of shape {times_a.shape} and B of {times_b.shape}: a round gives one time of each"
        )
    if len(times_a) < MIN_ROUNDS:
        raise ValueError(f"{len(times_a)} rounds are too few to compare anything, {MIN_ROUNDS} is the least")
    for name, times in (("A", times_a), ("B", times_b)):
        if (wrong := ~(np.isfinite(times) & (times > 0))).any():
            at = int(wrong.argmax())
            raise ValueError(f"{name} took {times[at]} in round {at}: a time is positive and finite")
    return np.round(np.log(times_b) - np.log(times_a), DIGITS)


def _log1p(fraction: float) -> float:
    return round(math.log1p(fraction), DIGITS)


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):.1f} %"

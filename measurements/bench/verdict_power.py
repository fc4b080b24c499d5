"""How often the verdict is wrong, and how many rounds it needs, on simulated noise.

    python measurements/bench/verdict_power.py              10 minutes; writes verdict_power.json beside it
    python measurements/bench/verdict_power.py unpaired     runs that are not interleaved; unpaired_runs.json

Every round times A, its twin and B once, in shuffled order; the times are 1 (B: the effect) times the noise:

    jitter     lognormal, 3 % per sample
    spikes     jitter, and 5 % of samples a Pareto(1.5) spike of up to 5x
    drift      jitter, and a random walk of 2 % per round, shared by the round
    bursts     jitter, and slow stretches of 1.3x that start with 3 % and last 5 samples in the mean
    bimodal    jitter, and 10 % of rounds 1.5x slower
    all        the product of the five
    placement  jitter, and a factor for each name that lasts the whole session, lognormal 2 %: what shuffling
               cannot remove, and the A/A twin is for

In `verdicts`, `false` is the share of FASTER and SLOWER where A and B are the same, `covered` the share of
99 % intervals that hold 1, `found` the share of SLOWER by effect and `wrong_way` the largest of FASTER.

`unpaired` asks how often `mrb results compare` calls equal code different. Each run has 40 rounds with 3 % of
jitter, and is faster or slower as a whole by chance (drift, standard deviation 0 or 2 %, the same for the
baseline and the candidate). In raw times the drift looks like a change of the code. In the ratio to a
baseline timed in the same rounds it cancels. There is no correction for many comparisons.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections import Counter
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy import stats

from moe_routing_bench.bench.verdict import DELTA, Comparison, aa_floor, compare, compare_cells, stop_reason
from moe_routing_bench.results.compare import interval_of, p_value_of, verdict_of

SEED = 20261115
SHARED = ("jitter", "spikes", "drift", "bursts", "bimodal", "all")
ROUNDS = (10, 20, 40, 80)
EFFECTS = (1.02, 1.05, 1.10)
NULLS, POWERS, EXTRAS = 2_000, 500, 1_000
TWINS = 8
RUNS, RUN_ROUNDS, JITTER = 400, 40, 0.03  # of `unpaired`


def times(model: str, sessions: int, rounds: int, rng: np.random.Generator, names: int = 3) -> np.ndarray:
    """Shape (sessions, rounds, names). The last axis is made in the order of time, then shuffled."""
    size = (sessions, rounds, names)
    found = np.exp(0.03 * rng.standard_normal(size))
    if model in ("spikes", "all"):
        spike = np.minimum(1 + rng.pareto(1.5, size), 5)
        found *= np.where(rng.random(size) < 0.05, spike, 1)
    if model in ("drift", "all"):
        found *= np.exp(np.cumsum(0.02 * rng.standard_normal((sessions, rounds, 1)), axis=1))
    if model in ("bursts", "all"):
        draw = rng.random((rounds * names, sessions))
        slow = np.zeros((rounds * names, sessions), dtype=bool)
        for i in range(rounds * names):
            slow[i] = np.where(slow[i - 1], draw[i] > 0.2, draw[i] < 0.03) if i else draw[i] < 0.15
        found *= np.where(slow.T.reshape(size), 1.3, 1)
    if model in ("bimodal", "all"):
        found *= np.where(rng.random((sessions, rounds, 1)) < 0.1, 1.5, 1)
    found = rng.permuted(found, axis=2)
    if model == "placement":
        found *= np.exp(0.02 * rng.standard_normal((sessions, 1, names)))
    return found


def simulate(model: str, rounds: int, effect: float, sessions: int, seed: int) -> list[Comparison]:
    """compare() on so many sessions, each with the floor of its own twin."""
    rng = np.random.default_rng([SEED, seed, rounds, round(1000 * effect), *model.encode()])
    found = []
    for session in times(model, sessions, rounds, rng):
        a, twin, b = session.T
        found.append(compare(a, b * effect, aa_floor=aa_floor(a, twin)))
    return found


def share(found: list[Comparison], *verdicts: str) -> float:
    return sum(c.verdict in verdicts for c in found) / len(found)


def verdicts(case: tuple[str, int]) -> dict[str, Any]:
    model, rounds = case
    same = simulate(model, rounds, 1.0, NULLS, 0)
    changed = {effect: simulate(model, rounds, effect, POWERS, 0) for effect in EFFECTS}
    more = [c.more_rounds for c in same if c.more_rounds]
    return {
        "model": model,
        "rounds": rounds,
        "false": share(same, "FASTER", "SLOWER"),
        "p_at_most_0.01": sum(c.p_value <= 0.01 for c in same) / NULLS,
        "covered": sum(c.interval[0] <= 1 <= c.interval[1] for c in same) / NULLS,
        "same": share(same, "SAME"),
        "median_more_rounds": float(np.median(more)) if more else None,
        "found": {f"{effect:.2f}": share(found, "SLOWER") for effect, found in changed.items()},
        "wrong_way": max(share(found, "FASTER") for found in changed.values()),
    }


def estimators(case: tuple[str, int]) -> dict[str, Any]:
    """Standard deviation of the logarithm of two estimators, and coverage of two kinds of bootstrap."""
    model, rounds = case
    rng = np.random.default_rng([SEED, 1, rounds, *model.encode()])
    a, _, b = np.moveaxis(times(model, 10_000, rounds, rng), 2, 0)
    row: dict[str, Any] = {
        "model": model,
        "rounds": rounds,
        "sd_median_of_ratios": round(float(np.median(np.log(b / a), axis=1).std()), 5),
        "sd_ratio_of_medians": round(float(np.log(np.median(b, axis=1) / np.median(a, axis=1)).std()), 5),
    }
    if rounds in (20, 40):
        for method in ("percentile", "BCa"):
            held = 0
            for log in np.log(b / a)[:POWERS]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # BCa: degenerate, then NaN, which covers nothing
                    ends = stats.bootstrap(
                        (log,), np.median, n_resamples=1_999, confidence_level=0.99, method=method, rng=0
                    ).confidence_interval
                held += bool(ends.low <= 0 <= ends.high)
            row[f"covered_{method}"] = held / POWERS
    return row


def stopping(model: str) -> dict[str, Any]:
    """A and B the same: false verdicts if rounds are added until they are precise, or once if undecided."""
    rng = np.random.default_rng([SEED, 2, *model.encode()])
    precise, extended, decided, used = 0, 0, 0, []
    for session in times(model, EXTRAS, 200, rng):
        a, twin, b = session.T
        n = next(n for n in range(20, 201, 20) if stop_reason(a[:n], b[:n]))
        used.append(n)
        precise += compare(a[:n], b[:n], aa_floor=aa_floor(a[:n], twin[:n])).verdict in ("FASTER", "SLOWER")
        first = compare(a[:40], b[:40], aa_floor=aa_floor(a[:40], twin[:40]))
        n = min(200, 40 + (first.more_rounds or 0))
        last = compare(a[:n], b[:n], aa_floor=aa_floor(a[:n], twin[:n]))
        extended += last.verdict in ("FASTER", "SLOWER")
        decided += last.verdict != "UNDECIDED"
    return {
        "model": model,
        "until_precise": {"false": precise / EXTRAS, "median_rounds": float(np.median(used))},
        "forty_then_more_rounds_once": {"false": extended / EXTRAS, "decided": decided / EXTRAS},
    }


def many_cells(model: str) -> dict[str, Any]:
    """Twenty cells of 40 rounds, all the same: sessions in which any of them is called different."""
    rng = np.random.default_rng([SEED, 3, *model.encode()])
    cells = times(model, 200 * 20, 40, rng).reshape(200, 20, 40, 3)
    wrong = [Counter(c.verdict for c in compare_cells([(t[:, 0], t[:, 2]) for t in ts])) for ts in cells]
    return {
        "model": model,
        "cells": 20,
        "sessions_with_a_false": sum(c["FASTER"] + c["SLOWER"] > 0 for c in wrong) / 200,
    }


def placement(rounds: int) -> dict[str, Any]:
    """What the twin is for: luck that lasts the session. No twin, one, and the largest floor of several."""
    rng = np.random.default_rng([SEED, 4, rounds])
    wrong: Counter[str] = Counter()
    for session in times("placement", EXTRAS, rounds, rng, names=2 + 2 * TWINS):
        a, b, *rest = session.T
        floors = [aa_floor(x, y) for x, y in zip(rest[::2], rest[1::2], strict=True)]
        for name, floor in (("no twin", 0.0), ("one twin", floors[0]), (f"{TWINS} twins", max(floors))):
            wrong[name] += compare(a, b, aa_floor=floor).verdict in ("FASTER", "SLOWER")
    return {"rounds": rounds, "false": {name: count / EXTRAS for name, count in wrong.items()}}


def one_run(rng: np.random.Generator, drift: float, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the baseline's and the candidate's times."""
    luck = rng.normal(0, drift)
    baseline = luck + rng.normal(0, JITTER, RUN_ROUNDS)
    return baseline, luck + effect + rng.normal(0, JITTER, RUN_ROUNDS)


def called_different(rng: np.random.Generator, drift: float, effect: float, *, by_ratio: bool) -> float:
    called = 0
    for _ in range(RUNS):
        (base_a, cand_a), (base_b, cand_b) = one_run(rng, drift, 0.0), one_run(rng, drift, effect)
        a, b = (cand_a - base_a, cand_b - base_b) if by_ratio else (cand_a, cand_b)
        centre = float(np.median(b) - np.median(a))
        verdict, _ = verdict_of(centre, interval_of(a, b), p_value_of(a, b), 0.0, DELTA, 0.0)
        called += verdict in ("FASTER", "SLOWER")
    return called / RUNS


def unpaired() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "drift_sd": drift,
            "effect": effect,
            "called_different_by_times": called_different(rng, drift, np.log1p(effect), by_ratio=False),
            "called_different_by_ratio_to_baseline": called_different(
                rng, drift, np.log1p(effect), by_ratio=True
            ),
        }
        for drift, effect in ((0.0, 0.0), (0.02, 0.0), (0.02, 0.05))
    ]
    document = {"runs": RUNS, "rounds": RUN_ROUNDS, "jitter": JITTER, "delta": DELTA, "rows": rows}
    Path(__file__).with_name("unpaired_runs.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def main() -> None:
    cases = [(model, rounds) for model in SHARED for rounds in ROUNDS]
    with Pool(2) as pool:
        # the costly cases first, so that both processes finish together
        rows = pool.map(verdicts, sorted(cases, key=lambda case: -case[1]), chunksize=1)
        record: dict[str, Any] = {
            "command": "python measurements/bench/verdict_power.py",
            "seed": SEED,
            "machine": {"platform": platform.platform()},
            "versions": {
                "python": sys.version.split()[0],
                "numpy": np.__version__,
                "scipy": scipy.__version__,
            },
            "sessions": {"same": NULLS, "each effect": POWERS, "stopping and placement": EXTRAS},
            "verdicts": sorted(rows, key=lambda row: cases.index((row["model"], row["rounds"]))),
            "estimators": pool.map(estimators, cases, chunksize=1),
            "stopping": pool.map(stopping, ("jitter", "bursts", "all"), chunksize=1),
            "many_cells": pool.map(many_cells, ("jitter", "all"), chunksize=1),
            "placement": pool.map(placement, (20, 80), chunksize=1),
        }
    for part in ("verdicts", "estimators", "stopping", "many_cells", "placement"):
        print(part, *record[part], sep="\n  ")
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    unpaired() if sys.argv[1:] == ["unpaired"] else main()

"""A metric over commits: series of comparable measurements, and the commits at which their level changes.

A series is one implementation in one case on one machine, measured in one way. Its points are in the order in
which their commits were first measured. Several runs of a commit become one point, their median. A record of
an installed package names no commit, so its version and the hash of the implementation's code are used
instead.

A step splits a series into two parts. Their medians differ by more than 2 % (or the noise floor, if that is
larger) and by more than five standard errors of the difference. Then each part is split again in the same
way. The standard error comes from the differences of neighbours or from the intervals of the points,
whichever is larger. The factor is five because every place is tried: of 300 series of 50 points of pure noise
at most 3 have a step (tests/results/test_history.py). One point is never a step; the next commit must confirm
it.

The cost is one query over all records, then n log n splits of n points for each series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from moe_routing_bench.bench.verdict import DELTA
from moe_routing_bench.core.names import by_numbers
from moe_routing_bench.results.compare import Kind
from moe_routing_bench.results.folder import environments
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.winners import SAME_CASE, in_sql, told_apart

Metric: TypeAlias = Literal["ratio", "ms"]
METRICS: dict[str, str] = {
    "ratio": "time divided by the baseline's time in the same rounds, so the machine's speed cancels",
    "ms": "median milliseconds, which also change with the machine's speed on that day",
}
MAX_POINTS = 400  # of a series, the newest
STANDARD_ERRORS = 5.0
HALF_INTERVAL = 2.576  # standard errors in half of a 99 % interval
WHERE = (*SAME_CASE, "impl", "layout", "router", "layer")
ROWS = f"""
SELECT {in_sql(WHERE)}, source_commit, source_dirty, created_at, session, cell_key,
  role, median_ms, ratio, ratio_low, ratio_high, baseline, aa_floor, harness_hash, contract_hash,
  suite_version, source_hash, harness_version, environment, repro
FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate') ORDER BY created_at, record_id
"""


@dataclass(frozen=True, kw_only=True)
class CommitPoint:
    """CommitPoint(commit="3f80af225a...", dirty=False, day="2026-11-16", value=0.81, error=0.004, ...).
    commit: a hash, or version and code as in "0.3.1 5d2c1e0". error: the standard error of log(value) from
    its interval. method, place: if they change between two points, a step may have another cause than the
    code."""

    commit: str
    dirty: bool
    day: str
    value: float
    error: float
    floor: float
    runs: int
    source: str
    method: tuple[object, ...]
    place: tuple[object, ...]
    repro: str

    @property
    def name(self) -> str:
        commit = self.commit if " " in self.commit else self.commit[:10]
        return f"{commit}{'+' if self.dirty else ''}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of the level at points[at]: Step(at=7, before=1.0, after=1.06, kind="regression")."""

    at: int
    before: float
    after: float
    kind: Kind

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True)
class CaseHistory:
    where: str
    implementation: str
    machine: str
    points: tuple[CommitPoint, ...]
    steps: tuple[Step, ...]

    @property
    def method_changes(self) -> list[int]:
        """The places of points that were measured in another way than the point before."""
        pairs = enumerate(pairwise(self.points), start=1)
        return [at for at, (one, other) in pairs if one.method != other.method]


@dataclass(frozen=True, kw_only=True)
class History:
    """All series, the ones with the largest steps first. without: the number of records without a commit."""

    metric: Metric
    series: tuple[CaseHistory, ...]
    without: int
    left_out: LeftOut

    @property
    def steps(self) -> list[tuple[CaseHistory, Step]]:
        return [(one, step) for one in self.series for step in one.steps]


def history(
    folder: Path | str,
    metric: Metric = "ratio",
    wanted: Callable[[str, str], bool] = lambda where, name: True,
) -> History:
    """Reads the history of a folder. `wanted` selects series by case and implementation. It raises a
    ValueError if there are no times."""
    left_out = LeftOut()
    names, rows = run_query(folder, ROWS, left_out)
    records = [dict(zip(names, row, strict=True)) for row in rows]
    torch = {key: str(machine.get("torch")) for key, _, machine in environments(folder)}
    bases = {(r["session"], r["cell_key"]): r["source_hash"] for r in records if r["role"] == "baseline"}
    by_series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        if metric == "ms" or record["ratio"] is not None:
            by_series.setdefault(tuple(record[name] for name in WHERE), []).append(record)
    if not by_series:
        raise ValueError(f"{folder} has no history: it has no times")
    series = []
    keys = [dict(zip(WHERE, key, strict=True)) for key in by_series]
    for key, more, mine in zip(keys, told_apart(keys, _named), by_series.values(), strict=True):
        where, implementation, machine = _named(key)
        where += more
        if wanted(where, implementation):
            points = _points(mine, metric, torch, bases)[-MAX_POINTS:]
            series.append(
                CaseHistory(
                    where=where, implementation=implementation, machine=machine, points=tuple(points),
                    steps=tuple(_steps(points)),
                )
            )  # fmt: skip
    without = sum(record["source_commit"] is None for record in records)
    series.sort(key=lambda one: by_numbers(one.where))
    series.sort(key=lambda one: -max((abs(math.log(s.ratio)) for s in one.steps), default=0))
    return History(metric=metric, series=tuple(series), without=without, left_out=left_out)


def _named(key: Mapping[str, Any]) -> tuple[str, str, str]:
    direction = "" if key["direction"] == "forward" else f" {key['direction']}"
    threads = "" if key["threads"] == 1 else f" {key['threads']} threads"
    where = f"{key['span']}{direction} {key['case']} {key['dtype']} {key['workload']}{threads}"
    implementation = " | ".join(filter(None, (key["impl"], key["layout"], key["router"], key["layer"])))
    return where, implementation, str(key["machine"])


def _points(
    records: Sequence[dict[str, Any]],
    metric: Metric,
    torch: dict[str, str],
    bases: dict[tuple[str, str], str],
) -> list[CommitPoint]:
    by_commit: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for record in records:
        code = record["source_commit"] or f"{record['harness_version']} {record['source_hash'][:7]}"
        by_commit.setdefault((code, bool(record["source_dirty"])), []).append(record)
    points = []
    for (commit, dirty), mine in by_commit.items():
        last = mine[-1]
        values = [r["ratio"] if metric == "ratio" else r["median_ms"] for r in mine]
        errors = [
            math.log(r["ratio_high"] / r["ratio_low"]) / (2 * HALF_INTERVAL)
            for r in mine
            if metric == "ratio" and r["ratio_low"]
        ]
        base = (last["baseline"], bases.get((last["session"], last["cell_key"]))) if metric == "ratio" else ()
        points.append(
            CommitPoint(
                commit=commit, dirty=dirty, day=f"{mine[0]['created_at']:%Y-%m-%d}",
                value=float(np.median(values)), error=float(np.median(errors)) if errors else 0.0,
                floor=max(r["aa_floor"] or 0.0 for r in mine), runs=len(mine), source=last["source_hash"],
                method=(last["harness_hash"], last["contract_hash"], last["suite_version"], *base),
                place=(torch.get(last["environment"], "not known"),), repro=last["repro"],
            )
        )  # fmt: skip
    return points


def _steps(points: Sequence[CommitPoint]) -> list[Step]:
    logs = np.log([point.value for point in points])
    bounds = [0, *sorted(_splits(points, logs, 0, len(points))), len(points)]
    levels = [float(np.median(logs[a:b])) for a, b in pairwise(bounds)]
    steps = []
    for place, at in enumerate(bounds[1:-1]):
        before, after = math.exp(levels[place]), math.exp(levels[place + 1])
        steps.append(
            Step(at=at, before=before, after=after, kind=_kind(points[at - 1], points[at], after > before))
        )
    return steps


def _splits(points: Sequence[CommitPoint], logs: Any, start: int, end: int) -> list[int]:
    """Finds the place with the smallest spread around two medians, if the medians differ enough. Then it
    splits both sides again."""
    if end - start < 4:
        return []
    part = logs[start:end]
    places = range(2, len(part) - 1)
    spread = [_spread(part[:place]) + _spread(part[place:]) for place in places]
    at = places[int(np.argmin(spread))]
    left, right = part[:at], part[at:]
    apart = abs(float(np.median(right) - np.median(left)))
    # the noise comes from neighbours, so that other steps inside a side do not hide this one
    noise = _deviation(np.diff(part)) / math.sqrt(2)
    noise = max(noise, float(np.median([point.error for point in points[start:end]])))
    spread_of = (
        max(noise, _deviation(side - np.median(side)) if len(side) < 4 else 0) for side in (left, right)
    )
    sizes = (len(left), len(right))
    # a median has 1.25 times the standard error of a mean
    error = 1.25 * math.hypot(*(one / math.sqrt(n) for one, n in zip(spread_of, sizes, strict=True)))
    floor = float(np.median([point.floor for point in points[start:end]]))
    if apart <= math.log1p(max(DELTA, floor)) or apart <= STANDARD_ERRORS * error:
        return []
    middle = start + at
    return [*_splits(points, logs, start, middle), middle, *_splits(points, logs, middle, end)]


def _deviation(around_zero: Any) -> float:
    """Estimates the standard deviation in a way that ignores outliers."""
    return 1.48 * float(np.median(np.abs(around_zero)))


def _spread(part: Any) -> float:
    return float(np.abs(part - np.median(part)).sum())


def _kind(before: CommitPoint, after: CommitPoint, slower: bool) -> Kind:
    """The cause, as in compare.py: first the machine, then the method, then the code."""
    if before.place != after.place:
        return "other machine"
    if before.method != after.method:
        return "method change"
    if before.source == after.source:
        return "noise"
    return "regression" if slower else "improvement"

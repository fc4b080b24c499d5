"""Compares two results folders: what became faster, became slower, or stopped working from A to B.

Two records are compared only if they were measured in the same way (`LIKE` names what must agree). The two
runs were not interleaved, so their samples are not paired. There are two methods, and every row says which
one was used:

- "ratio to baseline": if both runs timed the same baseline code in the same rounds, their ratios to it are
  compared. A slower machine slows both, so its effect cancels.
- "times": otherwise the raw times are compared. They also contain changes of the machine between the two
  runs, which no statistic can tell from a change of the code. If runs differ by 2 % by chance (standard
  deviation, simulated, 40 rounds), this method alone calls 41 % of equal pairs different and the other method
  0.5 % (`measurements/bench/unpaired_runs.json`). So this method never calls unchanged code FASTER or SLOWER,
  and changed code only if it moved further than any unchanged code did.

The rule is the one of bench/verdict.py with tests for unpaired samples: a bootstrap interval of the ratio of
medians, the p-value of Mann-Whitney's test corrected for the number of rows, and the larger noise floor of
the two runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import CONFIDENCE, DELTA, DIGITS, MIN_ROUNDS, OPEN, RESAMPLES, Verdict
from moe_routing_bench.core.names import by_numbers, did_you_mean
from moe_routing_bench.results.folder import CellRun, Run, read_run, samples_of
from moe_routing_bench.results.read import LeftOut, command_of
from moe_routing_bench.results.record import Record
from moe_routing_bench.workloads.axes import Group, axes_of, names_of
from moe_routing_bench.workloads.experiment import Experiment

# axes that name a case or its routing: a worker that died early may not have reported the routing
NOT_A_PLACE = ("case", "workload", "seed")


@dataclass(frozen=True, kw_only=True)
class MeasuredOnce:
    """One implementation in the latest run of its cell."""

    run: Run
    cell: CellRun
    record: Record

    @property
    def passed(self) -> bool:
        return self.record.correctness.status is Status.PASSED

    @property
    def place(self) -> tuple[object, ...]:
        """Sizes and setting, without the routing, which a worker that died early may not have reported."""
        names = [name for name in names_of(Experiment, None, "row") if name not in NOT_A_PLACE]
        return (
            *(getattr(self.record.experiment, name) for name in names),
            *self.record.implementation.setting,
        )

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.place, self.cell.workload, self.record.implementation.label)

    @property
    def where(self) -> str:
        """expert_ffn seed-fused/32x7168 float32 zipf(1.2), and if not forward: expert_ffn train ..."""
        one = self.record.experiment
        span = one.span if one.direction == "forward" else f"{one.span} {one.direction}"
        spec, seed = self.cell.workload or ("routing unknown", 0)
        return f"{span} {one.case} {one.dtype} {spec}{f' seed {seed}' if seed else ''}"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.record.implementation.title}"


Agreement = tuple[str, Callable[[MeasuredOnce], str]]


def _agreeing(group: Group) -> dict[str, Agreement]:
    """Returns the axes of a group that must agree."""

    def value(name: str) -> Callable[[MeasuredOnce], str]:
        return lambda m: str(getattr(m.record.experiment, name)) or "none"

    return {
        one.name: (facts.plural, value(one.name))
        for one, facts in axes_of(Experiment, group)
        if facts.compare == "agree"
    }


# what must agree: its name for --allow, its name in sentences, and its value
LIKE: dict[str, Agreement] = {
    "machine": ("machines", lambda m: m.run.environment(m.record).machine),
    "torch": ("versions of torch", lambda m: m.run.environment(m.record).torch),
    "python": ("versions of Python", lambda m: m.run.environment(m.record).python),
    "settings": ("settings of the environment", lambda m: m.run.environment(m.record).settings),
    **_agreeing(""),
    "contract": ("contracts", lambda m: m.record.implementation.contract_hash[:12]),
    **_agreeing("what"),
    "routing": ("routed experts", lambda m: m.record.routing.checksum[:12] if m.record.routing else ""),
    **_agreeing("how"),
    "inputs": ("rules for fresh inputs", lambda m: m.record.protocol.fresh_inputs),
}


def latest(run: Run) -> list[MeasuredOnce]:
    """Returns the newest record of each implementation, passed or failed, without copies of baselines."""
    newest: dict[object, MeasuredOnce] = {}
    for cell in run.cells:
        for record in cell.records:
            if record.implementation.role in ("twin", "beside"):
                continue
            one = MeasuredOnce(run=run, cell=cell, record=record)
            key = (one.identity, _likeness(one))
            if key not in newest or _age(newest[key]) < _age(one):
                newest[key] = one
    return sorted(newest.values(), key=_age)


def _age(one: MeasuredOnce) -> tuple[object, str]:
    return one.record.created_at, one.record.record_id


def _likeness(one: MeasuredOnce) -> tuple[str, ...]:
    return tuple(value(one) for _, value in LIKE.values())


def question(one: MeasuredOnce) -> tuple[object, ...]:
    """Returns what a user asked for, without versions: two runs with other versions answer the same
    question."""
    versions = ("torch", "python", "settings", "contract", "routing")
    asked = tuple(value(one) for name, (_, value) in LIKE.items() if name not in versions)
    return (*one.identity, *asked)


def match(
    all_a: list[MeasuredOnce],
    all_b: list[MeasuredOnce],
    allow: Collection[str],
    apart: list[tuple[MeasuredOnce, MeasuredOnce]] | None = None,
) -> tuple[list[tuple[MeasuredOnce, MeasuredOnce]], list[str]]:
    """Returns pairs of records of A and B, and notes. Records that agree in everything are paired first, then
    those that differ only in what is allowed. Pairs that differ in anything else go to `apart`; without
    `apart` they raise a ValueError."""
    for name in allow:
        if name not in LIKE:
            raise ValueError(
                f"there is no dimension {name!r}; {did_you_mean(name, LIKE)}there are {', '.join(LIKE)}"
            )
    exact = {(a.identity, _likeness(a)): a for a in all_a}
    pairs, left_b = [], []
    for b in all_b:
        a = exact.pop((b.identity, _likeness(b)), None)
        if a is None:
            left_b.append(b)
        else:
            pairs.append((a, b))
    by_identity: dict[object, list[MeasuredOnce]] = {}
    for a in exact.values():
        by_identity.setdefault(a.identity, []).append(a)
    notes: dict[str, None] = {}
    failed_b = []
    for b in reversed(left_b):
        others = by_identity.get(b.identity, [])
        if not others:
            failed_b += [] if b.passed else [b]
            continue
        a = min(reversed(others), key=lambda one: len(differences(one, b)))
        differing = differences(a, b)
        refused = [name for name in differing if name not in allow]
        if refused and apart is not None:
            others.remove(a)
            apart.append((a, b))
            continue
        if refused:
            sentence = "; ".join(difference(name, a, b) for name in refused)
            options = " ".join(f"--allow {name}" for name in refused)
            raise ValueError(f"{sentence}; add {options} to compare all the same (seen at {b.name})")
        notes |= dict.fromkeys(f"compared all the same: {difference(name, a, b)}" for name in differing)
        others.remove(a)
        pairs.append((a, b))
    left_a = [a for others in by_identity.values() for a in others if a.passed]
    return pairs + _match_failed(left_a, failed_b), list(notes)


def _match_failed(
    left_a: list[MeasuredOnce], failed_b: list[MeasuredOnce]
) -> list[tuple[MeasuredOnce, MeasuredOnce]]:
    """Pairs failures by spec and place: a worker that died early may not have reported routing or label."""
    pairs = []
    for a in left_a:
        for b in failed_b:
            same_routing = b.cell.workload in (None, a.cell.workload)
            same_code = a.record.implementation.spec == b.record.implementation.spec
            if same_routing and same_code and a.place == b.place and not differences(a, b):
                pairs.append((a, b))
                failed_b.remove(b)
                break
    return pairs


def differences(a: MeasuredOnce, b: MeasuredOnce) -> list[str]:
    values = {name: (value(a), value(b)) for name, (_, value) in LIKE.items()}
    if a.record.routing is None or b.record.routing is None:
        del values["routing"]  # one worker died before it reported the routing
    return [name for name, (of_a, of_b) in values.items() if of_a != of_b]


def difference(name: str, a: MeasuredOnce, b: MeasuredOnce) -> str:
    """the machines differ: a is laptop, b is server"""
    words, value = LIKE[name]
    return f"the {words} differ: a is {value(a)}, b is {value(b)}"


Floats: TypeAlias = NDArray[np.float64]
Method: TypeAlias = Literal["ratio to baseline", "times"]
# noise: the source is the same in both runs, so the machine or called code caused the difference
Kind: TypeAlias = Literal[
    "regression", "improvement", "method change", "other machine", "noise", "not decided", "no change"
]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One implementation in both runs. ratio is its time in B divided by its time in A.

    Change(where="expert_ffn seed-fused/32x7168 float32 zipf(1.2)", implementation="staged", layout="compact",
           router="", layer="", title="staged | compact", ratio=1.05, interval=(1.035, 1.059),
           p_adjusted=9.7e-10, verdict="SLOWER", reason="...",
           method="ratio to baseline", same_code=False, kind="regression", ms=(10.1, 10.6),
           repro="mrb bench ...", ...)
    interval is None if there are too few samples. same_code: the source of the implementation has the same
    hash in both runs.
    """

    where: str
    implementation: str
    layout: str
    router: str
    layer: str
    title: str  # all four as one name
    ratio: float
    interval: tuple[float, float] | None
    p_value: float
    p_adjusted: float
    verdict: Verdict
    reason: str
    method: Method
    same_code: bool
    kind: Kind
    ms: tuple[float, float]  # medians in A and in B
    record_a: str
    record_b: str
    repro: str

    @property
    def confirmed(self) -> bool:
        return self.verdict in ("FASTER", "SLOWER")


@dataclass(frozen=True, kw_only=True)
class Apart:
    """An implementation that the two runs measured in different ways, so it has no ratio. A run in which it
    failed has no ms."""

    name: str
    differences: tuple[str, ...]
    ms_a: float | None
    ms_b: float | None


@dataclass(frozen=True, kw_only=True)
class Turned:
    """An implementation that passed in one run and failed in the other. status and reason describe the
    failure; repro is the command of B."""

    name: str
    status: str
    reason: str
    repro: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of two runs. `changes` is sorted by ratio. `broken` passed in A and failed in B; `fixed`
    is the reverse.

    apart: pairs that were measured in different ways, if the caller asked for them.
    only_a, only_b: names of implementations that passed in one run and were not run in the other.
    unreadable: sentences about samples that were changed after they were written.
    """

    changes: tuple[Change, ...]
    broken: tuple[Turned, ...]
    fixed: tuple[Turned, ...]
    apart: tuple[Apart, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unreadable: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: LeftOut

    def count(self, verdict: Verdict) -> int:
        return sum(change.verdict == verdict for change in self.changes)

    @property
    def geometric_mean(self) -> float | None:
        ratios = [change.ratio for change in self.changes]
        return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def compare_runs(
    folder_a: Path | str,
    folder_b: Path | str,
    *,
    allow: Collection[str] = (),
    delta: float = DELTA,
    keep_unlike: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunComparison:
    """Compares B with A. It raises a ValueError if the two runs measured something in different ways, unless
    `allow` names the difference or keep_unlike lists such pairs without a ratio.

    delta: the smallest difference that counts. on_progress gets (rows done, rows in all).
    """
    if not 0 < delta < math.inf:
        raise ValueError(f"the smallest difference that counts must be above zero, not {delta}")
    if Path(folder_a).resolve() == Path(folder_b).resolve():
        raise ValueError(f"{folder_a} would be compared with itself; name two results folders")
    left_out = LeftOut()
    runs = [read_run(folder, left_out) for folder in (folder_a, folder_b)]
    all_a, all_b = (latest(run) for run in runs)
    for run, measured in zip(runs, (all_a, all_b), strict=True):
        if not measured:
            raise ValueError(f"{run.folder} holds no records; mrb bench layer --out {run.folder} makes some")
    unlike: list[tuple[MeasuredOnce, MeasuredOnce]] = []
    pairs, notes = match(all_a, all_b, allow, unlike if keep_unlike else None)
    both = [(a, b) for a, b in pairs if a.passed and b.passed]
    matched = {question(one) for pair in (*pairs, *unlike) for one in pair}
    only_a, only_b = (
        tuple(sorted({m.name for m in measured if m.passed and question(m) not in matched}, key=by_numbers))
        for measured in (all_a, all_b)
    )
    if not any(a.passed or b.passed for a, b in (*pairs, *unlike)):
        raise ValueError(
            f"nothing that passed is in both folders: {folder_a} has {_some(only_a)}; "
            f"{folder_b} has {_some(only_b)}"
        )
    changes, unreadable = _changes(both, delta, on_progress)
    harness = {m.record.harness_hash for pair in both for m in pair}
    if len(harness) > 1:
        notes.append("the code that measures is not the same in all of these records")
    return RunComparison(
        changes=tuple(sorted(changes, key=lambda c: (c.ratio, by_numbers(c.where), c.title))),
        broken=tuple(_turned(b, b) for a, b in pairs if a.passed and not b.passed),
        fixed=tuple(_turned(a, b) for a, b in pairs if b.passed and not a.passed),
        apart=tuple(_apart(a, b) for a, b in unlike),
        only_a=only_a,
        only_b=only_b,
        unreadable=tuple(unreadable),
        notes=tuple(notes),
        left_out=left_out,
    )


def _turned(failed: MeasuredOnce, b: MeasuredOnce) -> Turned:
    why = failed.record.correctness
    return Turned(name=b.name, status=str(why.status), reason=why.reason, repro=command_of(b.record))


def _apart(a: MeasuredOnce, b: MeasuredOnce) -> Apart:
    said = tuple(difference(name, a, b) for name in differences(a, b))
    ms_a, ms_b = (None if one.record.timing is None else _ms(one) for one in (a, b))
    return Apart(name=b.name, differences=said, ms_a=ms_a, ms_b=ms_b)


def _ms(one: MeasuredOnce) -> float:
    assert one.record.timing is not None
    return 1e3 * one.record.timing.median


def _kind(a: MeasuredOnce, b: MeasuredOnce, verdict: Verdict, same_code: bool) -> Kind:
    """The first cause to think of. A change of the machine explains more than one of the method, and a change
    of the method explains more than one of the code."""
    if verdict not in ("FASTER", "SLOWER"):
        return "not decided" if verdict in OPEN else "no change"
    if set(differences(a, b)) & {"machine", "torch", "python", "settings", "device"}:
        return "other machine"
    if differences(a, b) or a.record.harness_hash != b.record.harness_hash:
        return "method change"
    if same_code:
        return "noise"
    return "regression" if verdict == "SLOWER" else "improvement"


def _some(names: tuple[str, ...]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] if names else "none"


def _changes(
    both: list[tuple[MeasuredOnce, MeasuredOnce]],
    delta: float,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[list[Change], list[str]]:
    from scipy import stats  # a second to import

    rows, unreadable = [], []
    moved = [_move(a, b) for a, b in both if _unchanged(a, b)]
    drift = max(moved, default=0.0)
    for number, (a, b) in enumerate(both):
        try:
            method, logs = _logs(a, b)
        except ValueError as error:
            unreadable.append(f"{b.name}: {error}")
            continue
        rows.append((a, b, method, logs, p_value_of(*logs), interval_of(*logs)))
        if on_progress is not None:
            on_progress(number + 1, len(both))
    adjusted = stats.false_discovery_control([row[4] for row in rows]).tolist() if rows else []
    changes = []
    for (a, b, method, (log_a, log_b), p, interval), q in zip(rows, adjusted, strict=True):
        centre = round(float(np.median(log_b) - np.median(log_a)), DIGITS)
        floor = max(a.cell.aa_floor, b.cell.aa_floor)
        by_times = method == "times"
        verdict, why = verdict_of(centre, interval, q, floor, delta, drift if by_times else 0.0)
        if by_times and not moved and verdict in ("FASTER", "SLOWER"):
            why += "; no unchanged code was timed in both runs, so the machine may be the cause"
        same_code = a.record.implementation.source_hash == b.record.implementation.source_hash
        if same_code and verdict in ("FASTER", "SLOWER"):
            why += "; its source is the same in both runs, so the machine or called code is the cause"
        ends = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
        changes.append(
            Change(
                where=b.where,
                implementation=b.record.implementation.label,
                layout=b.record.implementation.layout,
                router=b.record.implementation.router,
                layer=b.record.implementation.layer,
                title=b.record.implementation.title,
                ratio=math.exp(centre),
                interval=ends,
                p_value=p,
                p_adjusted=q,
                verdict=verdict,
                reason=why,
                method=method,
                same_code=same_code,
                kind=_kind(a, b, verdict, same_code),
                ms=(_ms(a), _ms(b)),
                record_a=a.record.record_id,
                record_b=b.record.record_id,
                repro=command_of(b.record),
            )
        )
    return changes, unreadable


def _unchanged(a: MeasuredOnce, b: MeasuredOnce) -> bool:
    same_source = a.record.implementation.source_hash == b.record.implementation.source_hash
    return same_source and not differences(a, b)


def _move(a: MeasuredOnce, b: MeasuredOnce) -> float:
    """Returns |log(time in B / time in A)|."""
    assert a.record.timing is not None and b.record.timing is not None  # both passed
    return abs(math.log(b.record.timing.median / a.record.timing.median))


def _logs(a: MeasuredOnce, b: MeasuredOnce) -> tuple[Method, tuple[Floats, Floats]]:
    base_a, base_b = a.cell.baseline_of(a.record), b.cell.baseline_of(b.record)
    if base_a is not None and base_b is not None and _same_code(base_a, base_b):
        return "ratio to baseline", (_log_ratio(a, base_a), _log_ratio(b, base_b))
    return "times", (np.log(_samples(a, a.record)), np.log(_samples(b, b.record)))


def _same_code(a: Record, b: Record) -> bool:
    one, other = a.implementation, b.implementation
    same_setting = a.implementation.setting == b.implementation.setting
    return (one.label, one.source_hash) == (other.label, other.source_hash) and same_setting


def _log_ratio(one: MeasuredOnce, base: Record) -> Floats:
    times, base_times = _samples(one, one.record), _samples(one, base)
    if len(times) > len(base_times):
        raise ValueError(f"it has {len(times)} samples and its baseline {len(base_times)}: no pairs")
    # a much slower implementation was timed in the first rounds only
    return np.log(times) - np.log(base_times[: len(times)])


def _samples(one: MeasuredOnce, record: Record) -> Floats:
    times = samples_of(one.run.folder, record)
    if not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"the samples of {record.record_id} are not all positive and finite")
    return times


def p_value_of(log_a: Floats, log_b: Floats) -> float:
    """Returns the p-value of a rank test on the logarithms of the times of two runs."""
    from scipy import stats  # a second to import

    return float(stats.mannwhitneyu(np.round(log_a, DIGITS), np.round(log_b, DIGITS), axis=None).pvalue)


def interval_of(log_a: Floats, log_b: Floats) -> tuple[float, float] | None:
    """Returns the bootstrap interval of the difference of the medians."""
    from scipy import stats  # a second to import

    if min(len(log_a), len(log_b)) < MIN_ROUNDS:
        return None
    interval = stats.bootstrap(
        (log_a, log_b), lambda a, b, axis: np.median(b, axis=axis) - np.median(a, axis=axis),
        n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return round(float(interval.low), DIGITS), round(float(interval.high), DIGITS)


def verdict_of(
    centre: float, interval: tuple[float, float] | None, q: float, floor: float, delta: float, drift: float
) -> tuple[Verdict, str]:
    """drift: the logarithm of the largest change of unchanged code. A change must be larger than it."""
    limit, counts, alpha = math.log1p(delta), math.log1p(max(delta, floor)) + drift, 1 - CONFIDENCE
    difference = f"a difference of more than {100 * math.expm1(counts):.1f} %"
    if interval is None:
        return "UNDECIDED", f"fewer than {MIN_ROUNDS} samples in one of the runs"
    low, high = interval
    if abs(centre) > counts:
        if (low > 0 or high < 0) and q <= alpha:
            return ("SLOWER" if centre > 0 else "FASTER"), f"{difference}, with p = {q:.2g}"
        cause = "the interval holds 1" if low <= 0 <= high else f"p = {q:.2g} is above {alpha:.2g}"
        return "UNDECIDED", f"perhaps {difference}, but {cause}"
    if floor > delta:
        return "UNDECIDED", f"two copies of the baseline differed by {100 * floor:.1f} % in one of the runs"
    if drift > limit:
        return "UNDECIDED", f"unchanged code moved by {100 * math.expm1(drift):.1f} % between the runs"
    if max(-low, high) <= limit:
        return "SAME", f"no difference of more than {100 * delta:.1f} %"
    return "UNDECIDED", f"the interval reaches past {100 * delta:.1f} %; measure both with more rounds"

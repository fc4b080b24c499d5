"""Compares the implementations of one cell with its winner, and computes the cost of one choice for many
cells.

All implementations of a cell were timed in the same rounds, so the winner has the smallest ratio to the
baseline of the cell. An implementation ties with the winner if its paired samples do not show that it is
slower. A comparison takes about a millisecond, so 10^5 records in cells of five take half a minute.

`mrb results` and `mrb tune decide` use the same words for the lead of a winner.

A verdict is made once, when the cell is measured. It includes the correction for the comparisons of the cell
and, for code from outside, the baseline in another process. This file only reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.bench.verdict import (
    DELTA,
    MIN_ROUNDS,
    Comparison,
    Regret,
    Verdict,
    compare_cells,
    regret,
)
from moe_routing_bench.ops.decisions import load_of
from moe_routing_bench.results.folder import CellRun, Run, samples_of
from moe_routing_bench.results.record import Record
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The implementations of one cell in one layout, by name: the ratio of each to the baseline of the cell,
    and its comparison with the winner.

    Contest(T=16, winner="staged", ratios={"staged": 0.81, "eager_loop": 0.82}, ...)
    """

    T: int
    case: str
    load: str  # of the experts, one of ops.decisions.LOADS
    winner: str
    ratios: dict[str, float]
    against_winner: dict[str, Comparison]
    against_baseline: dict[str, Comparison]  # as the cell compared them; the baseline itself is not in it

    @property
    def chosen(self) -> str:
        """The fastest of those that are shown to be faster than the baseline; if none is, the baseline."""
        faster = [name for name, one in self.against_baseline.items() if one.verdict == "FASTER"]
        others = [name for name in self.ratios if name not in self.against_baseline]  # the baseline
        return min([*faster, *others], key=lambda name: self.ratios[name], default=self.winner)

    @property
    def ties(self) -> tuple[str, ...]:
        """The implementations that are not shown to be slower than the winner, the fastest first."""
        names = [name for name, one in self.against_winner.items() if one.verdict != "SLOWER"]
        return tuple(sorted(names, key=lambda name: self.ratios[name]))

    @property
    def second(self) -> str | None:
        """The fastest implementation after the winner. None if there is no other."""
        return min(self.against_winner, key=lambda name: self.ratios[name], default=None)

    @property
    def lead(self) -> Comparison:
        """The comparison of the second with the winner. Its ratio says how many times faster the winner
        is."""
        assert self.second is not None
        return self.against_winner[self.second]

    @property
    def certain(self) -> str:
        """Says "yes" if the winner is faster than every other, or why that is not certain."""
        return CERTAIN[self.against_winner[self.ties[0]].verdict] if self.ties else "yes"


@dataclass(frozen=True, kw_only=True)
class Contested:
    """The implementations of a contest by name, before the winner is known."""

    cell: CellRun
    records: dict[str, Record]
    times: dict[str, NDArray[np.float64]]  # raw samples, paired by round; slow ones have fewer
    ratios: dict[str, float]


def contested(run: Run, cell: CellRun, records: dict[str, Record]) -> Contested:
    """Prepares the passed records of one cell. It raises a ValueError if samples cannot be read or paired."""
    try:
        times = {name: samples_of(run.folder, record) for name, record in records.items()}
    except ValueError as error:
        raise ValueError(f"cell not used: {error}") from None
    if min(map(len, times.values())) < MIN_ROUNDS:
        raise ValueError(f"cells not used: fewer than {MIN_ROUNDS} rounds")
    if not all((np.isfinite(samples) & (samples > 0)).all() for samples in times.values()):
        raise ValueError("cells not used: samples that are not positive and finite")
    # if no baseline passed, the times are compared; they come from the same rounds too
    baselines = [r for r in cell.records if r.implementation.role == "baseline" and r.timing is not None]
    unit = baselines[0].timing.median if baselines and baselines[0].timing else 1.0
    ratios = {}
    for name, record in records.items():
        assert record.timing is not None  # it passed
        comparison = record.comparison
        ratios[name] = comparison.ratio if comparison is not None else record.timing.median / unit
    return Contested(cell=cell, records=records, times=times, ratios=ratios)


def contests(fields: Sequence[Contested]) -> list[Contest]:
    """Decides each contest. Comparisons that the cell made are read from its records. The other comparisons
    with winners are made here and corrected for their number."""
    winners = [min(field.ratios, key=lambda name: (field.ratios[name], name)) for field in fields]
    against = [recorded(winner, field.records) for field, winner in zip(fields, winners, strict=True)]
    asked = [
        (number, name)
        for number, (field, winner) in enumerate(zip(fields, winners, strict=True))
        for name in field.ratios
        if name != winner and name not in against[number]
    ]
    compared = compare_cells(
        [_paired(fields[number].times, winners[number], name) for number, name in asked],
        aa_floor=[fields[number].cell.aa_floor for number, _ in asked],
    )
    for (number, name), comparison in zip(asked, compared, strict=True):
        against[number][name] = comparison
    listed = []
    for field, winner, others in zip(fields, winners, against, strict=True):
        one = field.records[winner].experiment
        ratios = {winner: field.ratios[winner], **field.ratios}  # of equal ratios `regret` takes the first
        paired = {
            name: _comparison(record, flipped=False)
            for name, record in field.records.items()
            if record.comparison
        }
        listed.append(
            Contest(
                T=one.T, case=one.case, load=_load(field.records[winner]), winner=winner, ratios=ratios,
                against_winner=others,
                against_baseline={name: found for name, found in paired.items() if found is not None},
            )
        )  # fmt: skip
    return listed


def _load(record: Record) -> str:
    assert record.routing is not None  # it passed
    pairs, experts = record.experiment.T * record.experiment.K, max(record.experiment.E, 1)
    return load_of(record.routing.max_over_mean * pairs / experts, pairs, experts)


def _paired(times: dict[str, NDArray[np.float64]], a: str, b: str) -> tuple[Any, Any]:
    """Returns the samples of the rounds in which both were timed."""
    rounds = min(len(times[a]), len(times[b]))
    return times[a][:rounds], times[b][:rounds]


def regrets(cells: Mapping[str, Contest]) -> list[Regret]:
    """Returns the regret of each choice, the best first. Choices that lack fewer times come before others."""
    rows = regret(
        {cell: contest.ratios for cell, contest in cells.items()},
        {cell: contest.against_winner for cell, contest in cells.items()},
    )
    return sorted(rows, key=lambda row: (row.worst_loss, len(row.missing), row.median_loss))


CERTAIN: dict[Verdict, str] = {
    "SLOWER": "yes", "SAME": "no, the same time", "FASTER": "no, too close", "UNDECIDED": "no, too close",
    "TOO_FEW_ROUNDS": "no, too few rounds",
}  # fmt: skip
OPPOSITE: dict[Verdict, Verdict] = {"FASTER": "SLOWER", "SLOWER": "FASTER"}


def recorded(winner: str, records: Mapping[str, Record]) -> dict[str, Comparison]:
    """Returns the recorded comparisons between the winner and other implementations of its cell."""
    comparisons = {name: _recorded(records[winner], one) for name, one in records.items() if name != winner}
    return {name: one for name, one in comparisons.items() if one is not None}


def _recorded(a: Record, b: Record) -> Comparison | None:
    """Returns the comparison of b with a, if one of them was the baseline of the other."""
    if a.implementation.role == "baseline" and b.comparison is not None:
        return _comparison(b, flipped=False)
    if b.implementation.role == "baseline" and a.comparison is not None:
        return _comparison(a, flipped=True)
    return None


def _comparison(record: Record, *, flipped: bool) -> Comparison | None:
    kept = record.comparison
    assert kept is not None and record.timing is not None
    ratio, low, high, verdict = kept.ratio, kept.low, kept.high, kept.verdict
    if not 0 < low <= ratio <= high:
        return None  # our code does not write such a record
    if flipped:
        ratio, low, high = 1 / ratio, 1 / high, 1 / low
        verdict = OPPOSITE.get(verdict, verdict)
    return Comparison(
        ratio=ratio,
        interval=(low, high),
        p_value=kept.p_adjusted,
        p_adjusted=kept.p_adjusted,
        rounds=record.timing.samples.count,
        verdict=verdict,
        reason=kept.reason,
        more_rounds=kept.more_rounds,
        aa_floor=kept.aa_floor,
    )


# columns of `records`; the implementation, its layout, router and layer are not part of the case
SAME_CASE = (
    *(facts.column or one.name for one, facts in axes_of(Experiment) if facts.compare != "free"),
    "machine",
)


def in_sql(columns: Sequence[str] = SAME_CASE) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def told_apart(
    rows: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], Hashable]
) -> list[str]:
    """Returns what to add to the label of each row, such as " bias=True", if another case has the same
    label."""
    alike: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(label(row), []).append(place)
    more = [""] * len(rows)
    for places in alike.values():
        for name in SAME_CASE:
            if len({rows[place][name] for place in places}) > 1:
                for place in places:
                    more[place] += f" {name}={rows[place][name]}"
    return more


# The SQL behind `mrb results`: the fastest implementation of each case, its lead, and how certain that is.
# The lead is the ratio of the second divided by the ratio of the winner. If one of the two is the baseline,
# the lead has the recorded interval. Otherwise the interval is made from both intervals, which is wider than
# an interval from the paired samples.
SAME = f"router, layer, {in_sql()}"
SURE = "\n    ".join(f"WHEN '{verdict}' THEN '{said}'" for verdict, said in CERTAIN.items())
# It reads the newest run of every case under the same conditions. An implementation that drops pairs does
# less work, so it cannot win where another one drops none.
BEST = f"""
WITH passed AS (
  SELECT *, max(created_at) OVER (PARTITION BY {SAME}, session, cell_key) AS run_at
  FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate') AND {{condition}}
), newest AS (
  SELECT *, coalesce(dropped_pairs, 0) > 0 AS drops FROM passed
  QUALIFY dense_rank() OVER (PARTITION BY {SAME} ORDER BY run_at DESC, session DESC, cell_key) = 1
), whole AS (
  SELECT * FROM newest QUALIFY NOT drops OR bool_and(drops) OVER (PARTITION BY {SAME})
), ranked AS (
  SELECT *, count(*) OVER (PARTITION BY {SAME}) AS implementations, row_number() OVER fastest AS place,
    lead(impl) OVER fastest AS next, lead(layout) OVER fastest AS next_layout,
    lead(role) OVER fastest AS next_role, lead(verdict) OVER fastest AS next_verdict,
    lead(coalesce(ratio, 1)) OVER fastest / coalesce(ratio, 1) AS lead,
    lead(coalesce(ratio_low, 1)) OVER fastest / coalesce(ratio_high, 1) AS lead_low,
    lead(coalesce(ratio_high, 1)) OVER fastest / coalesce(ratio_low, 1) AS lead_high
  FROM whole
  WINDOW fastest AS (PARTITION BY {SAME} ORDER BY coalesce(ratio, 1), impl, layout)
)
SELECT {SAME}, impl AS best, layout,
  median_ms, error, tokens_per_second, coalesce(ratio, 1) AS ratio, coalesce(baseline, 'itself') AS baseline,
  coalesce(verdict, '') AS verdict, implementations, next, next_layout, lead, lead_low, lead_high,
  stage_seconds,
  CASE CASE
      WHEN next IS NULL THEN ''
      WHEN role = 'baseline' THEN next_verdict
      WHEN next_role = 'baseline' THEN if(verdict = 'FASTER', 'SLOWER', verdict)
      WHEN lead_low > {1 + DELTA} THEN 'SLOWER'
      ELSE 'UNDECIDED' END
    {SURE}
    ELSE '' END AS certain
FROM ranked WHERE place = 1
ORDER BY span, direction, split_part("case", '/', 1), E, D, F, K, T, "case", dtype, store, workload, threads
"""

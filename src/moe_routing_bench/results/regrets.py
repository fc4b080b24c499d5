"""The regret of impl="auto" in the records of the suite `regret`: its time divided by the fastest time.

In each cell the pick of "auto" is the baseline, and the others were timed in the same rounds. Forward experts
count twice: unfrozen experts are compared with all that read unfrozen weights, and frozen experts with all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_routing_bench.bench.status import Status
from moe_routing_bench.results.folder import CellRun, Run, read_run
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.winners import Contest, Contested, contested, contests

SUITE = "regret"
TRANSFORMERS = "hf_"
NOTABLE = 1.05


@dataclass(frozen=True, kw_only=True)
class CellRegret:
    """The regret in one cell: CellRegret(group="topk float32", record=<of the pick>, picked="sort",
    contest=...)"""

    group: str
    record: Record
    picked: str
    contest: Contest
    duel: Contest | None  # of the pick and the best Transformers experts alone

    @property
    def regret(self) -> float:
        return self.contest.ratios[self.picked] / self.contest.ratios[self.contest.winner]

    @property
    def shown(self) -> bool:
        """Is "auto" slower than the fastest by more than the noise?"""
        others = self.contest.against_winner
        return self.picked in others and others[self.picked].verdict == "SLOWER"

    @property
    def transformers(self) -> float | None:
        """The time of "auto" divided by the time of the best Transformers experts; above 1 Transformers is
        faster."""
        if self.duel is None:
            return None
        (other,) = self.duel.ratios.keys() - {self.picked}
        return self.duel.ratios[self.picked] / self.duel.ratios[other]

    @property
    def loses(self) -> bool:
        """Are the best Transformers experts faster by more than the noise?"""
        lost = None if self.duel is None else self.duel.against_winner.get(self.picked)
        return lost is not None and lost.verdict == "SLOWER"


@dataclass(frozen=True, kw_only=True)
class GroupRegret:
    """A line of the table: GroupRegret(group="topk float32", cells=16, median=1.0, p95=1.04, worst=1.07, ...)

    over: cells above 1.05. undecided: how many of these are within the noise.
    slower_than_transformers: cells in which the best Transformers experts took less time.
    slower_undecided: how many of these are within the noise.
    """

    group: str
    cells: int
    median: float
    p95: float
    worst: float
    worst_cell: str
    over: int
    undecided: int
    slower_than_transformers: int
    slower_undecided: int


@dataclass(frozen=True, kw_only=True)
class Regrets:
    cells: tuple[CellRegret, ...]
    groups: tuple[GroupRegret, ...]  # the last is for all cells
    without: tuple[str, ...]  # cells in which "auto" or all others lack a time or have too few rounds
    left_out: LeftOut


def read_regrets(folder: Path | str) -> Regrets:
    """Reads the regrets of a folder. It raises a ValueError if no cell of the suite has a time of "auto"."""
    left_out = LeftOut()
    run = read_run(folder, left_out)
    fields: list[tuple[str, Record, str, Contested]] = []
    without = []
    for cell in _newest(run):
        try:
            fields += _questions(run, cell)
        except ValueError as reason:
            without.append(f"{cell.records[0].experiment.case}: {reason}")
    if not fields:
        hint = f": {without[0]}" if without else f"; measure it: mrb sweep {SUITE} --out {folder}"
        raise ValueError(f"{folder} has no time of auto in the suite {SUITE}{hint}")
    decided = contests([field for *_, field in fields])
    pairs = [_pair(picked, field) for *_, picked, field in fields]
    duels = iter(contests([pair for pair in pairs if pair is not None]))
    cells = tuple(
        CellRegret(
            group=group,
            record=record,
            picked=picked,
            contest=contest,
            duel=None if pair is None else next(duels),
        )
        for (group, record, picked, _), contest, pair in zip(fields, decided, pairs, strict=True)
    )
    return Regrets(cells=cells, groups=tuple(_grouped(cells)), without=tuple(without), left_out=left_out)


def summed(group: str, cells: Sequence[CellRegret]) -> GroupRegret:
    worst = max(cells, key=lambda one: one.regret)
    over = [one for one in cells if one.regret > NOTABLE]
    slower = [one for one in cells if (one.transformers or 0) > 1]
    return GroupRegret(
        group=group,
        cells=len(cells),
        median=float(np.median([one.regret for one in cells])),
        p95=float(np.quantile([one.regret for one in cells], 0.95, method="higher")),
        worst=worst.regret,
        worst_cell=worst.record.experiment.case,
        over=len(over),
        undecided=sum(not one.shown for one in over),
        slower_than_transformers=len(slower),
        slower_undecided=sum(not one.loses for one in slower),
    )


def _pair(picked: str, field: Contested) -> Contested | None:
    """The pick and the best Transformers experts of a cell."""
    theirs = [name for name in field.ratios if name.startswith(TRANSFORMERS)]
    if not theirs:
        return None
    both = (picked, min(theirs, key=lambda name: field.ratios[name]))
    return replace(
        field,
        records={name: field.records[name] for name in both},
        times={name: field.times[name] for name in both},
        ratios={name: field.ratios[name] for name in both},
    )


def _grouped(cells: tuple[CellRegret, ...]) -> Iterable[GroupRegret]:
    for group in sorted({one.group for one in cells}):
        yield summed(group, [one for one in cells if one.group == group])
    yield summed("all", cells)


def _newest(run: Run) -> list[CellRun]:
    """Returns the newest cell of each case, because preferences may have changed since an older one."""
    newest: dict[tuple[object, ...], CellRun] = {}
    for cell in sorted(run.cells, key=lambda cell: max(r.created_at for r in cell.records)):
        one = cell.records[0]
        if one.experiment.case.startswith(f"{SUITE}/"):
            newest[one.experiment.case, cell.workload, one.experiment.threads, one.experiment.direction] = (
                cell
            )
    return list(newest.values())


def _questions(run: Run, cell: CellRun) -> list[tuple[str, Record, str, Contested]]:
    records = {
        r.implementation.label: r
        for r in cell.records
        if r.correctness.status is Status.PASSED and r.implementation.role in ("baseline", "candidate")
    }
    auto = next((r for r in cell.records if r.implementation.role == "baseline"), None)
    plain = {name: r for name, r in records.items() if not r.implementation.frozen}
    if auto is None or auto.implementation.label not in plain:  # another one may be the baseline instead
        raise ValueError("the pick of auto has no time")
    frozen = [name for name, r in records.items() if r.implementation.frozen]
    group = f"{auto.experiment.span} {auto.experiment.dtype}"
    group += "" if auto.experiment.direction == "forward" else f" {auto.experiment.direction}"
    asked = [(f"{group} unfrozen" if frozen else group, auto.implementation.label, plain)]
    asked += [(f"{group} frozen", name, records) for name in frozen]
    if len(plain) < 2:
        raise ValueError("nothing else has a time")
    return [(name, those[picked], picked, contested(run, cell, those)) for name, picked, those in asked]

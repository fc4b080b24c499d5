"""The rows of `mrb check`: what is chosen, and its cases run; code from outside in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moe_routing_bench.cli.apart import ApartError, Shown, answers
from moe_routing_bench.cli.describing import OpRow, described
from moe_routing_bench.cli.finding import ROUTERS, Outside, OutsideFile, routers_found
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import Outcome, cells_of, check, matches
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.names import did_you_mean, one_of
from moe_routing_bench.ops.catalog import Entry, find_all
from moe_routing_bench.ops.registry import BUILT_IN, all_ops, get_op

NO_DTYPE = "any"


class CaseOutcome(BaseModel):
    """One case of one implementation. Code from outside says `begun` first, so that we know where it died."""

    model_config = ConfigDict(extra="forbid")
    case: Shown
    layout: Shown
    dtype: Shown
    status: Literal["begun", "passed", "failed", "unsupported"]
    sentences: list[Shown] = []
    could_say_invariant: bool | None = None


class SpecFound(BaseModel):
    """One implementation in a file from outside, or one configuration of it. reason: why it is broken."""

    model_config = ConfigDict(extra="forbid")
    spec: Shown
    reason: Shown | None
    cells: int


class RouterChecked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sentences: list[Shown]


@dataclass(kw_only=True)
class Row:
    """One implementation or router: a line of the table. Counts are by dtype; routers count as NO_DTYPE."""

    op: str
    spec: str
    origin: str = BUILT_IN
    broken: bool = False
    cells: list[KitCell] = field(default_factory=list)
    outside: Outside | None = None  # if set, it is run in a process of its own
    count: int = 1  # of cases, for the bar
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    could_say: list[bool] = field(default_factory=list)  # see Outcome.could_say_invariant

    @property
    def ran(self) -> bool:
        return bool(self.passed or self.failed) and not self.broken

    @property
    def verdict(self) -> str:
        if self.broken:
            return "broken"
        return "failed" if self.failed else "passed" if self.passed else "not supported"

    @property
    def note(self) -> str | None:
        if self.could_say and all(self.could_say) and not self.failed:
            return "its bits did not depend on the batch in any case; it may say BATCH_INVARIANT = True"
        return None

    def take(self, case: CaseOutcome) -> None:
        getattr(self, case.status)[case.dtype] += 1
        if case.could_say_invariant is not None:
            self.could_say.append(case.could_say_invariant)
        if case.status == "unsupported":
            self.reasons.update(case.sentences)
        where = {"case": case.case, "layout": case.layout, "dtype": case.dtype}
        for sentence in case.sentences if case.status == "failed" else ():
            self.failures.append({**where, "sentence": sentence})

    def take_sentences(self, sentences: list[str]) -> None:
        (self.failed if sentences else self.passed)[NO_DTYPE] += 1
        self.failures += [{"case": "", "layout": "", "dtype": "", "sentence": text} for text in sentences]


def select(
    op_pattern: str, impl_pattern: str, dtypes: tuple[str, ...], device: str, outside: Outside
) -> tuple[list[str], list[Row]]:
    """The ops of which something must run, and the rows to check. ValueError if there is nothing."""
    ops = [op for op in all_ops().values() if fnmatchcase(op.name, op_pattern)]
    new = [file for file in outside.ops if fnmatchcase(file.op, op_pattern)]
    routers = [*routers_found()] if fnmatchcase(ROUTERS, op_pattern) else []
    if not ops and not routers and not new:
        one_of("op", op_pattern, [*all_ops(), *(file.op for file in outside.ops), ROUTERS])
    everything = [(op.name, entry) for op in ops for entry in find_all(op, configs=True)]
    names = [entry.spec for _, entry in everything] + routers
    chosen = [(op_name, entry) for op_name, entry in everything if matches(entry.spec, impl_pattern)]
    rows = [_row(op_name, entry, dtypes, device) for op_name, entry in chosen]
    rows += [Row(op=ROUTERS, spec=name) for name in routers if fnmatchcase(name, impl_pattern)]
    broken = [row for file in new if (row := _whats_broken(file, outside)) is not None]
    for file in outside.of(op_pattern):
        names.append(file.name)
        # only its own options could match a pattern that its name does not
        if file.op not in {row.op for row in broken} and (
            fnmatchcase(file.name, impl_pattern) or "(" in impl_pattern
        ):
            rows += _rows_outside(file, impl_pattern, dtypes, device, outside)
    rows += broken
    if not rows:
        where = "" if op_pattern == "*" else f" of {op_pattern}"
        hint = did_you_mean(impl_pattern, names) or "see `mrb list`"
        raise ValueError(
            f"nothing to check: no implementation{where} is called {impl_pattern!r}; {hint}".rstrip()
        )
    rows.sort(key=lambda row: row.op == ROUTERS)
    # a full run must not skip an op that has no implementation at all
    everywhere = [*(op.name for op in ops), *(file.op for file in new)]
    wanted = everywhere if impl_pattern == "*" else [row.op for row in rows]
    return list(dict.fromkeys(wanted)), rows


def never_ran(ops: list[str], rows: list[Row]) -> list[str]:
    """Of what nothing ran: operations, and implementations from outside. Who includes a folder asks about all
    of it, while built-in implementations may need what this machine lacks."""
    ran = {row.op for row in rows if row.ran}
    asked = {_name(row) for row in rows if row.outside is not None and not row.broken and row.op in ran}
    return [op for op in ops if op not in ran] + sorted(asked - {_name(row) for row in rows if row.ran})


def _name(row: Row) -> str:
    """Without options: some configurations may be for another machine."""
    return f"{row.op}.{row.spec.partition('(')[0]}"


def _row(op: str, entry: Entry, dtypes: tuple[str, ...], device: str) -> Row:
    row = Row(op=op, spec=entry.spec, origin=entry.origin, broken=entry.state == "broken")
    if row.broken:
        row.take_sentences([entry.reason])
        return row
    row.cells = cells_of(op, entry.spec, dtypes, device)
    row.count = max(1, len(row.cells))
    return row


def _whats_broken(file: OutsideFile, outside: Outside) -> Row | None:
    """The row of a new operation whose op.py cannot be loaded; None if it can."""
    described_op = described(file, outside, OpRow)
    if described_op["state"] == "ready":
        return None
    row = Row(op=file.op, spec="op.py", origin=file.origin, broken=True)
    row.take_sentences([described_op["reason"]])
    return row


def _rows_outside(
    file: OutsideFile, impl_pattern: str, dtypes: tuple[str, ...], device: str, outside: Outside
) -> list[Row]:
    if file.op == ROUTERS:
        return [Row(op=ROUTERS, spec=file.name, origin=file.origin, outside=outside)]
    rows, asked = [], (file.op, file.origin, dtypes, device)
    try:
        for one in answers(specs_in, *asked, include=outside.folders, answer=SpecFound):
            if matches(one.spec, impl_pattern):
                row = Row(op=file.op, spec=one.spec, origin=file.origin, outside=outside, count=one.cells)
                row.broken = one.reason is not None
                if one.reason is not None:
                    row.take_sentences([one.reason])
                rows.append(row)
    except (ApartError, ValueError) as reason:
        rows = [Row(op=file.op, spec=file.name, origin=file.origin, broken=True)]
        rows[0].take_sentences([str(reason)])
    return rows


def specs_in(op: str, origin: str, dtypes: tuple[str, ...], device: str) -> Iterator[dict[str, Any]]:
    """Runs where a file from outside is loaded: its implementation, and its configurations."""
    for entry in find_all(get_op(op), configs=True, only=origin):
        cells = len(cells_of(op, entry.spec, dtypes, device))
        yield {
            "spec": entry.spec,
            "reason": entry.reason if entry.state == "broken" else None,
            "cells": cells,
        }


def checked_cells(op: str, spec: str, dtypes: tuple[str, ...], device: str) -> Iterator[dict[str, Any]]:
    """Runs where a file from outside is loaded."""
    for cell in cells_of(op, spec, dtypes, device):
        where = {"case": cell.case.name, "layout": cell.layout, "dtype": cell.dtype}
        yield {**where, "status": "begun"}
        yield _case_outcome(check(cell)).model_dump()


def checked_router(name: str) -> Iterator[dict[str, Any]]:
    """Runs where a file from outside is loaded."""
    yield {"sentences": [sentence[:4_000] for sentence in check_router(name)]}


def _case_outcome(outcome: Outcome) -> CaseOutcome:
    cell, sentences = outcome.cell, [sentence[:4_000] for sentence in outcome.sentences]
    return CaseOutcome(
        case=cell.case.name,
        layout=cell.layout,
        dtype=cell.dtype,
        status=outcome.status,
        sentences=sentences,
        could_say_invariant=outcome.could_say_invariant,
    )


def run_row(row: Row, dtypes: tuple[str, ...], device: str, advance: Callable[[str], None]) -> None:
    label = f"{row.op}.{row.spec}"
    if row.outside is not None and not row.broken:
        _run_apart(row, row.outside, dtypes, device, lambda: advance(label))
        return
    if row.op == ROUTERS:
        row.take_sentences(check_router(row.spec))
    if not row.cells:
        advance(label)
    for cell in row.cells:
        advance(label)
        row.take(_case_outcome(check(cell)))


def _run_apart(
    row: Row, outside: Outside, dtypes: tuple[str, ...], device: str, advance: Callable[[], None]
) -> None:
    """What dies or hangs has failed the case it had begun; the rest of its cases are not run."""
    begun: CaseOutcome | None = None
    try:
        if row.op == ROUTERS:
            for checked in answers(checked_router, row.spec, include=outside.folders, answer=RouterChecked):
                row.take_sentences(checked.sentences)
                advance()
            return
        asked = (row.op, row.spec, dtypes, device)
        for case in answers(checked_cells, *asked, include=outside.folders, answer=CaseOutcome):
            if case.status == "begun":
                begun = case
                advance()
            else:
                row.take(case)
                begun = None
    except (ApartError, ValueError) as reason:
        if begun is None:
            row.take_sentences([str(reason)])
        else:
            row.take(begun.model_copy(update={"status": "failed", "sentences": [str(reason)]}))

"""The rows of `mrb check`: what is chosen, and its cases run; code from outside in a process of its own.

The map of `mrb check --tokens 1-512`: for how many tokens is an implementation right?

A kernel may be wrong for a few numbers of tokens alone: where another tile, another branch or another table
begins. Every number is tried with the kit's plain case, in every dtype and layout that it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field

from moe_routing_bench.conformance.cases import CASES, KitCell, layouts_for
from moe_routing_bench.conformance.check import Outcome, cells_of, check, matches
from moe_routing_bench.conformance.describe import OpRow, described
from moe_routing_bench.conformance.outside import (
    ROUTERS,
    Answer,
    IsolatedError,
    Outside,
    OutsideFile,
    Shown,
    answers,
)
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.core.names import (
    MistakeError,
    base_name,
    did_you_mean,
    no_such,
    option_numbers,
)
from moe_routing_bench.ops.catalog import Listing, find_all
from moe_routing_bench.ops.registry import BUILT_IN, all_ops, get_op
from moe_routing_bench.routers.router import router_names

NO_DTYPE = "any"


class CaseOutcome(Answer):
    """One case of one implementation. Code from outside says `begun` first, so that we know where it died."""

    case: Shown
    layout: Shown
    dtype: Shown
    status: Literal["begun", "passed", "failed", "unsupported"]
    sentences: list[Shown] = Field(default_factory=list)
    could_say_invariant: bool | None = None


class SpecFound(Answer):
    """One implementation in a file from outside, or one configuration of it. reason: why it is broken."""

    spec: Shown
    reason: Shown | None
    cells: int


class RouterChecked(Answer):
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
    """The ops of which something must run, and the rows to check. MistakeError if there is nothing."""
    ops = [op for op in all_ops().values() if fnmatchcase(op.name, op_pattern)]
    new = [file for file in outside.ops if fnmatchcase(file.op, op_pattern)]
    routers = router_names() if fnmatchcase(ROUTERS, op_pattern) else []
    if not ops and not routers and not new:
        known = [*all_ops(), *(file.op for file in outside.ops), ROUTERS]
        raise MistakeError(str(no_such("op", op_pattern, known)))
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
        raise MistakeError(
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


def _row(op: str, entry: Listing, dtypes: tuple[str, ...], device: str) -> Row:
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
    except (IsolatedError, ValueError) as reason:
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
        _run_isolated(row, row.outside, dtypes, device, lambda: advance(label))
        return
    if row.op == ROUTERS:
        row.take_sentences(check_router(row.spec))
    if not row.cells:
        advance(label)
    for cell in row.cells:
        advance(label)
        row.take(_case_outcome(check(cell)))


def _run_isolated(
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
    except (IsolatedError, ValueError) as reason:
        if begun is None:
            row.take_sentences([str(reason)])
        else:
            row.take(begun.model_copy(update={"status": "failed", "sentences": [str(reason)]}))


MAX_TOKENS = 65_536
PER_LINE = 64
MARKS = {"passed": ".", "failed": "X", "unsupported": "-"}
LAYOUT_OF = {"padded": "padded(capacity_factor=8)", "compact": "compact", "block": "block(16)"}


class TokensOutcome(Answer):
    """All dtypes and layouts at one number of tokens. `begun` comes first, to know where code died."""

    T: int
    status: Literal["begun", "passed", "failed", "unsupported"]
    sentence: Shown = ""


@dataclass
class TokenMap:
    """A row of the table by number of tokens: {1: "passed", 2: "failed", ...}, and what is wrong."""

    op: str
    spec: str
    status: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return any(status != "unsupported" for status in self.status.values())

    def lines(self) -> Iterator[str]:
        """At most 80 letters each: 64 numbers of tokens, the first of them in front."""
        tokens = sorted(self.status)
        for start in range(0, len(tokens), PER_LINE):
            some = tokens[start : start + PER_LINE]
            yield f"  {some[0]:>6}  " + "".join(MARKS[self.status[T]] for T in some)


def parse_tokens(text: str) -> list[int]:
    return sorted(set(option_numbers("tokens", text, "1-512 or 1-64,100", MAX_TOKENS)))


def checked_tokens(
    op: str, spec: str, dtypes: tuple[str, ...], device: str, tokens: list[int]
) -> Iterator[dict[str, Any]]:
    """Runs where the implementation is loaded, which may be a process of its own."""
    plain = CASES[0]
    for T in tokens:
        yield {"T": T, "status": "begun"}
        seen, sentence = set(), ""
        for layout in layouts_for(get_op(op), plain):
            layout = LAYOUT_OF.get(base_name(layout), layout)
            for dtype in dtypes:
                case = replace(plain, name=f"plain at T={T}", T=T)
                cell = KitCell(op=op, spec=spec, case=case, layout=layout, dtype=dtype, device=device)
                outcome = check(cell)
                seen.add(outcome.status)
                if outcome.status == "failed" and not sentence:
                    sentence = f"{dtype}, {layout}: {outcome.sentences[0]}"[:2_000]
        status = next(one for one in ("failed", "passed", "unsupported") if one in seen)
        yield {"T": T, "status": status, "sentence": sentence}


def token_map(row: Row, dtypes: tuple[str, ...], device: str, tokens: list[int]) -> TokenMap:
    """What dies or hangs is wrong at the number it had begun, and the rest is not known."""
    result, asked = TokenMap(row.op, row.spec), (row.op, row.spec, dtypes, device, tokens)
    begun = tokens[0]
    try:
        source: Any = (
            map(TokensOutcome.model_validate, checked_tokens(*asked))
            if row.outside is None
            else answers(checked_tokens, *asked, include=row.outside.folders, answer=TokensOutcome)
        )
        for one in source:
            begun = one.T
            if one.status != "begun":
                result.status[one.T] = one.status
                if one.status == "failed":
                    result.wrong[one.T] = one.sentence
    except (IsolatedError, ValueError) as reason:
        result.status[begun], result.wrong[begun] = "failed", str(reason)
    return result

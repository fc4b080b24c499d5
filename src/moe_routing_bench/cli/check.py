"""mrb check: every implementation against its oracle, every router against its contract."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moe_routing_bench.cli.finding import ROUTERS, IncludePath, include_all, routers_found
from moe_routing_bench.cli.terminal import Json, console, fail, pick, show, show_json
from moe_routing_bench.conformance.cases import DTYPES, KitCell
from moe_routing_bench.conformance.check import Outcome, cells_of, check, matches
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.names import did_you_mean
from moe_routing_bench.ops.catalog import Found, find_all
from moe_routing_bench.ops.registry import BUILT_IN, all_ops

NO_DTYPE = "any"
SHOWN = 3  # failures of one implementation without --verbose
STYLES = {"passed": "green", "failed": "bold red", "broken": "bold red", "not supported": "yellow"}


@dataclass(kw_only=True)
class Row:
    """One implementation or router: a line of the table. Counts are by dtype; routers count as NO_DTYPE."""

    op: str
    spec: str
    origin: str = BUILT_IN
    broken: bool = False
    cells: list[KitCell] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def ran(self) -> bool:
        return bool(self.passed or self.failed) and not self.broken

    @property
    def verdict(self) -> str:
        if self.broken:
            return "broken"
        return "failed" if self.failed else "passed" if self.passed else "not supported"

    def take(self, outcome: Outcome) -> None:
        cell = outcome.cell
        getattr(self, outcome.status)[cell.dtype] += 1
        if outcome.status == "unsupported":
            self.reasons.update(outcome.sentences)
        for sentence in outcome.sentences if outcome.status == "failed" else ():
            where = {"case": cell.case.name, "layout": cell.layout, "dtype": cell.dtype}
            self.failures.append({**where, "sentence": sentence})

    def take_sentences(self, sentences: list[str]) -> None:
        (self.failed if sentences else self.passed)[NO_DTYPE] += 1
        self.failures += [{"case": "", "layout": "", "dtype": "", "sentence": text} for text in sentences]


def check_command(
    op: Annotated[
        str, typer.Option(metavar="PATTERN", help="Operations, as a shell pattern, or `routers`.")
    ] = "*",
    impl: Annotated[
        str, typer.Option(metavar="PATTERN", help="Implementations or routers, as a shell pattern.")
    ] = "*",
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}. Repeatable. Default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every failure, and why something is not supported.")
    ] = False,
    include_path: IncludePath = None,
) -> None:
    """Is it correct? Checks results, gradients and memory of every implementation and router on hard cases.

    \b
    Examples:
      mrb check
      mrb check --op combine --impl "index_*" --dtype bfloat16
      mrb check --include-path my_kernels --impl mine --verbose
      mrb check --op routers --impl "soft*"

    Exit code 0: all passed. 1: something failed, or nothing of an operation
    could run. 2: nothing was selected.
    """
    # the cases are tiny: two threads took 343 s, because they wait for each other; one takes 33 s
    torch.set_num_threads(1)
    dtypes = tuple(dict.fromkeys(pick("dtype", name, DTYPES) for name in dtype or DTYPES))
    include_all(include_path)
    _must_exist(device)
    wanted, rows = _select(op, impl, dtypes, device)
    total = sum(max(1, len(row.cells)) for row in rows)
    with _progress(total) as (advance, finished):
        for row in rows:
            began = time.perf_counter()
            _run(row, advance)
            finished(row, time.perf_counter() - began)
    ran = {row.op for row in rows if row.ran}
    idle = [name for name in wanted if name not in ran]
    healthy = not idle and not any(row.failed for row in rows)
    if as_json:
        show_json(_document(rows, idle, healthy))
    else:
        _show(rows, dtypes, idle, verbose=verbose)
    raise typer.Exit(0 if healthy else 1)


def _must_exist(device: str) -> None:
    try:
        torch.empty(1, device=device).cpu()
    except Exception as error:
        fail(f"cannot run on {device!r}: {str(error).partition(chr(10))[0]}")


def _select(
    op_pattern: str, impl_pattern: str, dtypes: tuple[str, ...], device: str
) -> tuple[list[str], list[Row]]:
    """The ops of which something must run, and the rows to check."""
    ops = [op for op in all_ops().values() if fnmatchcase(op.name, op_pattern)]
    routers = [*routers_found()] if fnmatchcase(ROUTERS, op_pattern) else []
    if not ops and not routers:
        pick("op", op_pattern, [*all_ops(), ROUTERS])
    everything = [(op.name, entry) for op in ops for entry in find_all(op, configs=True)]
    names = [entry.spec for _, entry in everything] + routers
    chosen = [(op_name, entry) for op_name, entry in everything if matches(entry.spec, impl_pattern)]
    rows = [_row(op_name, entry, dtypes, device) for op_name, entry in chosen]
    rows += [Row(op=ROUTERS, spec=name) for name in routers if fnmatchcase(name, impl_pattern)]
    if not rows:
        where = "" if op_pattern == "*" else f" of {op_pattern}"
        hint = did_you_mean(impl_pattern, names) or "see `mrb list`"
        fail(f"nothing to check: no implementation{where} is called {impl_pattern!r}; {hint}".rstrip())
    # a full run must not skip an op that has no implementation at all
    wanted = [op.name for op in ops] if impl_pattern == "*" else [row.op for row in rows]
    return list(dict.fromkeys(wanted)), rows


def _row(op: str, entry: Found, dtypes: tuple[str, ...], device: str) -> Row:
    row = Row(op=op, spec=entry.spec, origin=entry.origin, broken=entry.state == "broken")
    if row.broken:
        row.take_sentences([entry.reason])
        return row
    row.cells = cells_of(op, entry.spec, dtypes, device)
    return row


def _run(row: Row, advance: Callable[[str], None]) -> None:
    if row.op == ROUTERS:
        row.take_sentences(check_router(row.spec))
    if not row.cells:
        advance(f"{row.op}.{row.spec}")
    for cell in row.cells:
        advance(f"{row.op}.{row.spec}")
        row.take(check(cell))


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[Row, float], None]]]:
    """A bar on a terminal, else a line for each implementation; on stderr, because stdout is for results."""
    out = console(stderr=True)
    if not out.is_terminal:

        def finished(row: Row, seconds: float) -> None:
            out.print(f"{row.op}.{row.spec}: {_counts([row])}, {seconds:.1f} s")

        yield lambda what: None, finished
        return
    columns = (
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what), lambda row, seconds: None


def _counts(rows: list[Row], what: str = "") -> str:
    passed, failed, unsupported = (
        sum(getattr(row, name).total() for row in rows) for name in ("passed", "failed", "unsupported")
    )
    return f"{passed:,}{what} passed, {failed:,} failed, {unsupported:,} not supported"


def _show(rows: list[Row], dtypes: tuple[str, ...], idle: list[str], *, verbose: bool) -> None:
    table = Table(box=box.SIMPLE_HEAD if console().is_terminal else None, pad_edge=False)
    for heading in ("op", "implementation"):
        table.add_column(heading, no_wrap=True)
    for heading in (*dtypes, "not supported"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        skipped = row.unsupported.total()
        table.add_row(
            row.op,
            row.spec,
            *(_fraction(row, dtype) for dtype in dtypes),
            Text(f"{skipped:,}", "yellow") if skipped else Text("-", "dim"),
            Text(row.verdict, STYLES[row.verdict]),
            end_section=following is not None and following.op != row.op,
        )
    show(table)
    for row in rows:
        if row.failures:
            _show_failures(row, verbose=verbose)
        if verbose and row.reasons:
            show("", Text.assemble((f"{row.op}.{row.spec}", "bold"), " does not support"))
            for reason, times in row.reasons.most_common():
                show(_indented(Text(f"{_cases(times)}: {reason}")))
    show("")
    for name in idle:
        show(Text(f"Nothing selected of {name} could run, so nothing is known about it.", "bold red"))
    style = "red" if idle or any(row.failed for row in rows) else "green"
    hint = " (reasons: --verbose)" if not verbose and any(row.reasons for row in rows) else ""
    show(Text.assemble((_counts(rows, " cases"), style), hint))


def _fraction(row: Row, dtype: str) -> Text:
    passed, ran = row.passed[dtype], row.passed[dtype] + row.failed[dtype]
    if not ran:
        return Text("-", "dim")
    return Text(f"{passed}/{ran}", "green" if passed == ran else "red")


def _show_failures(row: Row, *, verbose: bool) -> None:
    what = "is broken" if row.broken else f"failed {_cases(row.failed.total())}"
    origin = "" if row.origin == BUILT_IN else f" ({row.origin})"
    show("", Text.assemble((f"{row.op}.{row.spec}", "bold red"), origin, f" {what}"))
    shown = row.failures if verbose else row.failures[:SHOWN]
    for failure in shown:
        where = ", ".join(filter(None, (failure["case"], failure["layout"], failure["dtype"])))
        show(_indented(Text.assemble((f"{where}: " if where else "", "bold"), failure["sentence"])))
    if len(shown) < len(row.failures):
        show(_indented(Text(f"and {len(row.failures) - len(shown):,} more (--verbose)", "dim")))


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))


def _cases(number: int) -> str:
    return f"{number:,} {'case' if number == 1 else 'cases'}"


def _document(rows: list[Row], idle: list[str], healthy: bool) -> dict[str, Any]:
    return {
        "healthy": healthy,
        "passed": sum(row.passed.total() for row in rows),
        "failed": sum(row.failed.total() for row in rows),
        "unsupported": sum(row.unsupported.total() for row in rows),
        "ops_that_never_ran": idle,
        "results": [
            {
                "op": row.op,
                "implementation": row.spec,
                "origin": row.origin,
                "verdict": row.verdict,
                "passed": dict(row.passed),
                "failed": dict(row.failed),
                "unsupported": dict(row.unsupported),
                "failures": row.failures,
                "reasons": dict(row.reasons),
            }
            for row in rows
        ],
    }

"""mrb check: every implementation against its oracle, every router against its contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from moe_routing_bench.cli.checking import Row, never_ran, run_row, select
from moe_routing_bench.cli.finding import ROUTERS, IncludePath, found_outside
from moe_routing_bench.cli.fitting import fitted
from moe_routing_bench.cli.terminal import Json, console, fail, pick, show, show_json, user_mistakes
from moe_routing_bench.cli.token_map import parse_tokens, token_map
from moe_routing_bench.conformance.cases import DTYPES
from moe_routing_bench.ops.registry import BUILT_IN

SHOWN = 3  # failures of one implementation without --verbose
STYLES = {"passed": "green", "failed": "bold red", "broken": "bold red", "not supported": "yellow"}


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
    tokens: Annotated[
        str | None,
        typer.Option(metavar="RANGE", help="A map of right and wrong by number of tokens: 1..512."),
    ] = None,
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
      mrb check --op expert_ffn --impl mine --include-path my_kernels --tokens 1..512

    Exit code 0: all passed. 1: something failed, or nothing of an operation
    or of an included implementation could run. 2: nothing was selected.
    """
    # the cases are tiny: two threads took 343 s, because they wait for each other; one takes 33 s
    torch.set_num_threads(1)
    dtypes = tuple(dict.fromkeys(pick("dtype", name, DTYPES) for name in dtype or DTYPES))
    outside = found_outside(include_path)
    _must_exist(device)
    wanted, rows = select(op, impl, dtypes, device, outside)
    if tokens is not None:
        _show_maps(rows, dtypes, device, tokens, as_json=as_json)
    total = sum(row.count for row in rows)
    with _progress(total) as (advance, finished):
        for row in rows:
            began = time.perf_counter()
            run_row(row, dtypes, device, advance)
            finished(row, time.perf_counter() - began)
    idle = never_ran(wanted, rows)
    healthy = not idle and not any(row.failed for row in rows)
    if as_json:
        show_json(_document(rows, idle, healthy))
    else:
        _show(rows, dtypes, idle, verbose=verbose)
    raise typer.Exit(0 if healthy else 1)


def _show_maps(rows: list[Row], dtypes: tuple[str, ...], device: str, text: str, *, as_json: bool) -> None:
    with user_mistakes():
        numbers = parse_tokens(text)
    maps = []
    for row in (row for row in rows if row.op != ROUTERS and not row.broken):
        maps.append(one_map := token_map(row, dtypes, device, numbers))
        if as_json:
            continue
        verdict = f"wrong at T = {one_map.wrong_ranges()}" if one_map.wrong else "right at every T that ran"
        verdict = verdict if one_map.ran else "nothing ran"
        style = "red" if one_map.wrong else "green" if one_map.ran else "yellow"
        show(Text.assemble((f"{row.op}.{row.spec}: ", "bold"), (verdict, style)))
        for line in one_map.lines():
            show(Text(line))
        for T, sentence in list(one_map.wrong.items())[:SHOWN]:
            show(_indented(Text(f"T={T}: {sentence}")))
    if as_json:
        show_json([vars(one_map) for one_map in maps])
    else:
        show(Text("  . right   X wrong   - not supported; 64 numbers of tokens a line", "dim"))
    unhealthy = any(one_map.wrong or not one_map.ran for one_map in maps) or any(row.broken for row in rows)
    raise typer.Exit(1 if unhealthy or not maps else 0)


def _must_exist(device: str) -> None:
    try:
        torch.empty(1, device=device).cpu()
    except Exception as error:
        fail(f"cannot run on {device!r}: {str(error).partition(chr(10))[0]}")


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
    words = {"op": [row.op for row in rows], "implementation": [row.spec for row in rows]}
    numbers: dict[str, list[str | Text]] = {
        dtype: [_fraction(row, dtype) for row in rows] for dtype in dtypes
    }
    numbers["not supported"] = [
        Text(f"{count:,}", "yellow") if (count := row.unsupported.total()) else Text("-", "dim")
        for row in rows
    ]
    numbers["verdict"] = [Text(row.verdict, STYLES[row.verdict]) for row in rows]
    show(*fitted(words, numbers))
    for row in rows:
        if row.failures:
            _show_failures(row, verbose=verbose)
        if verbose and row.reasons:
            show("", Text.assemble((f"{row.op}.{row.spec}", "bold"), " does not support"))
            for reason, times in row.reasons.most_common():
                show(_indented(Text(f"{_cases(times)}: {reason}")))
    if notes := [row for row in rows if row.note]:
        show("")
        for row in notes:
            show(Text.assemble((f"{row.op}.{row.spec}", "bold"), f": {row.note}"))
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
                "note": row.note,
            }
            for row in rows
        ],
    }

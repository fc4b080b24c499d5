"""The output of `mrb check`: progress, a row for each implementation, failures, maps by number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.padding import Padding
from rich.text import Text

from moe_routing_bench.conformance.run import Row, TokenMap
from moe_routing_bench.core.names import ranges
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.report.console import bar, console, fitted, show

SHOWN = 3  # failures that are shown of one implementation without --verbose
STYLES = {"passed": "green", "failed": "bold red", "broken": "bold red", "not supported": "yellow"}


@contextmanager
def check_progress(
    total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[Row, float], None]]]:
    """Shows a bar on a terminal, else a line for each implementation. It uses stderr; results go to
    stdout."""
    done, screen = count(1), console(stderr=True)
    with bar("checking", "cases", quiet=quiet) as shown:

        def finished(row: Row, seconds: float) -> None:
            if not (quiet or screen.is_terminal):
                screen.print(f"{row.op}.{row.spec}: {_counts([row])}, {seconds:.1f} s")

        yield lambda what: shown.update(next(done), total, now=what), finished


def _counts(rows: list[Row], what: str = "") -> str:
    passed, failed, unsupported = (
        sum(getattr(row, name).total() for row in rows) for name in ("passed", "failed", "unsupported")
    )
    return f"{passed:,}{what} passed, {failed:,} failed, {unsupported:,} not supported"


def show_rows(rows: list[Row], dtypes: tuple[str, ...], idle: list[str], *, verbose: bool = False) -> None:
    """Shows a row for each implementation. idle: operations of which nothing ran."""
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
        show(Text(f"Nothing that was selected of {name} could run, so nothing was checked.", "bold red"))
    style = "red" if idle or any(row.failed for row in rows) else "green"
    hint = " (--verbose shows the reasons)" if not verbose and any(row.reasons for row in rows) else ""
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


def show_map(one_map: TokenMap) -> None:
    verdict = "correct at every T that ran" if one_map.ran else "nothing ran"
    if one_map.wrong:
        verdict = f"wrong at T = {ranges(sorted(one_map.wrong))}"
    style = "red" if one_map.wrong else "green" if one_map.ran else "yellow"
    show(Text.assemble((f"{one_map.op}.{one_map.spec}: ", "bold"), (verdict, style)))
    for line in one_map.lines():
        show(Text(line))
    for T, sentence in list(one_map.wrong.items())[:SHOWN]:
        show(_indented(Text(f"T={T}: {sentence}")))


def show_legend_of_maps() -> None:
    show(Text("  . correct   X wrong   - not supported; each line has 64 numbers of tokens", "dim"))

"""mrb results compare, gate and history: what changed between two runs, or over many commits."""

from __future__ import annotations

import re
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.options import Json, pick, reading, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.console import show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.report.overview import left_out_json, show_left_out
from moe_routing_bench.report.result_tables import (
    COLOURS,
    changes_table,
    comparison_summary,
    show_comparison,
    show_history,
    show_rest,
    show_turned,
)
from moe_routing_bench.results.compare import LIKE, RunComparison, compare_runs
from moe_routing_bench.results.history import METRICS, history

LISTS = ("changes", "broken", "fixed", "apart")

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help=f"Compare although this differs. Repeatable. One of {', '.join(LIKE)}.",
    ),
]


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="The earlier results folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The later results folder.")],
    allow: Allow = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page; it also lists what has no ratio."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what became faster or slower from A to B. Runs that differ in more than the code need --allow.

    \b
    Examples:
      mrb results compare results/monday results/tuesday
      mrb results compare results/monday results/tuesday --html changes.html
      mrb results compare results/laptop results/server --allow machine
      mrb results compare old new --json | jq '.changes[] | select(.verdict == "SLOWER")'
    """
    with reading() as doing:
        runs = compare_runs(
            at_hand(a),
            at_hand(b),
            allow=allow or (),
            keep_unlike=html is not None,
            on_progress=lambda done, total: doing(f"{done} of {total} compared"),
        )
        if html is not None:
            from moe_routing_bench.cli.report import write_page
            from moe_routing_bench.report.two_runs import two_runs

            write_page(two_runs(runs, str(a), str(b), f"mrb results compare {a} {b} --html {html}"), html)
    if as_json:
        show_json({"a": str(a), "b": str(b), **_document(runs)})
        return
    show_comparison(runs)
    show_left_out(runs.left_out)


def gate_command(
    current: Annotated[Path, typer.Argument(metavar="CURRENT", help="The results to judge.")],
    baseline: Annotated[Path, typer.Option("--baseline", metavar="DIR", help="The results to compare with.")],
    max_regression: Annotated[
        str, typer.Option("--max-regression", metavar="PERCENT", help="How much slower is still accepted.")
    ] = "3%",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Also fail if something in the baseline was not measured.")
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Fail if anything became slower or broke. Exit code 0: no, 1: yes, 2: a mistake in the command.

    \b
    Examples:
      mrb results gate --baseline results/main results/branch
      mrb results gate --baseline results/main results/branch --max-regression 5%

    Only a confirmed slow-down fails: a ratio above the limit and above the noise
    of both runs, a 99 % interval that excludes 1, and p at most 1 % after
    correction. UNDECIDED results are counted, but do not fail.
    """
    with reading() as doing:
        limit = _fraction(max_regression)
        runs = compare_runs(
            at_hand(baseline), at_hand(current), allow=allow or (), delta=limit,
            on_progress=lambda done, total: doing(f"{done} of {total} compared"),
        )  # fmt: skip
    regressions = tuple(change for change in reversed(runs.changes) if change.verdict == "SLOWER")
    missing = require_all and bool(runs.only_a or runs.unreadable)
    failed = bool(regressions or runs.broken or missing)
    if as_json:
        document = _document(runs)
        judged = {"passed": not failed, "max_regression": limit, "require_all": require_all}
        show_json({"baseline": str(baseline), "current": str(current), **judged, **document})
    else:
        if regressions:
            show(f"Slower by more than {100 * limit:g} %:", changes_table(regressions))
            for change in regressions:
                show(Text(printable(f"  {change.repro}"), "dim"))
            show("")
        show_turned("Passed in the baseline but not now", runs.broken)
        show_rest(runs)
        show(comparison_summary(runs))
        why = f"{len(regressions)} slower, {len(runs.broken)} broken"
        if missing:
            why += f", {len(runs.only_a) + len(runs.unreadable)} missing"
        show(Text(f"gate: failed: {why}", "bold red") if failed else Text("gate: passed", "bold green"))
        show_left_out(runs.left_out)
    if failed:
        raise typer.Exit(1)


def _fraction(text: str) -> float:
    """3%, 3 % and 3.0% are 0.03. A bare 0.03 could mean either, so the % is required."""
    given = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", text)
    if given is None or not 0 < float(given[1]) <= 1000:
        raise ValueError(
            f"--max-regression is a percentage above 0 such as 3%, not {printable(ascii(text[:40]))}"
        )
    return float(given[1]) / 100


def _document(runs: RunComparison) -> dict[str, Any]:
    verdicts = {verdict: runs.count(verdict) for verdict in COLOURS}  # type: ignore[arg-type]
    return {
        "method": "the runs were not interleaved, so samples of A and B are not paired",
        "counts": verdicts,
        "geometric_mean": runs.geometric_mean,
        "compared": len(runs.changes),
        **{name: [asdict(one) for one in getattr(runs, name)] for name in LISTS},
        **{name: list(getattr(runs, name)) for name in ("only_a", "only_b", "unreadable", "notes")},
        "left_out": left_out_json(runs.left_out),
    }


def history_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A results folder with runs of many commits.")
    ],
    metric: Annotated[str, typer.Option(help="ratio (to the baseline) or ms.")] = "ratio",
    case: Annotated[str, typer.Option(help="Only cases that match, such as *olmoe*.")] = "*",
    impl: Annotated[str, typer.Option(help="Only implementations that match, such as native*.")] = "*",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PICTURE", help="Draw it: .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show at which commit something became faster or slower. Every record names its commit.

    \b
    Examples:
      mrb results history results
      mrb results history results --case "*olmoe*" --impl "native*" --html history.html
      mrb results history results --metric ms -o history.png

    A step is called a regression or an improvement only if nothing else changed
    at that commit: not the machine, not torch, not the way of measuring.
    """
    from moe_routing_bench.cli.report import write_page
    from moe_routing_bench.report.drawing import style
    from moe_routing_bench.report.over_commits import draw, over_commits
    from moe_routing_bench.report.pictures import check_picture_path

    chosen = pick("metric", metric, METRICS)
    with reading():
        if out is not None:
            check_picture_path(out)
        past = history(
            at_hand(folder, rows=True), "ms" if chosen == "ms" else "ratio",
            lambda where, name: fnmatchcase(where, f"*{case}*") and fnmatchcase(name, impl + "*"),
        )  # fmt: skip
        if html is not None:
            write_page(
                over_commits(past, f"mrb results history {folder} --metric {metric} --html {html}"), html
            )
        if out is not None:
            picture = draw(past)
            if picture is None:
                raise ValueError("there is nothing to draw: no series has two commits")
            with style():
                picture.figure.savefig(out)
    if as_json:
        series = [asdict(one) for one in past.series]
        left_out = left_out_json(past.left_out)
        show_json({"metric": chosen, "series": series, "without": past.without, "left_out": left_out})
        return
    show_history(past)
    show_left_out(past.left_out)

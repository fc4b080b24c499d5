"""mrb results history: a metric over commits, with the commits at which it steps."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from moe_routing_bench.cli.options import Json, pick, show_json
from moe_routing_bench.cli.report import write_page
from moe_routing_bench.cli.results import at_hand, left_out_json, reading, show_left_out, table_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.console import show
from moe_routing_bench.report.drawing import style
from moe_routing_bench.report.over_commits import draw, over_commits, series_table, steps_table
from moe_routing_bench.report.pictures import check_picture_path
from moe_routing_bench.results.history import METRICS, History, history

MAX_SHOWN = 40


def history_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A results folder with runs of many commits.")
    ],
    metric: Annotated[str, typer.Option(help="ratio (to the baseline) or ms.")] = "ratio",
    case: Annotated[str, typer.Option(help="Only cases that match, as *olmoe*.")] = "*",
    impl: Annotated[str, typer.Option(help="Only implementations that match, as native*.")] = "*",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PICTURE", help="Draw it: .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """When did it become faster or slower? Every record names the commit that was measured.

    \b
    Examples:
      mrb results history results
      mrb results history results --case "*olmoe*" --impl "native*" --html history.html
      mrb results history results --metric ms -o history.png

    A step is called a regression or an improvement only if nothing else
    changed there: not the machine's torch, not the way of measuring.
    """
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


def show_history(past: History) -> None:
    series, steps = series_table(past.series), steps_table(past)
    if steps.rows:
        show("Steps:", table_of(steps.head, steps.rows[:MAX_SHOWN], words=steps.head[:2]), "")
    show(table_of(series.head, series.rows[:MAX_SHOWN], words=series.head[:3]))
    if len(past.series) > MAX_SHOWN:
        show(f"and {len(past.series) - MAX_SHOWN:,} more series; all of them: --json")
    single = sum(len(one.points) < 2 for one in past.series)
    lines = [
        f"Series: {len(past.series):,}, steps: {len(past.steps):,}. {METRICS[past.metric].capitalize()}."
    ]
    lines += [f"{single:,} series have one commit only."] if single else []
    lines += (
        [f"{past.without:,} records name no commit: their version and code stand for it."]
        if past.without
        else []
    )
    show("", Text(printable("\n".join(lines)), "dim"))

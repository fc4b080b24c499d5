"""mrb results history: shows a metric over commits, and the commits at which its level changes."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, pick, reading, show_json
from moe_routing_bench.cli.report import write_page
from moe_routing_bench.report.drawing import style
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.report.over_commits import draw, over_commits
from moe_routing_bench.report.overview import left_out_json, show_left_out
from moe_routing_bench.report.pictures import check_picture_path
from moe_routing_bench.report.result_tables import show_history
from moe_routing_bench.results.history import METRICS, history


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

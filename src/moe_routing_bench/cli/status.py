"""mrb results status: how far a sweep is, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.bench.choosing import MeasureOptions, SizeOptions, WhatOptions, sweep_experiments
from moe_routing_bench.cli.options import Json, reading, show_json
from moe_routing_bench.fleet.status import sweep_status
from moe_routing_bench.report.console import show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.results.objects import url_of


def status_command(
    place: Annotated[Path, typer.Argument(help="The --out of a sweep: a folder or a URL.")],
    suite: Annotated[
        str | None, typer.Option(help="What the sweep measures: count its cells, and say what is left.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show in one line how far a sweep is: done, failed, machines, to do, time left.

    \b
    Examples:
      mrb results status s3://bucket/runs
      mrb results status s3://bucket/runs --suite seed-grid

    With --suite it counts cells as `mrb sweep SUITE` without other options would
    measure them on a machine like this one. Else it counts all cells.
    """
    with reading():
        experiments = None
        if suite is not None:
            experiments = sweep_experiments(
                suite, SizeOptions(), WhatOptions(), MeasureOptions(), dry_run=True
            )
        found = sweep_status(at_hand(place, rows=True), experiments)
    if as_json:
        show_json(vars(found))
    else:
        show(f"{url_of(place) or place}: {found.sentence}.")

"""mrb compact: many small objects of a store on a URL into few big ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.results import reading
from moe_routing_bench.cli.terminal import Json, say, show, show_json
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.packs import compact_store
from moe_routing_bench.text import printable


def compact_command(
    url: Annotated[
        Path, typer.Argument(metavar="URL", help="The --out of a sweep: s3://, gs://, az://, file://.")
    ],
    drop: Annotated[
        bool, typer.Option("--drop", help="Delete the parts that an earlier call has packed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack the results of many cells into few objects: a reader then needs few requests.

    \b
    Examples:
      mrb compact s3://bucket/runs
      mrb compact s3://bucket/runs --drop

    It may run at any time, beside sweeps, twice, or be killed. Nothing is
    deleted without --drop, and with it only what a pack holds byte for byte.
    """
    with reading():
        packed, dropped, sentences = compact_store(Objects(url), drop=drop)
    if as_json:
        show_json({"packed": packed, "dropped": dropped, "left": sentences})
    else:
        show(f"{packed:,} cells packed, {dropped:,} parts deleted.")
    for sentence in sentences:
        say(printable(sentence))
    if sentences:
        raise typer.Exit(1)

"""mrb results merge: merges the results folders of several machines into one.

mrb results compact: packs many small objects of a store on a URL into few big ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, reading, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.objects import Objects
from moe_routing_bench.fleet.packs import compact_store
from moe_routing_bench.report.console import say, show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.results.merge import merge


def merge_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders or URLs, each the --out of a sweep.")],
    out: Annotated[Path, typer.Option(help="The folder to merge into; it may hold results already.")],
    as_json: Json = False,
) -> None:
    """Copy the results of several machines into one folder. The source folders are not changed.

    \b
    Examples:
      mrb sweep seed-grid --out part1 --shard 1/2          on one machine
      mrb sweep seed-grid --out part2 --shard 2/2          on another
      mrb results merge part1 part2 --out results

    A session is copied once, even if several folders hold it. A session with a
    bad line or with changed samples is refused with a sentence and exit code 1;
    the others are merged.
    """
    with reading():
        merged = merge([at_hand(folder) for folder in folders], out)
    if as_json:
        show_json(vars(merged))
    else:
        there = f", {len(merged.there)} existed already" if merged.there else ""
        twice = f"; {merged.twice} of them have several runs; the latest counts" if merged.twice else ""
        show(f"{len(merged.copied)} sessions merged into {out}{there}. It holds {merged.cells} cells{twice}.")
    for sentence in merged.refused:
        say(f"not merged: {sentence}")
    if merged.refused:
        raise typer.Exit(1)


def compact_command(
    url: Annotated[
        Path, typer.Argument(metavar="URL", help="The --out of a sweep: s3://, gs://, az://, file://.")
    ],
    drop: Annotated[
        bool, typer.Option("--drop", help="Delete the parts that an earlier call has packed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack the results of many cells into few objects, so that a reader needs few requests.

    \b
    Examples:
      mrb results compact s3://bucket/runs
      mrb results compact s3://bucket/runs --drop

    You can run it at any time, during sweeps, several times, or stop it. Only
    --drop deletes anything, and only parts that a pack holds byte for byte.
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

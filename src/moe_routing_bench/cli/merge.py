"""mrb results merge: merges the results folders of several machines into one.

mrb results compact: folds many small objects of a store on a URL into few big ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, reading, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.folding import check_tables, compact_store
from moe_routing_bench.fleet.old_layout import convert
from moe_routing_bench.report.console import say, show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.results.merge import merge
from moe_routing_bench.results.objects import Objects


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
    prefix: Annotated[str, typer.Option(help="Two hex digits: only cells whose key begins with them.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only verify what was folded against its samples again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Validate the results of many cells once and fold them into few tables, so that readers are fast.

    \b
    Examples:
      mrb results compact s3://bucket/runs
      mrb results compact s3://bucket/runs --prefix 0f     one of 256 that may run at once
      mrb results compact s3://bucket/runs --check

    You can run it at any time, during sweeps, several times, or stop it. It
    also converts a store of an older version. What a table has replaced is
    deleted an hour later. A record that contradicts its samples is left out
    and kept in refused/.
    """
    with reading():
        if not re.fullmatch("([0-9a-f]{2})?", prefix):
            raise ValueError(f"--prefix {prefix!r} is not two hex digits, such as 0f")
        objects = Objects(url)
        if check:
            what, (count, sentences) = "verified", check_tables(objects, prefix)
        else:
            sentences = convert(objects)
            what, (count, wrong) = "folded", compact_store(objects, prefix)
            sentences += wrong
    if as_json:
        show_json({what: count, "left": sentences})
    else:
        show(f"{count:,} {'records' if check else 'cells'} {what}.")
    for sentence in sentences:
        say(printable(sentence))
    if sentences:
        raise typer.Exit(1)

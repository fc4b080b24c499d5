"""mrb bundle and mrb verify: results in one file, for others to check.

mrb merge: one results folder from those of several machines.

mrb compact: many small objects of a store on a URL into few big ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.bench.identity import package_version
from moe_routing_bench.cli.results import at_hand, reading, table_of
from moe_routing_bench.cli.terminal import Json, say, show, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.bundle import POWER, Manifest, make_bundle, opened_bundle
from moe_routing_bench.fleet.objects import Objects
from moe_routing_bench.fleet.packs import compact_store
from moe_routing_bench.results.merge import merge
from moe_routing_bench.results.remeasure import Remeasured, measure_again
from moe_routing_bench.studies.power import PowerStudy

MAX_NOT_COMPARED = 10


def bundle_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder, or a URL.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The bundle to write.")],
    power: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The JSON that `mrb doctor --power` wrote here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put results into one file that others can check: records, samples, machines, hashes of the code.

    \b
    Examples:
      mrb bundle results -o mine.zip
      mrb verify mine.zip

    A folder with a record that does not match its samples is refused.
    """
    with reading():
        given = power.read_bytes() if power is not None else None
        if given is not None:
            PowerStudy.from_json(given)
        manifest = make_bundle(at_hand(folder), out, made_by=package_version(), power=given)
    if as_json:
        show_json({"file": str(out), **manifest.model_dump(mode="json")})
        return
    _show(manifest)
    show(printable(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))


def verify_command(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that `mrb bundle` wrote.")],
    measure: Annotated[
        int, typer.Option(min=0, max=1000, help="How many of its cells to measure again, taken at random.")
    ] = 3,
    seed: Annotated[int | None, typer.Option(help="Which cells; a random number if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Is a bundle what it says? Checks every byte and record, then measures some cells again.

    \b
    Examples:
      mrb verify mine.zip
      mrb verify mine.zip --measure 0        only check it

    Cells are measured again only where machine and code are the same; for
    the others the reason is shown. Exit code 1: a ratio is another here,
    2: the bundle is refused.
    """
    with reading(), opened_bundle(bundle) as (folder, manifest):
        if POWER in manifest.files:
            PowerStudy.from_json((folder / POWER).read_bytes())
        answers = measure_again(folder, measure, seed=seed) if measure else []
    if as_json:
        show_json({**manifest.model_dump(mode="json"), "again": [vars(answer) for answer in answers]})
    else:
        show("Every file, record and sample is what the manifest says.")
        _show(manifest)
        _show_answers(answers)
    if any(answer.what == "differs" for answer in answers):
        raise typer.Exit(1)


def _show(manifest: Manifest) -> None:
    names = ("machine", "cells", "records", "A/A cells", "called different", "A/A worst", "sees")
    rows = [
        (
            m.name,
            m.cells,
            m.records,
            m.aa_cells,
            m.aa_called_different,
            _percent(m.aa_worst),
            _percent(m.seen),
        )
        for m in manifest.machines.values()
    ]
    show(table_of(names, rows, words=("machine",)))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _show_answers(answers: list[Remeasured]) -> None:
    for answer in answers:
        if answer.what != "not compared":
            show(printable(f"{answer.cell}: {answer.what}: {answer.sentence}"))
    reasons = Counter(answer.sentence for answer in answers if answer.what == "not compared")
    for reason, count in reasons.most_common(MAX_NOT_COMPARED):
        show(printable(f"{count} cells not compared: {reason}"))


def merge_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders or URLs, each the --out of a sweep.")],
    out: Annotated[Path, typer.Option(help="The folder to merge into; it may hold results already.")],
    as_json: Json = False,
) -> None:
    """Copy the results of several machines into one folder. Their own folders stay as they are.

    \b
    Examples:
      mrb sweep seed-grid --out part1 --shard 1/2          on one machine
      mrb sweep seed-grid --out part2 --shard 2/2          on another
      mrb merge part1 part2 --out results

    The same session is taken once, however often it comes. A session with a
    bad line, or whose samples are not those it was measured with, is refused
    with a sentence and exit code 1; the others are merged.
    """
    with reading():
        merged = merge([at_hand(folder) for folder in folders], out)
    if as_json:
        show_json(vars(merged))
    else:
        there = f", {len(merged.there)} were there already" if merged.there else ""
        twice = f"; {merged.twice} of them measured more than once, the latest counts" if merged.twice else ""
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

"""mrb bundle make and verify: put results into one file that others can check."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.bench.identity import package_version
from moe_routing_bench.cli.options import Json, reading, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.bundle import POWER, Manifest, make_bundle, opened_bundle
from moe_routing_bench.report.console import show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.report.overview import table_of
from moe_routing_bench.results.recompute import CLAIMED
from moe_routing_bench.results.remeasure import Remeasured, measure_again
from moe_routing_bench.studies.power import PowerStudy

MAX_NOT_COMPARED = 10


def make_command(
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
      mrb bundle make results -o mine.zip
      mrb bundle verify mine.zip

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
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that `mrb bundle make` wrote.")],
    measure: Annotated[
        int, typer.Option(min=0, max=1000, help="How many random cells to measure again.")
    ] = 3,
    seed: Annotated[int | None, typer.Option(help="Seed that chooses the cells. Default: random.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte and record of a bundle, then measure some of its cells again.

    \b
    Examples:
      mrb bundle verify mine.zip
      mrb bundle verify mine.zip --measure 0        only check it

    Cells are measured again only if machine and code are the same; for the
    others the reason is shown. Exit code 1: a ratio differs on this machine.
    2: the bundle is refused.
    """
    with reading(), opened_bundle(bundle) as (folder, manifest):
        if POWER in manifest.files:
            PowerStudy.from_json((folder / POWER).read_bytes())
        answers = measure_again(folder, measure, seed=seed) if measure else []
    if as_json:
        again = [vars(answer) for answer in answers]
        show_json({**manifest.model_dump(mode="json"), "claimed": CLAIMED, "again": again})
    else:
        show("Every file, record and sample matches the manifest. All times, statistics, verdicts and")
        show(f"commands follow from the samples. Its author claims the rest: {', '.join(CLAIMED)}.")
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

"""mrb sweep: measures many cases, workloads and layouts into one folder. It can be stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from moe_routing_bench.api import PlannedSweep
from moe_routing_bench.bench.choosing import MeasureOptions, SizeOptions, WhatOptions, sweep_experiments
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.status import Status
from moe_routing_bench.cli.bench import NOT_TIMED, end, stopped
from moe_routing_bench.cli.options import Json, include_all, show_json, user_mistakes, with_options
from moe_routing_bench.core.names import short_label
from moe_routing_bench.fleet.engines import ENGINES
from moe_routing_bench.fleet.sweep import SweepPlan
from moe_routing_bench.report.console import show
from moe_routing_bench.report.outcome_tables import outcome_document
from moe_routing_bench.results.objects import url_of
from moe_routing_bench.workloads.cases import SUITES


@with_options
def sweep_command(
    suite: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(SUITES)} (`mrb list cases` explains), a model, a case, or a span with sizes."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The results folder, or a URL; it is created if needed.")],
    sizes: SizeOptions,
    what: WhatOptions,
    measure: MeasureOptions,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Skip what the folder already holds.")
    ] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat cells in which an implementation failed.")
    ] = False,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Only every N-th cell, for N machines; auto in a Slurm array."),
    ] = "",
    claim: Annotated[
        bool, typer.Option("--claim", help="Skip cells that another machine measures; --out is a URL.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show cells and time; measure nothing.")] = False,
    engine: Annotated[
        str,
        typer.Option(help=f"What runs the cells: {', '.join(ENGINES)}, ray(LABEL=VALUE) for some nodes."),
    ] = "local",
    as_json: Json = False,
) -> None:
    """Measure many cases into one folder. Stop it at any time; the same command continues it.

    \b
    Examples:
      mrb sweep seed-fused~scaled --out results --dry-run
      mrb sweep olmoe-1b-7b~scaled --out results --workload "uniform,zipf(1.2)"
      mrb sweep layer --tokens 128,512 --experts 32,64 --topk 1,2 --out results
      mrb sweep seed-grid~scaled --out results --layout "compact,block(64)"
      mrb sweep gpu-hour --out gpu            needs a GPU; planned for an hour
      mrb sweep seed-grid --out part1 --shard 1/2        then `mrb results merge`
      mrb sweep seed-grid --out s3://bucket/runs --claim    on any number of machines
      mrb sweep seed-grid --out results --engine "ray(gpu=h100)"

    A cell is one case with one workload; its implementations are timed together.
    The items of a LIST are separated by commas; every combination is measured.
    """
    include_all(what.include_path)
    name = url_of(out) or out
    with user_mistakes():
        experiments = sweep_experiments(suite, sizes, what, measure, dry_run=dry_run)
        planned = PlannedSweep.of(
            experiments, out, resume=resume, retry_failed=retry_failed, shard=shard, claim=claim,
            engine=engine, dry_run=dry_run,
        )  # fmt: skip
        plan = planned.plan
    if dry_run:
        _show_plan(plan, as_json)
        return
    with user_mistakes():
        roofs = planned.roofs(experiments, progress=True)
    if not as_json:
        show(_sentence(plan))
    outcomes: list[CellOutcome] = []

    def done(outcome: CellOutcome) -> None:
        outcomes.append(outcome)
        if not as_json:
            show(_line(outcome))

    try:
        with user_mistakes():
            planned.run(suite=suite, roofs=roofs, progress=True, on_outcome=done)
    except KeyboardInterrupt:
        advice = f"The same command continues from here; `mrb results --folder {name}` shows the results."
        stopped(len(outcomes), len(plan.todo), advice)
    if as_json:
        show_json({**_numbers(plan), "cells": [outcome_document(one) for one in outcomes]})
    else:
        show(f"Results are in {name}: `mrb results --folder {name}`, `mrb tune decide {name}`.")
    end(outcomes, what)
    if plan.failed and not retry_failed:
        raise typer.Exit(NOT_TIMED)  # a sentence was printed already


def _show_plan(plan: SweepPlan, as_json: bool) -> None:
    if as_json:
        steps = {step: round(seconds / 60, 1) for step, seconds in plan.steps.items() if step}
        titles = [experiment.title for experiment in plan.todo]
        show_json({**_numbers(plan), "minutes_by_step": steps, "todo": titles})
        return
    show(_sentence(plan))
    for step, seconds in plan.steps.items():
        if step:
            show(f"  {step}: about {seconds / 60:.0f} minutes")
    for experiment in plan.todo:
        show(Text(f"  {experiment.title}: {len(experiment.implementations)} implementations", "dim"))


def _numbers(plan: SweepPlan) -> dict[str, float]:
    return {"to_do": len(plan.todo), "done": plan.done, "failed": plan.failed, "about_seconds": plan.seconds}


def _sentence(plan: SweepPlan) -> str:
    minutes = plan.seconds / 60
    about = f"about {minutes:.0f} minutes" if minutes >= 2 else f"about {plan.seconds:.0f} seconds"
    failed = f"; {plan.failed} have a failure (--retry-failed)" if plan.failed else ""
    return f"{len(plan.todo)} cells to measure, {about}; {plan.done} are already measured{failed}."


def _line(outcome: CellOutcome) -> Text:
    """Writes a cell in one line: the best implementation, its ratio to the baseline, and failures."""
    passed = [one for one in outcome.implementations if one.samples]
    broken = [one for one in outcome.implementations if one.status not in (Status.PASSED, Status.UNSUPPORTED)]
    text = Text(f"{outcome.experiment.title}: ")
    if passed:
        best = min(passed, key=lambda one: 1.0 if one.comparison is None else one.comparison.ratio)
        ratio = 1.0 if best.comparison is None else best.comparison.ratio
        verdict = "baseline" if best.comparison is None else best.comparison.verdict
        text.append(f"{short_label(best.label)} @ {best.implementation.layout}", "bold")
        text.append(f" {ratio:.3f} {verdict}, {len(passed)} timed, {outcome.seconds:.0f} s")
    else:
        text.append("nothing passed", "red")
    for one in broken:
        text.append(f"; {short_label(one.label)} {one.status}", "red")
    return text

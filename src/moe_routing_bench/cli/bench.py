"""mrb bench: finds the fastest implementation for these sizes and this routing. Each span is a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from moe_routing_bench import api
from moe_routing_bench.api import roofs_here, saving_folder
from moe_routing_bench.bench.budget import command_start
from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    bench_experiments,
    split_all,
)
from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.status import Status
from moe_routing_bench.cli.balance import balance_command
from moe_routing_bench.cli.options import (
    Json,
    fail,
    include_all,
    show_json,
    user_mistakes,
    with_options,
)
from moe_routing_bench.core.names import short_label
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.report.console import console, say, show
from moe_routing_bench.report.outcome_tables import outcome_document, show_outcome, show_summary
from moe_routing_bench.workloads.experiment import Experiment


class SpanCommands(TyperGroup):
    """Makes a command for every name, because the spans of --include-path are known only after reading it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*span_names(), "balance"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (known := super().get_command(ctx, cmd_name)) is not None:
            return known
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        summary = span_named(cmd_name).summary if cmd_name in span_names() else cmd_name
        short = summary.removeprefix(f"{cmd_name}: ").partition("   ")[0]
        app.command(cmd_name, help=HELP.format(span=cmd_name), short_help=short)(_command(cmd_name))
        return typer.main.get_command(app)


HELP = """Find the fastest implementation of {span}: check each one, then time all in interleaved rounds.

The first implementation is the baseline; a ratio below 1 is faster. Only correct implementations get a time.
The items of a LIST are separated by commas, and every combination is measured.
"""

bench_app = typer.Typer(
    cls=SpanCommands,
    no_args_is_help=True,
    help="""Find the fastest implementation: check each one, then time all in interleaved rounds.

\b
Examples:
  mrb bench layer --model olmoe-1b-7b
  mrb bench layer --router switch,soft_moe --direction forward,train --stages
  mrb bench expert_ffn --tokens 64,512 --impl staged,eager_loop --dtype float32
  mrb bench expert_ffn --model qwen3-30b-a3b --tokens 1,64 --store int8
  mrb bench pack --case seed-pack/16384x4096-e128-k2 --out results
  mrb bench layer --checkpoint ./Qwen3-30B-A3B --layer 12
  mrb bench model --model olmoe-1b-7b --layers 4 --tokens 1 --context 128 --seconds 150
  mrb bench balance --out balance         balance controllers, no times
""",
)
bench_app.command("balance")(balance_command)


def _command(span: str) -> Callable[..., None]:
    @with_options
    def bench(
        sizes: SizeOptions,
        what: WhatOptions,
        measure: MeasureOptions,
        out: Annotated[
            Path | None, typer.Option(help="Save in this folder. Default: where `mrb results` reads.")
        ] = None,
        save: Annotated[bool, typer.Option("--save/--no-save", help="Save records and samples.")] = True,
        repro: Annotated[bool, typer.Option("--repro", help="Show the command that repeats a row.")] = False,
        as_json: Json = False,
    ) -> None:
        include_all(what.include_path)
        with user_mistakes():
            try:
                experiments = bench_experiments(span, sizes, what, measure)
            except NotImplementedError as reason:
                fail(str(reason))
            roofs = roofs_here(experiments, progress=True)
            folder = saving_folder(out, save=save)
        threads, cores = experiments[0].threads, core_count()
        if measure.threads is None and threads < cores:
            busy = cores - threads
            console(stderr=True).print(
                f"other processes use {busy} of {cores} cores, so only the other cores are used; "
                f"--threads {cores} uses all."
            )
        shown = None if as_json else partial(show_outcome, repro=repro, roofs=roofs)
        seconds = measure.seconds_for(experiments)
        suite = sizes.case or sizes.model or ""
        outcomes = measured(experiments, folder, suite=suite, seconds=seconds, roofs=roofs, show=shown)
        if as_json:
            show_json([outcome_document(outcome) for outcome in outcomes])
        else:
            if len(outcomes) > 1:
                show_summary(outcomes)
            if folder is not None:
                show("", where_saved(folder))
        end(outcomes, what)

    return bench


def measured(
    experiments: Sequence[Experiment], out: Path | None, *, suite: str, seconds: float, roofs: Roofs | None,
    show: Callable[[CellOutcome], None] | None = None,
    complete: Callable[[CellOutcome], CellOutcome] = lambda outcome: outcome,
) -> list[CellOutcome]:  # fmt: skip
    """Returns the outcomes of all cells. Ctrl-C ends the command and keeps the finished cells. `complete`
    adds to an outcome before it is written."""
    outcomes: list[CellOutcome] = []

    def done(outcome: CellOutcome) -> None:
        outcomes.append(outcome)
        if show is not None:
            show(outcome)

    try:
        with user_mistakes():
            api.measure(
                experiments, out, suite=suite, seconds=seconds, roofs=roofs, began=command_start(),
                progress=True, on_outcome=done, complete=complete,
            )  # fmt: skip
    except KeyboardInterrupt:
        saved = where_saved(out) if out is not None and outcomes else "Nothing was saved."
        stopped(len(outcomes), len(experiments), f"{saved} The same command starts again from the beginning.")
    return outcomes


NOT_TIMED, STOPPED = 1, 130  # exit codes; 2 is a mistake in the command
# these are no failure if --impl does not name the implementation: it cannot run here, or there was no time
EXCUSED = (Status.UNSUPPORTED, Status.NO_TIME)


def where_saved(folder: Path) -> str:
    """Returns the last line of the output: where the results are and how to read them."""
    named = "" if folder == default_results() else f" --folder {folder}"
    return f"Saved in {folder}; `mrb results{named}` shows them."


def end(outcomes: Sequence[CellOutcome], what: WhatOptions) -> None:
    """Exits with NOT_TIMED and a sentence if an implementation that the user asked for has no time.

    The user asked for everything that --impl names. Other implementations may be EXCUSED.
    """
    named = [word for word in split_all(what.impl) if word != "all"]
    missing: dict[str, Status] = {}
    for outcome in outcomes:
        for one in outcome.implementations:
            if not one.samples and (named or one.status not in EXCUSED):
                missing.setdefault(f"{short_label(one.label)} @ {one.implementation.layout}", one.status)
    nothing = [outcome for outcome in outcomes if not any(one.samples for one in outcome.implementations)]
    if missing:
        names = ", ".join(f"{name} ({status})" for name, status in missing.items())
        say(f"asked for and not timed: {names}")
    elif nothing:
        say(f"nothing was timed in {nothing[0].experiment.title}")
    if missing or nothing:
        raise typer.Exit(NOT_TIMED)


def stopped(done: int, experiments: int, advice: str) -> NoReturn:
    """Ends the command after Ctrl-C."""
    say(f"stopped; {done} of {experiments} cells {'is' if done == 1 else 'are'} measured. {advice}")
    raise typer.Exit(STOPPED)

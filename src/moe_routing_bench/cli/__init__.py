"""The command line: `mrb`, `moe-routing-bench` and `python -m moe_routing_bench`. One file a command.

A command's file is imported when the command is called: `mrb --help` must not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Place(NamedTuple):
    """Where a command is, and what `mrb --help` says of it, in at most 68 letters: no line is cut off."""

    file: str
    name: str  # of a function, or of a Typer with commands of its own
    summary: str


COMMANDS = {
    "list": Place("list", "list_command", "What there is: operations, routers, workloads, models, cases."),
    "explain": Place("explain", "explain_command", "What would run for these sizes, and why not the others."),
    "check": Place("check", "check_command", "Is it correct? Results, gradients and memory, on hard cases."),
    "doctor": Place("doctor", "doctor_command", "What is this machine, and how fast can it be at most?"),
    "formats": Place("formats", "formats_command", "What do weights of 8 and 4 bits lose against float32?"),
    "sweep": Place("sweep", "sweep_command", "Measure many cases into one folder; stop and go on at will."),
    "merge": Place("bundle", "merge_command", "One results folder from those of several machines."),
    "compact": Place("bundle", "compact_command", "Make a store on a URL quick to read: few big objects."),
    "results": Place(
        "results", "results_command", "What was measured? An overview, or the answer to a query."
    ),
    "export": Place("results", "export_command", "Write all records of a folder as Parquet or CSV."),
    "bundle": Place("bundle", "bundle_command", "Results in one file that others can check."),
    "verify": Place("bundle", "verify_command", "Is a bundle what it says? Checked, then measured again."),
    "report": Place("report", "report_command", "One page of figures and tables from results folders."),
    "compare": Place("compare", "compare_command", "What became faster or slower from one run to another?"),
    "gate": Place("compare", "gate_command", "Is anything slower than before? Exit code 1 if so, for CI."),
    "history": Place("history", "history_command", "At which commit did it become faster or slower?"),
    "decide": Place("decide", "decide_command", 'Which wins for which size? For impl="auto" to follow.'),
    "regret": Place("decide", "regret_command", 'How much slower is impl="auto" than the fastest?'),
    "compile": Place(
        "compile", "compile_command", "Compile Triton kernels without a GPU; show what they need."
    ),
    "bench": Place("bench", "bench_app", "Which implementation is fastest here? Checked, then timed."),
    "profile": Place("profile", "profile_app", "Where the time of a MoE block goes, operation by operation."),
    "train": Place("train", "train_app", "Which router learns best, and what does it cost? On your text."),
    "place": Place("parallel", "place_command", "Would another placement of experts on ranks pay?"),
    "cache": Place("parallel", "cache_command", "Which experts to keep in memory if not all fit?"),
    "parallel": Place("parallel", "parallel_app", "I have N GPUs and this model: what would a step cost?"),
    "trace": Place("trace", "trace_app", "What a model's MoE layers choose: record, look, check, compare."),
}


class LazyCommands(TyperGroup):
    """Knows every command by its line, and imports the one that is called."""

    def __init__(self, **more: Any):
        super().__init__(**more)
        self.commands = {name: TyperCommand(name, help=place.summary) for name, place in COMMANDS.items()}

    def invoke(self, ctx: Any) -> Any:
        """Commands that keep something say themselves what Ctrl-C leaves; the others only end."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("mrb: stopped", err=True)
            raise typer.Exit(130) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None  # super() has refused any other
        return name, loaded(name), rest


def loaded(name: str) -> Any:
    """The command of this name, imported."""
    place = COMMANDS[name]
    command = getattr(importlib.import_module(f"moe_routing_bench.cli.{place.file}"), place.name)
    app = _typer()
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
        return typer.main.get_group(app).commands[name]
    app.command(name)(command)
    return typer.main.get_command(app)


def _typer(**more: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        # frames around help and errors for people, plain text for pipes
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        context_settings={"help_option_names": ["-h", "--help"]},
        **more,
    )


app = _typer(cls=LazyCommands, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    versions = []
    for name in ("moe-routing-bench", "torch"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} (not installed; running from source)")
    typer.echo(", ".join(versions))
    raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Find the Mixture-of-Experts router, layout and kernel that are correct and fastest for your sizes.

    \b
    Examples:
      mrb list                              what there is
      mrb explain expert_ffn --tokens 16    what would run, and why
      mrb check --op combine                is it correct?
      mrb doctor                            what this machine can do at most
      mrb bench layer --model olmoe-1b-7b   which is fastest?
    """


def main() -> None:
    app()

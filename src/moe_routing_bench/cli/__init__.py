"""The command line: `mrb`, `moe-routing-bench` and `python -m moe_routing_bench`. One file a command."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import torch
import typer

from moe_routing_bench.cli.bench import bench_app
from moe_routing_bench.cli.check import check_command
from moe_routing_bench.cli.compare import compare_command, gate_command
from moe_routing_bench.cli.compile import compile_command
from moe_routing_bench.cli.decide import decide_command
from moe_routing_bench.cli.doctor import doctor_command
from moe_routing_bench.cli.explain import explain_command
from moe_routing_bench.cli.list import list_command
from moe_routing_bench.cli.profile import profile_app
from moe_routing_bench.cli.results import export_command, results_command
from moe_routing_bench.cli.sweep import sweep_command
from moe_routing_bench.cli.trace import trace_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # frames around help and errors for people, plain text for pipes
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_command)
app.command("explain")(explain_command)
app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("sweep")(sweep_command)
app.command("results")(results_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("gate")(gate_command)
app.command("decide")(decide_command)
app.command("compile")(compile_command)
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")
app.add_typer(trace_app, name="trace")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = importlib.metadata.version("moe-routing-bench")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed; running from source)"
    typer.echo(f"moe-routing-bench {version}, torch {torch.__version__}")
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

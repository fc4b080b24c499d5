"""mrb doctor: what this machine is, how fast it can be at most, and what cannot run on it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.text import Text

from moe_routing_bench.bench.roofs import Roofs, roofs_path, stored_roofs, take_roofs
from moe_routing_bench.bench.weather import Weather, weather
from moe_routing_bench.cli import self_test
from moe_routing_bench.cli.finding import IncludePath, include_all
from moe_routing_bench.cli.fitting import fitted
from moe_routing_bench.cli.pictures import check_picture_path, draw_power
from moe_routing_bench.cli.progress import bar, spinner
from moe_routing_bench.cli.terminal import Json, fail, show, show_json, two_columns, user_mistakes
from moe_routing_bench.machine import Machine, this_machine
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.studies.power import PowerStudy, plan_trials, study_power
from moe_routing_bench.topology import Topology, nodes_in_use, system_nodes
from moe_routing_bench.whole_files import write_whole

DEFAULT_TRIALS = 24
BUSY = (
    "while these were measured {}, so they are too low: nothing is held to them, shares of them are marked "
    "~, and the next `mrb bench` or `mrb doctor` in a quiet moment measures them again"
)


class Nodes(NamedTuple):
    """NUMA nodes as the system names them, and those that kernels are to mind."""

    system: Topology
    used: Topology | None

    def sentence(self) -> str:
        count, used = len(self.system.nodes), self.used
        mind = "no kernel minds them" if used is None else f"kernels mind {used.text}"
        return f"{count} of memory, processors {self.system.text}; {mind} (MRB_NODES)"


def doctor_command(
    again: Annotated[
        bool,
        typer.Option("--again", help="Measure the roofs again; of each rate the highest ever seen is kept."),
    ] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Instead, measure how small a slow-down is found here.")
    ] = False,
    trials: Annotated[
        int | None,
        typer.Option(
            help=f"With --power: how often the same code is compared (default {DEFAULT_TRIALS}); each "
            "slow-down half as often.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --power: the picture (default power.png); a JSON file is written beside it.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Instead, try every GPU kernel once on cuda, cuda:1, ... and say what not to trust.",
            show_default=False,
        ),
    ] = "",
    impl: Annotated[str, typer.Option(help="With --device: these kernels alone, as a shell pattern.")] = "*",
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """What is this machine, and how fast can it be at most? Measures its peak rates (roofs) once.

    \b
    Examples:
      mrb doctor
      mrb doctor --again --json
      mrb doctor --device cuda                          before anything else on a new GPU
      mrb doctor --power                                about 4 minutes
      mrb doctor --power --trials 200 --out power.png   about 30 minutes

    The roofs are kept in ~/.cache/moe-routing-bench (or MRB_HOME), a file per
    machine: bytes read a second by working set, operations a second by unit.
    Those measured while the machine was busy are too low: they are marked, and
    measured again by the next `mrb doctor`, or `mrb bench` in a quiet moment.
    """
    if device:
        _try_kernels(device, impl, as_json)
        return
    if power:
        _power(DEFAULT_TRIALS if trials is None else trials, out or Path("power.png"), as_json)
        return
    if trials is not None or out is not None:
        fail("--trials and --out belong to --power; add it, or leave them out")
    include_all(include_path)
    machine, now = this_machine(), weather()
    with user_mistakes():
        roofs, nodes = stored_roofs(machine.name), Nodes(Topology(system_nodes()), nodes_in_use())
    if again or roofs is None or roofs.stale:
        with spinner("measuring roofs, about 10 s") as doing, user_mistakes():
            roofs = take_roofs(machine, roofs, lambda what: doing(f"measuring {what}"))
    cannot = _cannot_run()
    if as_json:
        show_json(_document(machine, now, roofs, cannot, nodes))
    else:
        _show(machine, now, roofs, cannot, nodes)


def _try_kernels(device: str, impl: str, as_json: bool) -> None:
    self_test.must_exist(device)
    tried = list(self_test.try_all(device, impl)) if as_json else self_test.show_all(device, impl)
    if not tried:
        fail(f"no GPU kernel matches --impl {impl}")
    if as_json:
        show_json({"device": device, "tried": [one._asdict() for one in tried]})
    else:
        self_test.show_summary(tried)
    raise typer.Exit(int(any(one.answer == "wrong" for one in tried)))


def _cannot_run() -> dict[str, str]:
    return {
        f"{op.name}.{entry.spec}": entry.reason
        for op in all_ops().values()
        for entry in find_all(op, configs=False)
        if entry.implementation is None
    }


def _show(machine: Machine, now: Weather, roofs: Roofs, cannot: dict[str, str], nodes: Nodes) -> None:
    facts = two_columns(16)
    facts.add_row("machine", machine.name)
    facts.add_row("processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB")
    if len(nodes.system.nodes) > 1 or nodes.used:
        facts.add_row("nodes", nodes.sentence())
    facts.add_row("instructions", ", ".join(machine.instructions) or "nothing notable")
    facts.add_row("GPUs", ", ".join(machine.gpus) or "none; nothing here is timed on a GPU")
    facts.add_row("software", f"{machine.system}, Python {machine.python}, torch {machine.torch}")
    complaints = now.complaints(machine.cores)
    for label, text in zip(["weather"] + [""] * len(complaints), complaints or ["quiet"], strict=False):
        facts.add_row(label, Text(text, "yellow" if complaints else "green"))
    show(facts, "")
    table = two_columns(16)
    for threads in sorted(roofs.read_bytes):
        who = "1 thread" if threads == 1 else f"{threads} threads"
        read, copy = roofs.read_bytes[threads] / 1e9, roofs.copy_bytes[threads] / 1e9
        table.add_row(f"roofs, {who}", f"memory: read {read:.1f}, copy {copy:.1f} GB/s")
        if roofs.ladder:
            rungs = roofs.ladder[threads].items()
            table.add_row("", f"reading: {', '.join(f'{_size(n)} {r / 1e9:.3g}' for n, r in rungs)} GB/s")
        rates = roofs.units or roofs.gemm_flops
        table.add_row("", f"{', '.join(f'{n} {r[threads] / 1e9:,.0f}' for n, r in rates.items())} GFLOP/s")
    measured = f"the highest ever seen, by {roofs.how or 'torch'}, kept in {roofs_path(roofs.machine)}"
    table.add_row("", Text(measured, "dim"))
    if roofs.busy:
        table.add_row("", Text(BUSY.format(roofs.busy), "yellow"))
    show(table)
    if cannot:
        show("", "Cannot run here")
        absent = two_columns(16)
        for name, reason in cannot.items():
            absent.add_row(f"  {name}", reason)
        show(absent)
    else:
        show("", "Every implementation can be loaded here; `mrb explain OP` says what runs for your sizes.")


def _size(count: int) -> str:
    """65536 as 64K."""
    for unit, factor in (("G", 2**30), ("M", 2**20)):
        if count >= factor:
            return f"{count // factor}{unit}"
    return f"{count // 2**10}K"


def _document(
    machine: Machine, now: Weather, roofs: Roofs, cannot: dict[str, str], nodes: Nodes
) -> dict[str, Any]:
    return {
        "machine": machine.to_dict(),
        "weather": {
            **vars(now),
            "steal_percent": now.steal_percent,
            "complaints": now.complaints(machine.cores),
        },
        "nodes": {"system": nodes.system.text, "used": nodes.used and nodes.used.text},
        "roofs": roofs.model_dump(),
        "cannot_run": cannot,
    }


def _power(trials: int, out: Path, as_json: bool) -> None:
    with user_mistakes():
        planned = plan_trials(trials)
        check_picture_path(out)
    torch.set_num_threads(1)  # this process judges between samples and must not disturb the other cores
    command = shlex.join(["mrb", *sys.argv[1:]])
    try:
        with bar("comparing (Ctrl-C shows results so far)", "comparisons") as shown:
            study = study_power(planned, command=command, on_progress=shown.update)
    except KeyboardInterrupt:
        fail("stopped before the first comparison was done; nothing was measured")
    beside = out.with_suffix(".json")
    write_whole(beside, study.to_json())
    draw_power(study, out)
    if as_json:
        show_json(study.model_dump(mode="json"))
    else:
        _show_power(study, out, beside)
    if not study.finished:
        raise typer.Exit(130)


def _show_power(study: PowerStudy, *files: Path) -> None:
    words = {
        "slow-down": [f"{row.percent} %" if row.percent else "none (A/A)" for row in study.rows],
        "verdicts": [
            ", ".join(f"{count} {verdict}" for verdict, count in row.verdicts.items()) for row in study.rows
        ],
    }
    numbers = {
        "trials": [str(row.trials) for row in study.rows],
        "called different": [f"{100 * row.share:.1f} %" for row in study.rows],
        "95 % interval": [
            f"{100 * row.interval[0]:.1f} to {100 * row.interval[1]:.1f} %" for row in study.rows
        ],
        "ratio": ["" if row.median_ratio is None else f"{row.median_ratio:.4f}" for row in study.rows],
        "rounds": [f"{row.median_rounds:.0f}" for row in study.rows],
        "seconds": [f"{row.median_seconds:.1f}" for row in study.rows],
    }
    weather = study.weather
    show("", *fitted(words, numbers, style="bold"), "")
    show("called different: a slow-down was called SLOWER, or the same code FASTER or SLOWER; ratio, rounds "
         "and seconds are medians")  # fmt: skip
    show(
        f"load {weather['load_before']:.1f} before and {weather['load_after']:.1f} after, "
        f"{weather['steal_percent']:.1f} % of time stolen, {study.seconds / 60:.1f} minutes"
    )
    if not study.finished:
        planned = sum(study.planned.values())
        show(Text(f"stopped after {len(study.trials)} of {planned} comparisons", "yellow"))
    for reason in sorted({trial.reason for trial in study.trials if trial.verdict == "FAILED"}):
        show(Text(f"failed: {reason}", "red"))
    show(f"written: {', '.join(map(str, files))}")

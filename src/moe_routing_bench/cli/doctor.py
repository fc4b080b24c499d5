"""mrb doctor: shows this machine, its peak speed, and what cannot run on it.

mrb doctor --device cuda runs the smallest case of every GPU kernel and compares it with the oracle. The
device `pretend` does the same on the CPU with Triton's interpreter.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.text import Text

from moe_routing_bench.bench.choosing import check_device
from moe_routing_bench.bench.device import cuda_of, memory_place, others_on, why_no_gpu
from moe_routing_bench.bench.noise import NoiseReading, noise_now
from moe_routing_bench.bench.roofs import Roofs, roofs_path, stored_roofs, take_roofs
from moe_routing_bench.cli.options import IncludePath, Json, fail, include_all, show_json, user_mistakes
from moe_routing_bench.conformance.self_test import Tried, try_all
from moe_routing_bench.core.machine import Machine, this_machine
from moe_routing_bench.core.topology import Topology, nodes_in_use, system_nodes
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import target_of
from moe_routing_bench.report.console import bar, fitted, show, spinner, two_columns
from moe_routing_bench.report.pictures import check_picture_path, draw_power
from moe_routing_bench.studies.power import PowerStudy, plan_trials, study_power
from moe_routing_bench.workloads.experiment import check_device_name, device_kind

STYLES = {"right": "green", "wrong": "red", "not tried": "yellow"}


def must_exist(device: str) -> None:
    """Fails with a sentence if no kernel can run on a device."""
    if device_kind(device) == "pretend":
        with user_mistakes():
            check_device_name(device)
            check_device(device)
        if os.environ.get("TRITON_INTERPRET") != "1":
            fail("--device pretend interprets the kernels on the CPU: set TRITON_INTERPRET=1")
    elif torch.device(device).type != "cuda":
        fail(f"--device {device}: mrb doctor tries GPU kernels; use cuda, cuda:1, ... or pretend")
    elif not torch.cuda.is_available():
        fail(
            f"there is no CUDA device here ({why_no_gpu(device)}), so no GPU kernel can be tried; "
            "`TRITON_INTERPRET=1 mrb doctor --device pretend` does the same on the CPU, and `mrb explain OP "
            "--arch sm_90a` says what would run"
        )


def show_all(device: str, pattern: str) -> list[Tried]:
    """Prints the device, then each kernel when it has been tried."""
    place = torch.device(memory_place(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning is shown below
        target = target_of(place)
    name = cuda_of(device).get_device_name(place)
    gpu = f"{name}, interpreted" if place.type == "cpu" else f"{name}, {target.name}"
    show(f"Trying the smallest case of every GPU kernel on {gpu}, against the oracle on the CPU")
    if target.unlisted:
        show(Text(target.unlisted, "yellow"))
    if others := others_on(device):
        show(Text(others, "yellow"))
    tried = []
    for one in try_all(str(place), pattern):
        tried.append(one)
        row = two_columns(16)
        row.add_row(Text(one.answer, STYLES[one.answer]), f"{one.name}: {one.reason}")
        show(row)
    return tried


def show_summary(tried: list[Tried]) -> None:
    by_answer = {answer: [one.name for one in tried if one.answer == answer] for answer in STYLES}
    wrong, absent = by_answer["wrong"], by_answer["not tried"]
    show("", Text(f"{len(by_answer['right'])} right, {len(wrong)} wrong, {len(absent)} not tried", "bold"))
    if wrong:
        show(Text(f"Wrong on this device, do not use: {', '.join(wrong)}", "red"))
    if absent:
        show(Text(f"Not tried: {', '.join(absent)}", "yellow"))
    if not wrong and not absent:
        show(
            Text(
                "All are correct in their smallest case; `mrb check --device cuda` tries the others", "green"
            )
        )


DEFAULT_TRIALS = 24
BUSY = (
    "while these were measured {}, so they are too low: no time is checked against them, shares of them are "
    "marked ~, and the next `mrb bench` or `mrb doctor` on an idle machine measures them again"
)


class Nodes(NamedTuple):
    """The NUMA nodes of the system, and the nodes that kernels use."""

    system: Topology
    used: Topology | None

    def sentence(self) -> str:
        count, used = len(self.system.nodes), self.used
        mind = "no kernel uses them" if used is None else f"kernels use {used.text}"
        return f"{count} of memory, processors {self.system.text}; {mind} (MRB_NODES)"


def doctor_command(
    again: Annotated[
        bool,
        typer.Option("--again", help="Measure the roofs again and keep the highest rates."),
    ] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Instead, measure how small a slow-down is found here.")
    ] = False,
    trials: Annotated[
        int | None,
        typer.Option(
            help=f"With --power: how often to compare the same code (default {DEFAULT_TRIALS}); each "
            "slow-down is compared half as often.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --power: the picture to write (default power.png), with a JSON file of the same name.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Instead, try every GPU kernel once on cuda, cuda:1, ... and say which are wrong.",
            show_default=False,
        ),
    ] = "",
    impl: Annotated[str, typer.Option(help="With --device: only these kernels, as a shell pattern.")] = "*",
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """Show this machine and its peak rates (roofs), which are measured once.

    \b
    Examples:
      mrb doctor
      mrb doctor --again --json
      mrb doctor --device cuda                          before anything else on a new GPU
      mrb doctor --power                                about 4 minutes
      mrb doctor --power --trials 200 --out power.png   about 30 minutes

    The roofs are kept in ~/.cache/moe-routing-bench (or MRB_HOME), one file per
    machine: bytes per second by working set, operations per second by unit.
    Roofs that were measured on a busy machine are too low. They are marked, and
    the next `mrb doctor` or `mrb bench` on an idle machine measures them again.
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
    machine, now = this_machine(), noise_now()
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
    must_exist(device)
    tried = list(try_all(memory_place(device), impl)) if as_json else show_all(device, impl)
    if not tried:
        fail(f"no GPU kernel matches --impl {impl}")
    if as_json:
        show_json({"device": device, "tried": [one._asdict() for one in tried]})
    else:
        show_summary(tried)
    raise typer.Exit(int(any(one.answer == "wrong" for one in tried)))


def _cannot_run() -> dict[str, str]:
    return {
        f"{op.name}.{entry.spec}": entry.reason
        for op in all_ops().values()
        for entry in find_all(op, configs=False)
        if entry.implementation is None
    }


def _show(machine: Machine, now: NoiseReading, roofs: Roofs, cannot: dict[str, str], nodes: Nodes) -> None:
    facts = two_columns(16)
    facts.add_row("machine", machine.name)
    facts.add_row("processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB")
    if len(nodes.system.nodes) > 1 or nodes.used:
        facts.add_row("nodes", nodes.sentence())
    facts.add_row("instructions", ", ".join(machine.instructions) or "nothing notable")
    facts.add_row("GPUs", ", ".join(machine.gpus) or "none, so nothing is timed on a GPU")
    facts.add_row("software", f"{machine.system}, Python {machine.python}, torch {machine.torch}")
    complaints = now.complaints(machine.cores)
    for label, text in zip(["noise"] + [""] * len(complaints), complaints or ["quiet"], strict=False):
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
    measured = f"the highest rates so far, by {roofs.how or 'torch'}, kept in {roofs_path(roofs.machine)}"
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
    """Writes 65536 as 64K."""
    for unit, factor in (("G", 2**30), ("M", 2**20)):
        if count >= factor:
            return f"{count // factor}{unit}"
    return f"{count // 2**10}K"


def _document(
    machine: Machine, now: NoiseReading, roofs: Roofs, cannot: dict[str, str], nodes: Nodes
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
    torch.set_num_threads(1)  # this process computes between samples and must not use the other cores
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

"""mrb doctor: what this machine is, what it can do at most, and what cannot run on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.bench.machine import Machine, Weather, this_machine, weather
from moe_routing_bench.bench.roofs import Roofs, measure_roofs, roofs_path, store_roofs, stored_roofs
from moe_routing_bench.cli.finding import IncludePath, include_all
from moe_routing_bench.cli.terminal import Json, console, show, show_json, two_columns, user_mistakes
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops


def doctor_command(
    again: Annotated[
        bool, typer.Option("--again", help="Measure the roofs anew, even if they are known.")
    ] = False,
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """What is this machine, and what can it do at most? Measures its roofs once and remembers them.

    \b
    Examples:
      mrb doctor
      mrb doctor --again --json

    \b
    The roofs are kept in ~/.cache/moe-routing-bench (or MRB_HOME), a file per machine.
    """
    include_all(include_path)
    machine, now = this_machine(), weather()
    with user_mistakes():
        roofs = None if again else stored_roofs(machine.name)
    if roofs is None:
        threads = tuple(sorted({1, machine.cores}))
        out = console(stderr=True)
        with out.status("measuring roofs, about 10 s") as status:
            roofs = measure_roofs(machine.name, threads, lambda what: status.update(f"measuring {what}"))
        store_roofs(roofs)
    cannot = _cannot_run()
    if as_json:
        show_json(_document(machine, now, roofs, cannot))
    else:
        _show(machine, now, roofs, cannot)


def _cannot_run() -> dict[str, str]:
    return {
        f"{op.name}.{found.spec}": found.reason
        for op in all_ops().values()
        for found in find_all(op, configs=False)
        if found.implementation is None
    }


def _show(machine: Machine, now: Weather, roofs: Roofs, cannot: dict[str, str]) -> None:
    facts = two_columns(16)
    facts.add_row("machine", machine.name)
    facts.add_row("processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB")
    facts.add_row("instructions", ", ".join(machine.instructions) or "nothing notable")
    facts.add_row("GPUs", ", ".join(machine.gpus) or "none; nothing here is timed on a GPU")
    facts.add_row("software", f"{machine.system}, Python {machine.python}, torch {machine.torch}")
    complaints = now.complaints(machine.cores)
    for label, text in zip(["weather"] + [""] * len(complaints), complaints or ["quiet"], strict=False):
        facts.add_row(label, Text(text, "yellow" if complaints else "green"))
    show(facts, "")
    table = two_columns(16)
    for threads in sorted(roofs.read_bytes):
        gemm = ", ".join(f"{name} {rates[threads] / 1e9:,.0f}" for name, rates in roofs.gemm_flops.items())
        memory = (
            f"read {roofs.read_bytes[threads] / 1e9:.1f}, copy {roofs.copy_bytes[threads] / 1e9:.1f} GB/s"
        )
        who = "1 thread" if threads == 1 else f"{threads} threads"
        table.add_row(f"roofs, {who}", f"{memory}; matmul {gemm} GFLOP/s")
    table.add_row("", Text(f"measured in {roofs.seconds:.0f} s, kept in {roofs_path(roofs.machine)}", "dim"))
    show(table)
    if cannot:
        show("", "Cannot run here")
        absent = two_columns(16)
        for name, reason in cannot.items():
            absent.add_row(f"  {name}", reason)
        show(absent)
    else:
        show("", "Every implementation can be loaded here; `mrb explain OP` says what runs for your sizes.")


def _document(machine: Machine, now: Weather, roofs: Roofs, cannot: dict[str, str]) -> dict[str, Any]:
    return {
        "machine": machine.to_dict(),
        "weather": {**vars(now), "complaints": now.complaints(machine.cores)},
        "roofs": roofs.model_dump(),
        "cannot_run": cannot,
    }

"""mrb gpu rehearse: the first hour on a GPU, without one, then planted faults."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from moe_routing_bench.api import CheckReport, PlannedSweep
from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    check_device,
    sweep_experiments,
)
from moe_routing_bench.bench.device import cuda_of, memory_place, others_on
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.warming import warm
from moe_routing_bench.cli.options import Json, fail, show_json, user_mistakes
from moe_routing_bench.core.names import ArgumentError
from moe_routing_bench.report.console import show, spinner
from moe_routing_bench.report.finding import results_folders
from moe_routing_bench.report.page import make_page
from moe_routing_bench.report.reading import read
from moe_routing_bench.workloads.experiment import CARDS, FAULTS, Experiment, ImplementationRef
from moe_routing_bench.workloads.gpu_cases import GPU_HOUR

SEEN = {
    "oom": Status.OOM,
    "poison": Status.RUNTIME_ERROR,
    "compiler": Status.CRASHED,
    "events": Status.RUNTIME_ERROR,
}
SAID = {"shared": "Another process", "clock": "times as long in later rounds"}
NAMES = ("gather_sum", "index_add", "embedding_bag")


def rehearse_command(
    card: Annotated[str, typer.Argument(help=f"The GPU to pretend: {', '.join(CARDS)}.")] = CARDS[0],
    out: Annotated[Path, typer.Option(help="The results folder; its page is report.html.")] = Path(
        "rehearsal"
    ),
    as_json: Json = False,
) -> None:
    """Take every step of the first hour on a GPU, on the CPU, then plant faults and see that each is found.

    \b
    Examples:
      mrb gpu rehearse
      mrb gpu rehearse mi300x --out rehearsal

    Its sizes are tiny and its times mean nothing. Exit code 1: a step failed, or
    a fault was not found.
    """
    if card not in CARDS:
        fail(f"there is no card {card!r} to pretend; there are {', '.join(CARDS)}")
    device, done = f"pretend:{card}", dict[str, str]()

    def took(step: str, wrong: str, began: float) -> None:
        done[step] = wrong
        if not as_json:
            answer = Text(f"{step}: {wrong or 'as it should be'}", "red" if wrong else "green")
            show(answer.append(f", {time.perf_counter() - began:.0f} s", "dim"))

    with user_mistakes():
        began = time.perf_counter()
        check_device(device)
        if not as_json:
            show(f"{cuda_of(device).get_device_name()}: times of this run say nothing about a GPU")
        took("doctor", others_on(device), began)
        began = time.perf_counter()
        report = CheckReport.asked(("float32",), memory_place(device), None)
        report.select("combine", "*", (), quick=True).run(progress=False)
        took("check --quick", "; ".join(report.failures), began)
        measure = MeasureOptions(axes={"device": device, "max_rounds": 8, "min_rounds": 8, "threads": 1})
        experiments = sweep_experiments(GPU_HOUR, SizeOptions(), WhatOptions(), measure)
        began = time.perf_counter()
        with spinner("compiling") as doing:
            took("compile --warm", "; ".join(warm(experiments, 2, doing)), began)
        began = time.perf_counter()
        planned = PlannedSweep.of(experiments, out)
        outcomes = planned.run(suite=GPU_HOUR, roofs=None, progress=not as_json)
        took(f"sweep {GPU_HOUR}", _unexpected(outcomes), began)
        began = time.perf_counter()
        with results_folders([out]) as contents:
            make_page(read(contents), "mrb gpu rehearse").write(out / "report.html")
        took("report", "" if planned.plan.todo or planned.plan.done else "nothing was measured", began)
    for fault, meaning in FAULTS.items():
        began = time.perf_counter()
        took(f"{fault}: {meaning}", "" if _finds(device, fault) else "not found", began)
    if as_json:
        show_json({"device": device, "steps": done})
    raise typer.Exit(int(any(done.values())))


def _unexpected(outcomes: list[CellOutcome]) -> str:
    """Returns the implementations that neither passed nor said that they cannot run here."""
    return "; ".join(
        f"{outcome.experiment.case}: {one.label} is {one.status} ({one.reason})"
        for outcome in outcomes
        for one in outcome.implementations
        if one.status not in (Status.PASSED, Status.UNSUPPORTED)
    )


def _finds(device: str, fault: str) -> bool:
    """Plants it, and returns whether it was found where it is and hurt nobody else."""
    if fault == "driver":
        try:
            check_device(f"{device}:{fault}")
        except ArgumentError:
            return True
        return False
    everybody = fault in ("events", *SAID)
    rounds = 60 if fault == "clock" else 8
    experiment = Experiment(
        span="combine", T=64, D=32, F=16, E=8, K=2, dtype="float32", min_rounds=rounds, max_rounds=rounds,
        checked=1, target=0.5, max_seconds=300, device=f"{device}:{fault}", view="cuda_device",
        implementations=tuple(ImplementationRef(name=name) for name in NAMES),
    )  # fmt: skip
    if not everybody:
        experiment = replace(experiment, device=f"{experiment.device}@{NAMES[1]}")
    outcome = run_cell(experiment)
    states = [one.status for one in outcome.implementations]
    if fault in SAID:
        return states == [Status.PASSED] * 3 and any(SAID[fault] in note for note in outcome.notes)
    if everybody:
        return states == [SEEN[fault]] * 3
    return states == [Status.PASSED, SEEN[fault], Status.PASSED]

"""mrb model profile: shows where the time goes, operation by operation, for each implementation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from moe_routing_bench.api import saving_folder
from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    chosen_cases,
    made_experiments,
)
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import stored_roofs
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.cli.bench import end, measured
from moe_routing_bench.cli.options import Json, fail, include_all, show_json, user_mistakes, with_options
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.report.block_pictures import draw_shares
from moe_routing_bench.report.console import fitted, heading, show
from moe_routing_bench.report.outcome_tables import outcome_document, show_outcome
from moe_routing_bench.report.pictures import check_picture_path
from moe_routing_bench.studies.profiles import IMPLEMENTATIONS, SHARES, Profile, profile, profiled
from moe_routing_bench.workloads.experiment import Experiment

CASE = "seed-qwen/e64"
# other spans than a MoE layer, each with the case that is profiled if none is named
SPANS = {
    "attention": "seed-attention/founding-float32",
    "decoder": "seed-dense/1x64",
    "block": "seed-moe-block/1x64",
}


@with_options
def profile_command(
    sizes: SizeOptions,
    what: WhatOptions,
    measure: MeasureOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"{', '.join(SPANS)}; or a case, suite or model (`mrb list cases`) as a MoE layer. "
            f"Default: {CASE}.",
        ),
    ] = None,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls to profile.", min=1, max=1000)] = 10,
    rows: Annotated[int, typer.Option(metavar="N", help="Rows of each table.", min=1)] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Save in this folder. Default: the one that `mrb results` reads.")
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Save records and samples.")] = True,
    chrome: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write profiler traces: FILE with a name before .json."),
    ] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark the stages with NVTX, for nsys.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the shares as .png.")] = None,
    as_json: Json = False,
) -> None:
    """Show where the time goes in Transformers' MoE layer, in a hand-ordered one in torch, and in ours; or in
    attention, a dense decoder or a MoE block.

    \b
    Examples:
      mrb model profile                        128 tokens through a Qwen MoE block
      mrb model profile attention --calls 100
      mrb model profile decoder --case seed-dense/4x128 --dtype float32
      mrb model profile seed-qwen --full --dtype float32
      mrb model profile olmoe-1b-7b --tokens 512 --chrome t.json --picture t.png

    --impl takes what `mrb bench` takes. The first table has the times of
    `mrb bench`, taken without the profiler. Records hold the operations.
    """
    include_all(what.include_path)
    with user_mistakes():
        if picture is not None:
            check_picture_path(picture)
        if chrome is not None and (chrome.suffix != ".json" or not chrome.parent.is_dir()):
            raise ValueError(f"{chrome} should end in .json and lie in a folder that exists")
        span = span_named(name if name in SPANS else "layer")
        if name in MODELS:
            sizes = replace(sizes, model=name)
        elif not (sizes.lists() or sizes.model or sizes.case) or (name is not None and span.name != name):
            sizes = replace(sizes, case=SPANS.get(span.name, name or CASE))
        asked = what
        if span.name == "layer":
            what = replace(what, impl=what.impl or list(IMPLEMENTATIONS))
        try:
            chosen = chosen_cases(span, sizes, what)
            experiments = made_experiments(chosen, what, measure.settled())
        except NotImplementedError as reason:
            fail(str(reason))
        if picture is not None and len(experiments) > 1:
            several = f"{name} is {len(experiments)} cases"
            raise ValueError(f"{several}; a picture shows one, such as {chosen[0].case}")
        ranges = _nvtx() if nvtx else None
        if measure.device not in (None, "cpu") and not torch.cuda.is_available():
            raise ValueError(f"there is no {measure.device} here; leave out --device")
        folder = saving_folder(out, save=save)
    documents = []
    found: list[dict[str, Profile]] = []

    def complete(outcome: CellOutcome) -> CellOutcome:
        found.append(_profiles(outcome, calls=calls, chrome=chrome, nvtx=ranges))
        return _with_operations(outcome, found[-1], rows)

    with user_mistakes():
        roofs = stored_roofs(this_machine().name)
    seconds = measure.seconds_for(experiments)
    outcomes = measured(
        experiments, folder, suite=name or "", seconds=seconds, roofs=roofs, complete=complete
    )
    for outcome, profiles in zip(outcomes, found, strict=True):
        documents.append({**outcome_document(outcome), "profiles": _documents(profiles)})
        if picture is not None and any(one.shares for one in profiles.values()):
            draw_shares(outcome, {label: one.shares for label, one in profiles.items()}, picture)
        if not as_json:
            _show(outcome, profiles, rows, chrome)
    if as_json:
        show_json(documents)
    end(outcomes, asked)


def _with_operations(outcome: CellOutcome, profiles: dict[str, Profile], rows: int) -> CellOutcome:
    """The outcome as it is recorded: with the longest operations of each implementation."""
    return replace(
        outcome,
        outcomes=tuple(
            replace(one, profile=profiles[one.implementation.text].operations(rows))
            if one in outcome.implementations and one.implementation.text in profiles
            else one
            for one in outcome.outcomes
        ),
    )


def _profiles(outcome: CellOutcome, *, calls: int, chrome: Path | None, nvtx: Any) -> dict[str, Profile]:
    """Profiles every implementation that passed, in this process and with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(outcome.experiment.threads)
    try:
        inputs = Inputs(outcome.experiment)
        return {
            one.implementation.text: profile(
                profiled(one.implementation, inputs, nvtx),
                inputs,
                calls=calls,
                chrome=None
                if chrome is None
                else _named_file(chrome, outcome.experiment, one.implementation.text),
            )
            for one in outcome.implementations
            if one.samples
        }
    finally:
        torch.set_num_threads(before)


def _nvtx() -> Any:
    """Returns torch.cuda.nvtx, or fails with a sentence if it does not work here."""
    try:
        torch.cuda.nvtx.range_push("mrb")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        fail("this torch has no NVTX; install one built with CUDA, or leave out --nvtx")
    return torch.cuda.nvtx


def _named_file(chrome: Path, experiment: Experiment, name: str) -> Path:
    words = re.sub(r"[^\w.-]+", "-", f"{experiment.case.replace('/', '-')}.{name}").strip("-")
    return chrome.with_name(f"{chrome.stem}.{words}.json")


def _show(outcome: CellOutcome, profiles: dict[str, Profile], rows: int, chrome: Path | None) -> None:
    show_outcome(outcome)
    if any(one.shares for one in profiles.values()):
        show("", *_shares_table(profiles))
    if profiles:
        show("", *_totals_table(profiles))
    for name, one in profiles.items():
        show("", heading(name, f"{one.calls} calls under the profiler, {1e3 * one.seconds:.2f} ms each"))
        show(operations_table(one, rows))
    if chrome is not None:
        show("", f"Profiler traces are in {chrome.parent}; open them in chrome://tracing or ui.perfetto.dev.")


def _shares_table(profiles: dict[str, Profile]) -> list[RenderableType]:
    """Makes a table that shows how the time of each profile is divided."""
    names = [name for name in SHARES if any(name in one.shares for one in profiles.values())]
    titles = {"gemm": "GEMM", "fused": "one kernel", "python": "Python"}
    numbers = {
        titles.get(name, name): [
            f"{100 * one.shares[name]:.1f} %" if name in one.shares else "" for one in profiles.values()
        ]
        for name in names
    }
    return fitted({"share of its own time": list(profiles)}, numbers)


def _totals_table(profiles: dict[str, Profile]) -> list[RenderableType]:
    """One row for each profile: the sums of its operations, of one call."""
    totals = {name: one.total for name, one in profiles.items()}
    calls = {name: one.calls for name, one in profiles.items()}
    on_device = any(row.device_us for row in totals.values())
    numbers = {
        "self CPU": [_time(row.self_us / calls[name]) for name, row in totals.items()],
        "CPU total": [_time(row.total_us / calls[name]) for name, row in totals.items()],
        **(
            {"device total": [_time(row.device_us / calls[name]) for name, row in totals.items()]}
            if on_device
            else {}
        ),
        "operations": [f"{row.calls / calls[name]:,.0f}" for name, row in totals.items()],
        "memory": [_memory(row.memory_bytes / calls[name]) for name, row in totals.items()],
    }
    return fitted({"one call under the profiler": list(profiles)}, numbers)


def operations_table(one: Profile, rows: int) -> Table:
    """Makes a table like torch's: name, self, total, calls, memory, and device columns if a device was
    used."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("operation", overflow="fold", min_width=30)
    on_device = any(row.self_device_us for row in one.rows)
    titles = [
        "self CPU %",
        "self CPU",
        "CPU total",
        *(["self CUDA", "CUDA total"] if on_device else []),
        "calls",
        "memory",
    ]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    whole = sum(row.self_us for row in one.rows) or 1.0
    for row in one.rows[:rows]:
        device = [_time(row.self_device_us), _time(row.device_us)] if on_device else []
        table.add_row(
            row.name, f"{100 * row.self_us / whole:.1f} %", _time(row.self_us), _time(row.total_us), *device,
            f"{row.calls}", _memory(row.memory_bytes),
        )  # fmt: skip
    if len(one.rows) > rows:
        rest = sum(row.self_us for row in one.rows[rows:])
        table.add_row(Text(f"{len(one.rows) - rows} more", "dim"), f"{100 * rest / whole:.1f} %", _time(rest))
    return table


def _time(us: float) -> str:
    return f"{us / 1e3:.3f} ms" if us < 1e6 else f"{us / 1e6:.3f} s"


def _memory(number: float) -> str:
    return f"{number / 2**20:,.1f} MiB"


def _documents(profiles: dict[str, Profile]) -> dict[str, Any]:
    return {
        name: {
            "calls": one.calls,
            "seconds": one.seconds,
            "shares": dict(one.shares),
            "operations": [vars(row) for row in one.rows],
        }
        for name, one in profiles.items()
    }

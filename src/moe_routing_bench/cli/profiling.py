"""mrb profile: where the time of a MoE block goes, beside Transformers' block and a hand-ordered path."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from moe_routing_bench.bench.cell import Policy
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.paired import Race, race, threads_set
from moe_routing_bench.bench.weather import WeatherSpan, weather
from moe_routing_bench.cli.block_pictures import draw_shares
from moe_routing_bench.cli.blocks import race_document, race_table, show_rest, told_to
from moe_routing_bench.cli.choosing import WORKLOAD, chosen_cases, split_words
from moe_routing_bench.cli.pictures import check_picture_path
from moe_routing_bench.cli.progress import shown_progress
from moe_routing_bench.cli.terminal import Json, fail, heading, show, show_json, user_mistakes
from moe_routing_bench.published import MODELS
from moe_routing_bench.studies.profiles import DEFAULT_CONTENDERS, SHARES, MoEInputs, Profile, profile
from moe_routing_bench.workloads.cases import BenchCase

profile_app = typer.Typer(
    no_args_is_help=True, help="Where the time of a MoE block goes, operation by operation."
)


@profile_app.callback()
def _top() -> None:
    """Where the time of a MoE block goes, operation by operation."""


@profile_app.command("block")
def profile_block_command(
    case: Annotated[
        str | None, typer.Argument(help="A case, suite or model (`mrb list cases`); else seed-qwen/e64.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="T, tokens in the batch")] = None,
    width: Annotated[int | None, typer.Option(help="D, the model's width")] = None,
    hidden: Annotated[int | None, typer.Option(help="F, an expert's hidden width")] = None,
    experts: Annotated[int | None, typer.Option(help="E, experts of the layer")] = None,
    choices: Annotated[int | None, typer.Option(help="K, experts per token")] = None,
    full: Annotated[bool, typer.Option("--full", help="Full size even if too big for a laptop.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16")] = None,
    workload: Annotated[str, typer.Option(help="Routing (`mrb list workloads`).")] = WORKLOAD,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers(eager|grouped_mm|batched_mm), hand-ordered, ours, ours(IMPLEMENTATION); the "
            "first is the baseline. Repeatable."
        ),
    ] = None,
    calls: Annotated[int, typer.Option(help="Calls under the profiler.", min=1, max=1000)] = 10,
    rows: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 10,
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds without the profiler at most.")] = 200,
    seconds: Annotated[float, typer.Option(help="Seconds of them at most.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of routing and data.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: then with device columns.")] = "cpu",
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chrome traces: FILE with each name before .json.")
    ] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="NVTX ranges around the stages, for nsys.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Stacked shares as .png.")] = None,
    as_json: Json = False,
) -> None:
    """Where does the time go? torch.profiler over Transformers' block, a hand-ordered torch path, and ours.

    \b
    Examples:
      mrb profile block                                  128 tokens through a Qwen MoE block
      mrb profile block seed-qwen --full --dtype float32
      mrb profile block olmoe-1b-7b --tokens 512 --chrome trace.json --picture shares.png

    \b
    Times in the first table are taken without the profiler, in interleaved rounds; results are judged.
    """
    with user_mistakes():
        if picture is not None:
            check_picture_path(picture)
        if chrome is not None and (chrome.suffix != ".json" or not chrome.parent.is_dir()):
            raise ValueError(f"{chrome} should end in .json and lie in a folder that exists")
        sizes = {"T": tokens, "D": width, "F": hidden, "E": experts, "K": choices}
        if case is None and not any(sizes.values()):
            case = "seed-qwen/e64"
        named = case is not None and case in MODELS
        found = chosen_cases(
            "layer", model_name=case if named else None, case_name=None if named else case,
            sizes=sizes, dtype=dtype, activation=None, bias=False, shared=0, full=full,
        )  # fmt: skip
        if picture is not None and len(found) > 1:
            raise ValueError(f"{case} is {len(found)} cases; a picture shows one, such as {found[0].name}")
        policy = Policy(
            threads=threads, max_rounds=rounds, min_rounds=min(20, rounds), max_seconds=seconds, checked=2
        )
        ranges = _nvtx() if nvtx else None
        if device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"there is no {device} here; leave out --device")
    documents = []
    with shown_progress(len(found)) as progress:
        for one in found:
            tell = told_to(progress, one.name)
            before = weather()
            with user_mistakes():
                inputs = MoEInputs(Inputs(one, workload, seed=seed), device=device, nvtx=ranges)
                specs = [word for text in contender or () for word in split_words(text)]
                profiled = [inputs.contender(spec) for spec in specs or DEFAULT_CONTENDERS]
            outcome = race(
                [p.contender for p in profiled], x_of=inputs.x, judge=inputs.judge, policy=policy, tell=tell,
                device=device,
            )  # fmt: skip
            profiles = {}
            for p, row in zip(profiled, outcome.rows, strict=True):
                if row.samples:
                    tell(f"profiling {p.contender.name}", 0.97)
                    file = None if chrome is None else _named_file(chrome, one, p.contender.name)
                    with threads_set(threads):
                        profiles[p.contender.name] = profile(p, inputs.x, calls=calls, chrome=file)
            sky = WeatherSpan(before=before, after=weather())
            progress.cell_done()
            documents.append(_document(one, workload, outcome, profiles, policy, sky))
            if picture is not None:
                draw_shares(one, workload, outcome, {n: p.shares for n, p in profiles.items()}, picture)
            if not as_json:
                progress.pause(partial(_show, one, workload, outcome, profiles, policy, sky, rows, chrome))
    if as_json:
        show_json(documents)


def _nvtx() -> Any:
    """torch.cuda.nvtx if it works here; a sentence if not."""
    try:
        torch.cuda.nvtx.range_push("mrb")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        fail("this torch has no NVTX; install one built with CUDA, or leave out --nvtx")
    return torch.cuda.nvtx


def _named_file(chrome: Path, case: BenchCase, name: str) -> Path:
    words = re.sub(r"[^\w.-]+", "-", f"{case.name.replace('/', '-')}.{name}").strip("-")
    return chrome.with_name(f"{chrome.stem}.{words}.json")


def _show(
    case: BenchCase, workload: str, outcome: Race, profiles: dict[str, Profile], policy: Policy,
    sky: WeatherSpan, rows: int, chrome: Path | None,
) -> None:  # fmt: skip
    s = case.shape
    told = f"MoE block, T={s.T} D={s.D} F={s.F} E={s.E} K={s.K}, {case.dtype}, {workload}"
    show("", heading(case.name, told), race_table(outcome, {}))
    show("", _shares_table(profiles))
    for name, found in profiles.items():
        show("", heading(name, f"{found.calls} calls under the profiler, {1e3 * found.seconds:.2f} ms each"))
        show(operations_table(found, rows))
    notes = []
    if case.scaled_from:
        notes.append(
            f"{case.scaled_from} is too big for here; this stands in for it, and says nothing about the full "
            "size (--full)."
        )
    if chrome is not None:
        notes.append(f"Chrome traces are beside {chrome}; open them in chrome://tracing or ui.perfetto.dev.")
    show_rest(outcome, policy, sky, notes)


def _shares_table(profiles: dict[str, Profile]) -> Table:
    """One row for each: how its time under the profiler is divided."""
    names = [name for name in SHARES if any(name in found.shares for found in profiles.values())]
    titles = {"gemm": "GEMM", "fused": "one kernel", "python": "Python"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("share of its own time", overflow="fold")
    for name in names:
        table.add_column(titles.get(name, name), justify="right", no_wrap=True)
    for label, found in profiles.items():
        cells = [f"{100 * found.shares[n]:.1f} %" if n in found.shares else "" for n in names]
        table.add_row(label, *cells)
    return table


def operations_table(found: Profile, rows: int) -> Table:
    """The familiar form: name, self, total, calls; device columns if a device did anything."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("operation", overflow="fold", min_width=30)
    on_device = any(row.self_device_us for row in found.rows)
    titles = [
        "self CPU %",
        "self CPU",
        "CPU total",
        *(["self CUDA", "CUDA total"] if on_device else []),
        "calls",
    ]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    whole = sum(row.self_us for row in found.rows) or 1.0
    for row in found.rows[:rows]:
        device = [_time(row.self_device_us), _time(row.device_us)] if on_device else []
        table.add_row(
            row.name, f"{100 * row.self_us / whole:.1f} %", _time(row.self_us), _time(row.total_us), *device,
            f"{row.calls}",
        )  # fmt: skip
    if len(found.rows) > rows:
        rest = sum(row.self_us for row in found.rows[rows:])
        table.add_row(
            Text(f"{len(found.rows) - rows} more", "dim"), f"{100 * rest / whole:.1f} %", _time(rest)
        )
    return table


def _time(us: float) -> str:
    return f"{us / 1e3:.3f} ms" if us < 1e6 else f"{us / 1e6:.3f} s"


def _document(
    case: BenchCase,
    workload: str,
    outcome: Race,
    profiles: dict[str, Profile],
    policy: Policy,
    sky: WeatherSpan,
) -> dict[str, Any]:
    return {
        "case": case.name,
        "scaled_from": case.scaled_from,
        "span": "MoE block",
        "shape": vars(case.shape),
        "dtype": case.dtype,
        "workload": workload,
        **race_document(outcome, policy, sky),
        "profiles": {
            name: {
                "calls": found.calls,
                "seconds": found.seconds,
                "shares": dict(found.shares),
                "operations": [vars(row) for row in found.rows],
            }
            for name, found in profiles.items()
        },
    }

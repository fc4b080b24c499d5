"""mrb bench block and mrb bench layer --checkpoint: whole blocks, measured in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_routing_bench.bench.blocks import BlockInputs, contenders_of
from moe_routing_bench.bench.cell import Policy
from moe_routing_bench.bench.checkpoints import CheckpointInputs
from moe_routing_bench.bench.paired import Race, Row, race
from moe_routing_bench.bench.runner import Progress
from moe_routing_bench.bench.weather import WeatherSpan, weather
from moe_routing_bench.cli.choosing import WORKLOAD, split_words
from moe_routing_bench.cli.progress import shown_progress
from moe_routing_bench.cli.tables import STYLES, short_label
from moe_routing_bench.cli.terminal import fail, heading, show, show_json, two_columns, user_mistakes
from moe_routing_bench.machine import this_machine
from moe_routing_bench.models.checkpoint import read_layer
from moe_routing_bench.workloads.cases import BenchCase

IN_PROCESS = "measured in this process, without the isolation `mrb bench` has otherwise"
NOT_HERE = (
    "a block is measured on the CPU in one process with hot caches: leave out --out, --cache, --processes, "
    "--stages, --device"
)


def bench_blocks(
    found: Sequence[BenchCase], *, workloads: Sequence[str] | None, impls: Sequence[str] | None, seed: int,
    policy: Policy, as_json: bool,
) -> None:  # fmt: skip
    """Decoder blocks: naive attention against SDPA, Transformers' block against ours."""
    names = [word for text in workloads or [WORKLOAD] for word in split_words(text)]
    specs = [word for text in impls or () for word in split_words(text)]
    documents = []
    with shown_progress(len(found) * len(names)) as progress:
        for case in found:
            for name in names:
                with user_mistakes():
                    try:
                        inputs = BlockInputs(case, name, seed=seed)
                        contenders = contenders_of(inputs, specs)
                    except NotImplementedError as reason:
                        fail(str(reason))
                before = weather()
                outcome = race(
                    contenders, x_of=inputs.x, judge=inputs.judge, policy=policy,
                    tell=told_to(progress, f"{case.name} {name}"),
                )  # fmt: skip
                sky = WeatherSpan(before=before, after=weather())
                progress.cell_done()
                documents.append(_block_document(inputs, name, outcome, policy, sky))
                if not as_json:
                    progress.pause(partial(_show_block, inputs, name, outcome, policy, sky))
    if as_json:
        show_json(documents)


def bench_checkpoint(
    folder: Path, layer: int, *, tokens: int, workloads: Sequence[str] | None, impls: Sequence[str] | None,
    layout: str, seed: int, policy: Policy, as_json: bool,
) -> None:  # fmt: skip
    """Implementations of expert_ffn on the weights of one layer of a checkpoint."""
    names = [word for text in workloads or [""] for word in split_words(text) or [""]]
    specs = [word for text in impls or () for word in split_words(text)]
    documents = []
    with shown_progress(len(names)) as progress:
        with user_mistakes():
            try:
                read = read_layer(folder, layer)
            except NotImplementedError as reason:
                fail(str(reason))
        for name in names:
            with user_mistakes():
                inputs = CheckpointInputs(read, tokens=tokens, workload=name, layout=layout, seed=seed)
                contenders = inputs.contenders(specs)
            before = weather()
            outcome = race(
                contenders, x_of=inputs.call, judge=inputs.judge, policy=policy,
                tell=told_to(progress, f"{folder} layer {layer}"),
            )  # fmt: skip
            sky = WeatherSpan(before=before, after=weather())
            progress.cell_done()
            documents.append(_checkpoint_document(inputs, outcome, policy, sky))
            if not as_json:
                progress.pause(partial(_show_checkpoint, inputs, outcome, policy, sky))
    if as_json:
        show_json(documents)


def told_to(progress: Any, name: str) -> Callable[[str, float], None]:
    """What `race` calls, as the bar of cells wants it."""

    named: Any = SimpleNamespace(name=name)
    return lambda what, share: progress.tell(named, Progress(what=what, share=share))


def _show_block(inputs: BlockInputs, name: str, outcome: Race, policy: Policy, sky: WeatherSpan) -> None:
    case, s, a = inputs.case, inputs.case.shape, inputs.attention
    N = s.T // case.sequences
    told = (
        f"decoder block, {case.sequences} x {N} tokens, D={s.D} F={s.F} E={s.E} K={s.K}, {a.heads} heads "
        f"({a.kv_heads} of keys and values) of {a.head_dim}, {case.dtype}, {name}"
    )
    show("", heading(case.name, told))
    more: dict[str, Callable[[Row], str]] = {
        "tokens/s": lambda row: f"{s.T / (row.seconds or 1):,.0f}",
        "TFLOP/s": lambda row: f"{inputs.flops / (row.seconds or 1) / 1e12:.3f}",
    }
    show(race_table(outcome, more))
    show_shares(outcome)
    notes = [f"In the model, but not here: {a.note}."] if a.note else []
    if case.scaled_from:
        notes.append(
            f"{case.scaled_from} is too big for here; this stands in for it, and says nothing about the full "
            "size (--full)."
        )
    show_rest(outcome, policy, sky, notes)


def _show_checkpoint(inputs: CheckpointInputs, outcome: Race, policy: Policy, sky: WeatherSpan) -> None:
    layer, weights, load = inputs.layer, inputs.layer.weights, inputs.load.to_dict()
    told = (
        f"{layer.model_type}, T={inputs.T} D={weights.D} F={weights.F} E={weights.num_experts} "
        f"K={layer.K}, {str(weights.w_in_EDG.dtype).removeprefix('torch.')}, {inputs.layout}"
    )
    show("", heading(f"{layer.source} layer {layer.layer}", told))
    flops = inputs.cost.useful_flops
    show(race_table(outcome, {"TFLOP/s": lambda row: f"{flops / (row.seconds or 1) / 1e12:.3f}"}))
    routed = "by the layer's own router, on random x"
    if inputs.workload:
        routed = f"by the workload {inputs.workload}"
    notes = [
        f"Routed {routed}: {load['active_experts']} of {weights.num_experts} experts used, the busiest has "
        f"{load['max_over_mean']:.2f} times the mean. Timed: plan and experts."
    ]
    show_rest(outcome, policy, sky, notes)


def race_table(outcome: Race, more: dict[str, Callable[[Row], str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("what runs", overflow="fold")
    for name in ("ms", *more, "ratio", "99 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("max difference", justify="right", no_wrap=True)
    baseline = outcome.baseline
    timed = sorted((row for row in outcome.rows if row.samples), key=lambda row: median(row.samples))
    for row in timed:
        cells: list[Any] = [short_label(row.contender.name), f"{1e3 * median(row.samples):.3f}"]
        cells += [tell(row) for tell in more.values()]
        if (found := row.comparison) is None:
            cells += ["1", "", Text("baseline", "bold")]
        else:
            low, high = found.interval
            wanted = f" ({found.more_rounds} more rounds)" if found.more_rounds else ""
            cells += [f"{found.ratio:.3f}", f"{low:.3f} to {high:.3f}"]
            cells.append(Text(f"{found.verdict}{wanted}", STYLES[found.verdict]))
        first = row is outcome.rows[0] or row is baseline
        cells.append("" if first or row.difference is None else f"{row.difference:.2g}")
        table.add_row(*cells)
    return table


def show_shares(outcome: Race) -> None:
    rows = [row for row in outcome.rows if row.shares]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("share of its own time", overflow="fold")
    names = list(rows[0].shares)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(short_label(row.contender.name), *(f"{100 * row.shares[n]:.1f} %" for n in names))
    show("", table)


def show_rest(outcome: Race, policy: Policy, sky: WeatherSpan, notes: Sequence[str]) -> None:
    """What runs under each name, what was not timed and why, and how it was measured."""
    about = two_columns(20)
    for row in outcome.rows:
        if row.reason:
            style, status = ("yellow", "UNSUPPORTED") if row.contender.missing else ("red", "WRONG")
            told = Text.assemble((status, style), f"  {row.reason}")
            about.add_row(f"  {short_label(row.contender.name)}", told)
        elif row.judged is not None:
            error = f"right: error {row.judged.max_error:.2g}, allowed {row.judged.max_bound:.2g}"
            about.add_row(f"  {short_label(row.contender.name)}", f"{row.contender.label}; {error}")
    show("", about, "")
    remarks = list(notes)
    if outcome.aa_floor is not None:
        threads = "1 thread" if policy.threads == 1 else f"{policy.threads} threads"
        remarks.append(
            f"{outcome.rounds} interleaved rounds on {threads} ({outcome.stop_reason}); the baseline's own "
            f"twin is {100 * outcome.aa_floor:.1f} % away; {outcome.checked} timed results judged; "
            f"{IN_PROCESS}."
        )
    remarks += [f"Weather: {one}." for one in sky.complaints(this_machine().cores, policy.threads)]
    show(*(Text(note, "dim") for note in remarks))


def race_document(outcome: Race, policy: Policy, sky: WeatherSpan) -> dict[str, Any]:
    return {
        "machine": this_machine().name,
        "torch": this_machine().torch,
        "isolation": IN_PROCESS,
        "threads": policy.threads,
        "rounds": outcome.rounds,
        "stop_reason": outcome.stop_reason,
        "aa_floor": outcome.aa_floor,
        "checked_timed_calls": outcome.checked,
        "weather": sky.to_dict(),
        "contenders": [
            {
                "name": row.contender.name,
                "runs": row.contender.label,
                "reason": row.reason,
                "median_seconds": row.seconds,
                "max_difference": row.difference,
                "max_error": None if row.judged is None else row.judged.max_error,
                "max_bound": None if row.judged is None else row.judged.max_bound,
                "comparison": None if row.comparison is None else vars(row.comparison),
                "shares": dict(row.shares),
                "samples": row.samples,
            }
            for row in outcome.rows
        ],
    }


def _block_document(
    inputs: BlockInputs, name: str, outcome: Race, policy: Policy, sky: WeatherSpan
) -> dict[str, Any]:
    case = inputs.case
    return {
        "case": case.name,
        "scaled_from": case.scaled_from,
        "span": "block",
        "shape": vars(case.shape),
        "sequences": case.sequences,
        "attention": vars(inputs.attention),
        "dtype": case.dtype,
        "workload": name,
        "useful_flops": inputs.flops,
        **race_document(outcome, policy, sky),
    }


def _checkpoint_document(
    inputs: CheckpointInputs, outcome: Race, policy: Policy, sky: WeatherSpan
) -> dict[str, Any]:
    layer = inputs.layer
    return {
        "checkpoint": layer.source,
        "layer": layer.layer,
        "model_type": layer.model_type,
        "tokens": inputs.T,
        "workload": inputs.workload or "the layer's own router on random x",
        "load": inputs.load.to_dict(),
        "useful_flops": inputs.cost.useful_flops,
        **race_document(outcome, policy, sky),
    }

"""mrb parallel serve: finds the deployment of a model with most tokens per second."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from moe_routing_bench.cli.options import Json, show_json, user_mistakes
from moe_routing_bench.cli.parallel import SHOWN, FabricName
from moe_routing_bench.core.names import no_such, option_numbers
from moe_routing_bench.core.published import model as published_model
from moe_routing_bench.planner.fabric import read_fabric
from moe_routing_bench.planner.serving import (
    FORMATS,
    FRAGMENTED,
    HIDDEN,
    HIDDEN_RANGE,
    RESTS,
    WORKSPACE,
    Deployment,
    Phase,
    Served,
    serve,
)
from moe_routing_bench.report.console import fitted, heading, show, spinner
from moe_routing_bench.workloads.workload import check_name


def serve_command(
    model: Annotated[str, typer.Option(help="A name from `mrb list models`.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")],
    phase: Annotated[Phase, typer.Option(help="What the GPUs do.")] = "decode",
    context: Annotated[int, typer.Option(help="Tokens of a sequence: of its cache, or of a prompt.")] = 4096,
    latency_ms: Annotated[float, typer.Option(help="The most for a step; in decode that is a token.")] = 1e9,
    format: Annotated[str, typer.Option(help=f"Of weights: {', '.join(FORMATS)}.")] = "bf16",
    fabric: FabricName = "h100-400g",
    workload: Annotated[str, typer.Option(help="The routing: `mrb list workloads`.")] = "uniform",
    spare: Annotated[str, typer.Option(help="Extra places for copies on each rank, to try: 0,1.")] = "0",
    tp: Annotated[str, typer.Option(help="Only these degrees of tensor parallelism: 1,8.")] = "",
    ep: Annotated[str, typer.Option(help="Only these degrees of expert parallelism: 1,32.")] = "",
    batch: Annotated[str, typer.Option(help="Only these tokens of a GPU and step: 64,128.")] = "",
    dollars: Annotated[float, typer.Option(help="Of a GPU and hour, to show the cost of tokens.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Find the deployment with most tokens per second: TP, EP, DP, replicas and batch, for prefill or decode.

    It must keep the latency and fit the memory. It is a model, not a measurement; docs/parallel.md compares
    it with published deployments.

    \b
    Examples:
      mrb parallel serve --model gpt-oss-120b --gpus 1 --format mxfp4
      mrb parallel serve --model deepseek-v3 --gpus 32 --format fp8 --fabric h800-400g --latency-ms 50
      mrb parallel serve --model qwen3-235b-a22b --gpus 8 --phase prefill --format fp8 --dollars 2
    """
    with user_mistakes():
        check_name(workload)
        if format not in FORMATS:
            raise no_such("format", format, FORMATS)
        if context < 1 or latency_ms <= 0 or dollars < 0:
            raise ValueError("--context and --latency-ms must be positive, --dollars not negative")
        only = {
            name: tuple(option_numbers(name, text, "1,8")) if text else ()
            for name, text in (("tp", tp), ("ep", ep), ("batch", batch), ("spare", spare))
        }
        if any(number < 1 for name in ("tp", "ep", "batch") for number in only[name]):
            raise ValueError("--tp, --ep and --batch are at least 1")
        asked = Served(
            model=published_model(model), gpus=gpus, fabric=read_fabric(fabric), phase=phase, context=context,
            format=format, latency=latency_ms / 1e3, workload=workload, spare=only["spare"], tp=only["tp"],
            ep=only["ep"], batch=only["batch"],
        )  # fmt: skip
        with spinner("counting") as doing:
            best, tried = serve(asked, lambda tp, ep: doing(f"TP {tp}, EP {ep}"))
        if not tried:
            raise ValueError(
                f"no TP and EP of these fit {gpus} GPUs and nodes of {asked.fabric.ranks_per_node}"
            )
    if as_json:
        rows = [{**asdict(one), "tokens_per_second": one.rate, "step": one.step} for one in tried]
        show_json({"best": None if best is None else rows[tried.index(best)], "tried": rows})
        return
    sizes = f"{phase} on {gpus:,} GPUs, {format}, sequences of {context:,} tokens; {asked.fabric.title}"
    tried.sort(key=lambda one: (-one.allowed, -one.rate))
    show(heading(model, sizes), "", *_deployments(tried[:SHOWN], dollars), "")
    show(_deployed(asked, best, min(tried, key=lambda one: sum(one.memory.values()))))
    show("", Text("Assumptions", "bold"), *(Text(line, "dim") for line in _serving_assumptions(asked)))


def _deployments(tried: list[Deployment], dollars: float) -> list[RenderableType]:
    numbers = {
        "tokens/s a GPU": [f"{one.rate:,.0f}" for one in tried],
        "ms a step": [f"{1e3 * one.step:,.1f}{'' if one.in_time else ' !'}" for one in tried],
        **{part: [f"{1e3 * one.seconds[part]:,.1f}" for one in tried] for part in tried[0].seconds},
        "hidden": [f"{1e3 * one.hidden:,.1f}" for one in tried],
        "GB a GPU": [f"{sum(one.memory.values()) / 1e9:,.1f}{'' if one.fits else ' !'}" for one in tried],
    }
    if dollars:
        numbers["$ per million"] = [f"{dollars / 3600 / one.rate * 1e6:.3g}" for one in tried]
    return fitted({"deployment": [_deployment(one) for one in tried]}, numbers, style="bold")


def _deployment(one: Deployment) -> str:
    copies = max(one.tp, one.ep) // one.tp
    return f"TP{one.tp} EP{one.ep} DP{copies} x {one.replicas}, batch {one.batch}"


def _deployed(asked: Served, best: Deployment | None, least: Deployment) -> str:
    one = best or least
    memory = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in one.memory.items())
    if best is None:
        return f"No deployment fits and is in time. The smallest, {_deployment(one)}, needs in GB: {memory}."
    low, high = best.between
    halves = ", in two half batches" if best.halves else ""
    return (
        f"Use {_deployment(best)}{halves}: {asked.gpus * best.rate:,.0f} tokens per second of all GPUs, "
        f"{best.rate:,.0f} of one ({low:,.0f} to {high:,.0f} by how much of sending is hidden). GB of a GPU: "
        f"{memory}."
    )


def _serving_assumptions(asked: Served) -> list[str]:
    low, high = HIDDEN_RANGE
    unknown = () if asked.model.name in RESTS else (
        f"the vocabulary and dense layers of {asked.model.name} are not known here, so they are not counted",
    )  # fmt: skip
    return [
        *asked.fabric.sources,
        f"two half batches hide {HIDDEN:g} ({low:g} to {high:g}) of the shorter of computing and sending; "
        "each half reads all weights",
        "counts travel with the rows, so no rank waits for them; attention and router in 16-bit arithmetic, "
        "projections and experts in 8 bits if their weights have 8",
        f"workspace of {WORKSPACE / 1e9:g} GB; {100 * FRAGMENTED:g} % of cache and rows are lost to "
        "fragmentation; the cache has 16 bits a number",
        "all sequences have the same length; nothing is shared between prompts, and no step predicts more "
        "than one token; a scheduler and a host that never wait",
        *unknown,
    ]

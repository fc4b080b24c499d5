"""mrb parallel plan: says how many ranks should share the experts of a model, and what a step would cost.

mrb parallel place: says whether another placement of experts on ranks would save time.
mrb parallel cache: says which experts to keep in memory.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from moe_routing_bench.cli.options import Json, pick_all, show_json, user_mistakes
from moe_routing_bench.core.names import option_numbers
from moe_routing_bench.core.published import model as published_model
from moe_routing_bench.core.text import printable
from moe_routing_bench.planner.caches import POLICIES, Cached, study_caches
from moe_routing_bench.planner.fabric import Fabric, read_fabric, shipped
from moe_routing_bench.planner.placements import PAYS, PlacementStudy, Tried, study_placements
from moe_routing_bench.planner.plans import CLOSE, MAX_TOKENS, Option, ParallelPlan, Question, answer
from moe_routing_bench.planner.serving import FRAGMENTED, WORKSPACE, other_weights
from moe_routing_bench.planner.step import PARTS, LayerSize, layer_size
from moe_routing_bench.report.console import fitted, heading, show, spinner, two_columns
from moe_routing_bench.report.parallel_pictures import draw_plan
from moe_routing_bench.report.pictures import check_picture_path
from moe_routing_bench.workloads.trace import read_trace
from moe_routing_bench.workloads.workload import check_name

File = Annotated[Path, typer.Argument(metavar="TRACE", help="A file that `mrb model trace record` wrote.")]
Model = Annotated[str | None, typer.Option(help="A name from `mrb list models`, to show bytes.")]
Bits = Annotated[float, typer.Option(help="Bits per weight, to show bytes.")]
FabricName = Annotated[str, typer.Option(help="A name from `mrb parallel fabrics`, or a file.toml.")]


def place_command(
    file: File,
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts of a layer.")],
    replicas: Annotated[str, typer.Option(help="Numbers of extra copies to try: 0,16,32.")] = "0",
    ranks_per_node: Annotated[int, typer.Option(help="0: all ranks on one node.")] = 0,
    windows: Annotated[int, typer.Option(help="Parts of the trace; each predicts the next.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens per step of all ranks together.")] = 1024,
    model: Model = None,
    bits: Bits = 16,
    fabric: FabricName = "h100-400g",
    as_json: Json = False,
) -> None:
    """Say whether another placement of experts on ranks would save time, from a recorded routing.

    With --model also what moving experts costs, and after how many steps it pays.

    \b
    Examples:
      mrb parallel place t.safetensors --ranks 8 --replicas 0,8,16
      mrb parallel place t.safetensors --ranks 64 --ranks-per-node 8 --tokens 16384 --model deepseek-v3
    """
    with user_mistakes():
        extra = option_numbers("replicas", replicas, "0,16,32")
        for name, value in (("--ranks", ranks), ("--windows", windows), ("--tokens", tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        size, links = None if model is None else _size(model, bits), read_fabric(fabric)
        study = study_placements(
            read_trace(file), ranks=ranks, replicas=extra, windows=windows, step_tokens=tokens,
            ranks_per_node=ranks_per_node, size=size, fabric=links,
        )  # fmt: skip
    expert = None if size is None else size.expert_bytes
    if as_json:
        after = {_name(one): study.pays_after(one) for one in study.tried} if size else None
        show_json({**asdict(study), "pays": study.pays, "expert_bytes": expert, "pays_after": after})
        return
    sizes = (
        f"{study.layers} layer{'s' if study.layers > 1 else ''}, {study.experts} experts on {ranks} ranks, "
        f"{study.windows} windows of {study.steps} steps of {study.step_tokens:,} tokens"
    )
    show(heading(printable(file.name), sizes), "", *_places(study, expert), "")
    show(_answer(study), *(Text(note, "dim") for note in _notes(study, links if size else None)))


def _places(study: PlacementStudy, expert: float | None) -> list[RenderableType]:
    rows = study.tried
    numbers = {
        "next window": [f"{one.next:.3f}" for one in rows],
        "same window": [f"{one.same:.3f}" for one in rows],
        "time saved": ["", *map(_saved, rows[1:])],
        "moved": [f"{one.moved:.1f}" for one in rows],
        "a rank holds": [str(one.places) for one in rows],
    }
    if expert is not None:
        numbers["GiB moved"] = [f"{one.moved * expert / 2**30:.3g}" for one in rows]
        numbers["ms moving"] = [f"{1e3 * (one.move_seconds or 0):.3g}" for one in rows]
        numbers["pays after"] = ["", *(_steps(study.pays_after(one)) for one in rows[1:])]
        numbers["GiB a rank"] = [f"{one.places * expert / 2**30:.3g}" for one in rows]
    return fitted({"placement": [_name(one) for one in rows]}, numbers, style="bold")


def _name(one: Tried) -> str:
    return f"{one.way}, {one.replicas} more copies" if one.replicas else one.way


def _saved(one: Tried) -> str:
    low, high = one.between
    return f"{100 * one.saved:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _steps(count: float) -> str:
    return "never" if count == math.inf else f"{count:,} steps"


def _answer(study: PlacementStudy) -> str:
    best, first = study.best, study.tried[0]
    if not study.pays:
        return (
            f"No, another placement would not pay in this trace: the best one, {_name(best)}, saves "
            f"{_saved(best)} of the experts' time in the next window. It should save more than "
            f"{100 * PAYS:.0f} %, certainly more than 0, and more than moving costs."
        )
    return (
        f"Yes: {_name(best)} lowers the busiest rank from {first.next:.2f} to {best.next:.2f} times the mean "
        f"in the next window, and saves {_saved(best)} of the experts' time. {best.moved:.1f} "
        "experts of a layer move at each change."
    )


def _notes(study: PlacementStudy, links: Fabric | None) -> list[str]:
    moving = () if links is None else (
        f"moving: all experts of a layer that change their rank, over {links.title}, which does nothing else "
        "meanwhile. pays after: steps until the experts' time saved, from the fabric's rates, is as long; a "
        f"window has {study.steps}.",
    )  # fmt: skip
    return [
        "next window: the load of the busiest rank divided by the mean, with a placement made from the "
        "window before. same window: with a placement made from the same window. time saved: share of the "
        "experts' time, with a 99 % interval over layers and windows. moved: experts per layer at each "
        "change of placement, the first from contiguous.",
        f"Evenly random routing has {study.chance:.3f} on contiguous ranks, and no placement stays below its "
        "own chance level. Copies of an expert share its tokens equally. The time to send tokens is not "
        "counted.",
        *moving,
        *study.left_out,
    ]


def cache_command(
    file: File,
    slots: Annotated[int, typer.Option(help="Experts of a layer that fit into memory.")],
    policy: Annotated[str, typer.Option(help="Policies to try, separated by commas.")] = ",".join(POLICIES),
    tokens: Annotated[int, typer.Option(help="Tokens of each layer to use, the first ones.")] = 16_384,
    model: Model = None,
    bits: Bits = 16,
    gb_per_second: Annotated[float, typer.Option(help="Speed of the link that loads experts.")] = 25.0,
    as_json: Json = False,
) -> None:
    """Say which experts to keep in memory if not all fit, by trying policies on a recorded routing.

    \b
    Examples:
      mrb parallel cache t.safetensors --slots 32
      mrb parallel cache t.safetensors --slots 16 --policy lru,belady --model qwen3-30b-a3b --bits 4.5
    """
    names = pick_all("policy", policy, POLICIES)
    with user_mistakes():
        if tokens < 1 or not 0 < gb_per_second < 1e6:
            raise ValueError("--tokens and --gb-per-second must be positive")
        expert = None if model is None else _size(model, bits).expert_bytes
        cached, layers, used = study_caches(read_trace(file), slots=slots, policies=names, most_tokens=tokens)
    per_token = [one.loads / (layers * used) for one in cached]
    if as_json:
        rows = [
            {**asdict(one), "hit_rate": one.hit_rate, "loads_per_token_and_layer": rate}
            for one, rate in zip(cached, per_token, strict=True)
        ]
        show_json({"layers": layers, "tokens": used, "expert_bytes": expert, "policies": rows})
        return
    sizes = f"{layers} layer{'s' if layers > 1 else ''}, {used:,} tokens each, {slots} slots"
    show(heading(printable(file.name), sizes), "", *_cached(cached, per_token, expert, gb_per_second))
    show("", Text("belady knows the future, so no policy can load less. loads: per token and layer.", "dim"))


def _cached(
    cached: list[Cached], per_token: list[float], expert: float | None, gb_per_second: float
) -> list[RenderableType]:
    numbers = {
        "hit rate": [f"{100 * one.hit_rate:.1f} %" for one in cached],
        "loads": [f"{rate:.3f}" for rate in per_token],
    }
    if expert is not None:
        numbers["MiB"] = [f"{rate * expert / 2**20:.1f}" for rate in per_token]
        numbers["ms"] = [f"{1e3 * rate * expert / (gb_per_second * 1e9):.3f}" for rate in per_token]
    return fitted({"policy": [one.policy for one in cached]}, numbers, style="bold")


def _size(name: str, bits: float) -> LayerSize:
    return layer_size(published_model(name), weight_bits=bits)


SHOWN = 8  # plans with the same degree


def fabrics_command() -> None:
    """List the networks of GPUs in this package. Your own is a TOML file with the same entries."""
    table = two_columns()
    for name in shipped():
        table.add_row(name, read_fabric(name).title)
    show(table)


def plan_command(
    model: Annotated[str, typer.Option(help="A name from `mrb list models`.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")],
    fabric: FabricName = "h100-400g",
    tokens: Annotated[int, typer.Option(help="Tokens that each GPU brings to a step.")] = 4096,
    workload: Annotated[
        str, typer.Option(help="The routing: `mrb list workloads`, or trace(FILE,layer=3).")
    ] = "uniform",
    spare: Annotated[str, typer.Option(help="Extra places for copies on each rank, to try: 0,1,2.")] = "0,1",
    drop: Annotated[float, typer.Option(help="Share of pairs that a fixed capacity may drop.")] = 0.001,
    layers: Annotated[int, typer.Option(help="MoE layers, for memory; 0: as in the model.")] = 0,
    weight_bits: Annotated[float, typer.Option(help="Bits per weight.")] = 16,
    send_bits: Annotated[float, typer.Option(help="Bits per number sent to an expert.")] = 16,
    return_bits: Annotated[float, typer.Option(help="Bits per number sent back.")] = 16,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A picture: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a model on N GPUs: the degree of expert parallelism, copies of experts, capacity, cost of a step.

    The plan is a model, not a measurement. It prints every assumption; docs/parallel.md says how far to trust
    it.

    \b
    Examples:
      mrb parallel plan --model deepseek-v3 --gpus 64 --weight-bits 8 --send-bits 8
      mrb parallel plan --model qwen3-235b-a22b --gpus 16 --tokens 128 --workload "lognormal(maxvio=4)"
      mrb parallel plan --model deepseek-v3 --gpus 4096 --fabric h100-400g-tapered -o plan.svg
    """
    with user_mistakes():
        if out is not None:
            check_picture_path(out)
        one = published_model(model)
        check_name(workload)
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"--tokens is {tokens}; it must be from 1 to {MAX_TOKENS:,}")
        if not 0 <= drop < 1 or layers < 0:
            raise ValueError("--drop is 0 to 1, --layers at least 0")
        places = read_fabric(fabric)
        size = layer_size(one, weight_bits=weight_bits, send_bits=send_bits, return_bits=return_bits)
        besides = other_weights(one, weight_bits if weight_bits >= 8 else 16) + WORKSPACE
        question = Question(
            size=size, gpus=gpus, tokens=tokens, fabric=places, workload=workload,
            layers=layers or one.layers, spare=tuple(option_numbers("spare", spare, "0,1,2")),
            drop=drop, memory=(1 - FRAGMENTED) * places.device.memory_gb * 1e9 - besides,
        )  # fmt: skip
        with spinner("counting") as doing:
            reply = answer(question, lambda degree: doing(f"groups of {degree} ranks"))
    if not reply.options:
        with user_mistakes():
            raise ValueError(reply.left_out[0] if reply.left_out else "nothing could be tried")
    if out is not None:
        draw_plan(model, question, reply, out)
    if as_json:
        show_json(_document(model, question, reply))
        return
    sizes = f"{gpus:,} GPUs, {tokens:,} tokens each and step, {workload} routing; {places.title}"
    best_of = [reply.of(degree) for degree in reply.degrees]
    show(heading(model, sizes), "", *_table(best_of), "")
    show(_advice(question, reply))
    if reply.best is not None and reply.best.degree > 1:
        same = [option for option in reply.options if option.degree == reply.best.degree]
        others = sorted(same, key=lambda option: option.total)[:SHOWN]
        show("", Text(f"The fastest with degree {reply.best.degree}:", "bold"), *_table(others))
    show("", Text("Assumptions", "bold"), *(Text(line, "dim") for line in assumptions(question, reply)))


def _table(options: list[Option]) -> list[RenderableType]:
    def us(seconds: float) -> str:
        return f"{1e6 * seconds:,.0f}"

    numbers = {
        "degree": [str(one.degree) for one in options],
        "step us": [us(one.total) for one in options],
        **{part: [us(one.seconds[part]) for one in options] for part in PARTS},
        "busiest": [f"{one.busiest:.2f}" for one in options],
        "MB sent": [f"{one.sent / one.degree / 1e6:,.1f}" for one in options],
        "to nodes": [f"{one.between / one.degree / 1e6:,.1f}" for one in options],
        "GB a rank": [f"{one.memory / 1e9:,.1f}{'' if one.fits else ' !'}" for one in options],
    }
    return fitted(
        {"degree": [str(one.degree) for one in options], "way": [_way(one) for one in options]}, numbers
    )


def _way(one: Option) -> str:
    copies = f" +{one.copies}" if one.copies else ""
    return f"{one.way}{copies}, {one.transport}, {one.layout}"


def _advice(question: Question, reply: ParallelPlan) -> str:
    best, room = reply.best, question.memory / 1e9
    if best is None:
        least = min(reply.options, key=lambda one: one.memory)
        return (
            f"No plan fits into {room:.0f} GB per GPU: the smallest needs {least.memory / 1e9:.1f} GB with "
            f"degree {least.degree}. Use more GPUs or fewer bits."
        )
    groups = question.gpus // best.degree
    if best.degree == 1:
        first = "Use no expert parallelism: every GPU holds all experts."
    else:
        copies = f"{best.copies} more copies" if best.copies else "one copy of each expert"
        first = (
            f"Use degree {best.degree} ({groups} group{'s' if groups > 1 else ''}), {copies}, placed "
            f"{best.way}, {best.transport}, {best.layout}."
        )
    slowest = max(best.seconds, key=lambda part: best.seconds[part])
    waits = f", limited by: {best.limits[slowest]}" if slowest in best.limits else ""
    rate = question.tokens / best.total
    return (
        f"{first} A layer takes {1e6 * best.total:,.0f} us, {rate:,.0f} tokens per second and GPU, "
        f"{best.memory / 1e9:.1f} of {room:.0f} GB; the longest part is {slowest} "
        f"({100 * best.seconds[slowest] / best.total:.0f} %{waits})."
    )


def assumptions(question: Question, reply: ParallelPlan) -> list[str]:
    fabric, size = question.fabric, question.size
    device, inside, between = fabric.device, fabric.inside, fabric.between
    once = ", ".join(f"{steps} of degree {degree}" for degree, steps in reply.steps.items())
    lines = [
        f"inside a node ({fabric.ranks_per_node} ranks): {inside.gb_per_second:g} GB/s per rank and "
        f"direction, {inside.exchange_us:g} us per exchange, {inside.message_us:g} us per message; between "
        "nodes: "
        f"{between.gb_per_second:g} GB/s, {between.exchange_us:g} us, {between.message_us:g} us"
        + _shared(fabric),
        f"a rank: {device.tflops:g} TFLOP/s, {device.memory_gb_per_second:g} GB/s, {device.launch_us:g} us "
        f"a launch, {device.host_wait_us:g} us until the host knows a number (compact alone)",
        *fabric.sources,
        f"bits: {8 * size.weight_bytes:g} of a weight, {8 * size.send_bytes:g} sent, "
        f"{8 * size.return_bytes:g} returned; arithmetic in {size.math_bits} bits, at "
        f"{device.tflops_8bit or device.tflops:g} TFLOP/s if 8",
        "parts run one after another, and each ends with its slowest rank; nothing overlaps"
        + (", but a hierarchical exchange passes rows on while others arrive" if fabric.hops_overlap else ""),
        f"memory: experts of {question.layers} layers and rows of one layer; the cache gets what they leave. "
        f"! is more than {question.memory / 1e9:.1f} GB: {device.memory_gb:g} GB without "
        f"{100 * FRAGMENTED:g} % for fragmentation, {WORKSPACE / 1e9:g} GB of workspace and other weights",
        f"forward only, one layer; a capacity drops at most {100 * question.drop:g} % of pairs; plans "
        f"within {100 * CLOSE:g} % of the fastest count as equal, and the simplest is chosen",
        f"groups are equal and do not slow each other down; steps counted pair by pair: {once}",
        "placements are made from the step before; each rank has the same number of tokens unless the "
        "workload says otherwise; a token chooses experts of at most "
        f"{size.keep_groups or 'all'} groups of them",
    ]
    if reply.reused:
        lines.append(f"at most {MAX_TOKENS:,} tokens were drawn for a group and used again for more ranks")
    return [*lines, *reply.left_out]


def _shared(fabric: Fabric) -> str:
    node = "" if fabric.node is None else f"; all ranks of a node: {fabric.node.gb_per_second:g} GB/s"
    switch = fabric.switch
    return node + (
        "" if switch is None else f"; {switch.nodes} nodes of a switch: {switch.gb_per_second:g} GB/s"
    )


def _document(model: str, question: Question, reply: ParallelPlan) -> dict[str, object]:
    asked = {**asdict(question), "fabric": question.fabric.model_dump()}
    return {
        "model": model,
        "question": asked,
        "best": None if reply.best is None else {**asdict(reply.best), "total": reply.best.total},
        "options": [{**asdict(one), "total": one.total} for one in reply.options],
        "assumptions": assumptions(question, reply),
    }

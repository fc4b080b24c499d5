"""mrb place: would another placement of experts on ranks pay? mrb cache: which experts to keep in memory?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from moe_routing_bench.cli.fitting import fitted
from moe_routing_bench.cli.terminal import Json, heading, pick_all, show, show_json, user_mistakes
from moe_routing_bench.experts import GATED
from moe_routing_bench.names import option_numbers
from moe_routing_bench.published import model as published_model
from moe_routing_bench.studies.caches import POLICIES, Cached, study_caches
from moe_routing_bench.studies.placements import PAYS, PlacementStudy, Tried, study_placements
from moe_routing_bench.text import printable
from moe_routing_bench.workloads.trace import read_trace

File = Annotated[Path, typer.Argument(metavar="TRACE", help="A file that `mrb trace record` wrote.")]
Model = Annotated[
    str | None, typer.Option(help="Whose experts are moved, for bytes: a name from `mrb list models`.")
]
Bits = Annotated[float, typer.Option(help="Bits of one weight, for bytes.")]


def place_command(
    file: File,
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts of a layer.")],
    replicas: Annotated[str, typer.Option(help="Numbers of further copies to try: 0,16,32.")] = "0",
    ranks_per_node: Annotated[int, typer.Option(help="0: all ranks on one node.")] = 0,
    windows: Annotated[int, typer.Option(help="Parts of the trace: one is counted, the next predicted.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of a step, of all ranks together.")] = 1024,
    model: Model = None,
    bits: Bits = 16,
    as_json: Json = False,
) -> None:
    """Would another placement of experts on ranks pay? Tried on a recorded routing; says no if it would not.

    \b
    Examples:
      mrb place t.safetensors --ranks 8 --replicas 0,8,16
      mrb place t.safetensors --ranks 64 --ranks-per-node 8 --tokens 16384 --model deepseek-v3
    """
    with user_mistakes():
        extra = option_numbers("--replicas", replicas, "0,16,32")
        for name, value in (("--ranks", ranks), ("--windows", windows), ("--tokens", tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        expert = None if model is None else _expert_bytes(model, bits)
        study = study_placements(
            read_trace(file), ranks=ranks, replicas=extra, windows=windows, step_tokens=tokens,
            ranks_per_node=ranks_per_node,
        )  # fmt: skip
    if as_json:
        show_json({**asdict(study), "pays": study.pays, "expert_bytes": expert})
        return
    sizes = (
        f"{study.layers} layer{'s' if study.layers > 1 else ''}, {study.experts} experts on {ranks} ranks, "
        f"{study.windows} windows of {study.steps} steps of {study.step_tokens:,} tokens"
    )
    show(heading(printable(file.name), sizes), "", *_places(study, expert), "")
    show(_answer(study), *(Text(note, "dim") for note in _notes(study)))


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
        numbers["GiB a rank"] = [f"{one.places * expert / 2**30:.3g}" for one in rows]
    return fitted({"placement": [_name(one) for one in rows]}, numbers, style="bold")


def _name(one: Tried) -> str:
    return f"{one.way}, {one.replicas} more copies" if one.replicas else one.way


def _saved(one: Tried) -> str:
    low, high = one.between
    return f"{100 * one.saved:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _answer(study: PlacementStudy) -> str:
    best, first = study.best, study.tried[0]
    if not study.pays:
        return (
            f"No, it will not pay, as far as this trace tells: the best of them, {_name(best)}, saves "
            f"{_saved(best)} of the experts' time in the next window. It should be more than "
            f"{100 * PAYS:.0f} %, and surely more than 0."
        )
    return (
        f"Yes: {_name(best)} lowers the busiest rank from {first.next:.2f} to {best.next:.2f} times the mean "
        f"in the next window, and saves {_saved(best)} of the experts' time. {best.moved:.1f} "
        "experts of a layer move from window to window."
    )


def _notes(study: PlacementStudy) -> list[str]:
    return [
        "next window: the busiest rank's load over the mean, step by step, with the placement made from the "
        "window before; same window: in hindsight. time saved: of the experts, with a 99 % interval over "
        "layers and windows. moved: experts of a layer, from window to window.",
        f"Evenly random routing has {study.chance:.3f} on contiguous ranks: no placement is below its own "
        "chance for long. Copies of an expert share its tokens equally. Time to send tokens is not in it.",
        *study.left_out,
    ]


def cache_command(
    file: File,
    slots: Annotated[int, typer.Option(help="Experts of a layer that fit at once.")],
    policy: Annotated[str, typer.Option(help="What to try, by commas.")] = ",".join(POLICIES),
    tokens: Annotated[int, typer.Option(help="At most so many tokens of each layer, the first.")] = 16_384,
    model: Model = None,
    bits: Bits = 16,
    gb_per_second: Annotated[float, typer.Option(help="Of the link that loads experts, for seconds.")] = 25.0,
    as_json: Json = False,
) -> None:
    """Which experts to keep in memory if not all fit? Policies tried on a recorded routing, token by token.

    \b
    Examples:
      mrb cache t.safetensors --slots 32
      mrb cache t.safetensors --slots 16 --policy lru,belady --model qwen3-30b-a3b --bits 4.5
    """
    names = pick_all("policy", policy, POLICIES)
    with user_mistakes():
        if tokens < 1 or not 0 < gb_per_second < 1e6:
            raise ValueError("--tokens and --gb-per-second must be positive")
        expert = None if model is None else _expert_bytes(model, bits)
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
    show("", Text("belady knows the future: no policy can load less. loads: a token and layer.", "dim"))


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


def _expert_bytes(name: str, bits: float) -> float:
    """One expert of a published model: its two or three matrices."""
    if not 1 <= bits <= 64:
        raise ValueError(f"--bits is {bits:g}; a weight has 1 to 64")
    one = published_model(name)
    return one.D * one.F * (3 if one.activation in GATED else 2) * bits / 8

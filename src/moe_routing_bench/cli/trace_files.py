"""mrb trace import, check and diff: routes that serving engines captured, their faults, their
disagreement."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table
from rich.text import Text

from moe_routing_bench.cli.terminal import Json, show, show_json, user_mistakes
from moe_routing_bench.names import option_numbers
from moe_routing_bench.routing import Routing
from moe_routing_bench.workloads.serving import read_requests
from moe_routing_bench.workloads.trace import MAX_EXPERTS, read_trace, write_trace
from moe_routing_bench.workloads.trace_check import Fault, Recording, check
from moe_routing_bench.workloads.trace_diff import Difference, TraceDiff, diff

Experts = Annotated[
    int | None, typer.Option(help="Experts of a layer in the model; the engine does not say it.")
]
NumLayers = Annotated[
    int | None, typer.Option(help="Layers in the engine's array, dense ones too; needed for SGLang.")
]
Choices = Annotated[int | None, typer.Option(help="Choices of a token; needed for SGLang.")]
Start = Annotated[int, typer.Option(help="Position of the first row, if the prompt was left out.")]
Layers = Annotated[str | None, typer.Option(help="Only these layers of the array: 3-60. Default: all.")]


def import_command(
    file: Annotated[
        Path, typer.Argument(help="What vLLM or SGLang returned: .npy, a JSON response, or a list.")
    ],
    out: Annotated[Path, typer.Option(help="The trace to write, usually NAME.safetensors.")],
    experts: Experts = None,
    layers: Layers = None,
    num_layers: NumLayers = None,
    choices: Choices = None,
    start: Start = 0,
    first_layer: Annotated[
        int,
        typer.Option(help="The number in the model of the array's first layer, if it has MoE layers only."),
    ] = 0,
) -> None:
    """Make a trace of the routed experts that a serving engine returned. Refused if `check` finds a fault.

    \b
    Examples:
      mrb trace import vllm.json --experts 128 --out r.safetensors
      mrb trace import sglang.json --experts 256 --num-layers 61 --choices 8 --layers 3-60 --out r.safetensors

    Engines return no gates: the trace has 1 / K for each.
    """
    with user_mistakes():
        recording = _recording(file, experts, layers, num_layers, choices, start)
        if faults := check(recording):
            more = f" (and {len(faults) - 1} more: mrb trace check)" if len(faults) > 1 else ""
            raise ValueError(f"{file} was not captured well: {faults[0].sentence}{more}")
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder; make it first")
        if not 0 <= first_layer < 10_000:
            raise ValueError(f"--first-layer is {first_layer}; it must be between 0 and 9,999")
        _write(recording, file, out, first_layer)
    show(f"{_sizes(recording)}: {out.stat().st_size:,} bytes in {out}. `mrb trace show {out}` shows them.")


def check_command(
    file: Annotated[Path, typer.Argument(help="A trace, or what vLLM or SGLang returned.")],
    experts: Experts = None,
    layers: Layers = None,
    num_layers: NumLayers = None,
    choices: Choices = None,
    start: Start = 0,
    as_json: Json = False,
) -> None:
    """Look for the faults that captured routes have: zeros, old rows, ids twice, shifts. Exit code 1 if any.

    \b
    Examples:
      mrb trace check r.safetensors
      mrb trace check vllm.json --experts 128
    """
    with user_mistakes():
        if _is_trace(file):
            trace = read_trace(file)
            try:
                recording = Recording.of_trace(trace)
                faults = check(recording)
            except ValueError as error:
                recording, faults = None, [Fault(kind="labels", sentence=str(error))]
        else:
            recording = _recording(file, experts, layers, num_layers, choices, start)
            faults = check(recording)
    if as_json:
        show_json({"file": str(file), "faults": [asdict(fault) for fault in faults]})
    elif faults:
        show(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in {file.name}:")
        show(*(f"  {fault.kind}: {fault.sentence}" for fault in faults))
    elif recording is not None:
        show(f"no fault found in {file.name}: {_sizes(recording)}")
    raise typer.Exit(1 if faults else 0)


def diff_command(
    a: Annotated[Path, typer.Argument(help="A trace, best one with scores (mrb trace record --scores).")],
    b: Annotated[Path, typer.Argument(help="A trace of the same tokens.")],
    as_json: Json = False,
) -> None:
    """Where do two recordings of the same tokens disagree? By layer and position, with the margin of flips.

    \b
    Examples:
      mrb trace diff rollout.safetensors trainer.safetensors
    """
    with user_mistakes():
        difference = diff(read_trace(a), read_trace(b))
    if as_json:
        show_json(
            {
                "whole": asdict(difference.whole),
                "layers": [{"layer": layer, **asdict(one)} for layer, one in difference.by_layer.items()],
                "positions": [
                    {"first": first, "last": last, **asdict(one)}
                    for (first, last), one in difference.by_position.items()
                ],
                "only_a": difference.only_a,
                "only_b": difference.only_b,
                "scores_of": difference.scores_of,
            }
        )
        return
    layers = {str(layer): one for layer, one in difference.by_layer.items()} | {"all": difference.whole}
    spans = {_span(*span): one for span, one in difference.by_position.items()}
    show(_table("layer", layers, difference), "", _table("positions", spans, difference), "")
    show(*(Text(line, "dim") for line in _notes(difference)))


def _sizes(recording: Recording) -> str:
    rows, requests = sum(len(request.ids) for request in recording.requests), len(recording.requests)
    layers = len(recording.layers)
    return (
        f"{rows:,} tokens of {requests:,} request{'s' if requests > 1 else ''} in {layers} "
        f"layer{'s' if layers > 1 else ''}"
    )


def _table(first: str, rows: dict[str, Difference], difference: TraceDiff) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [first, "tokens", "choices differ", "tokens differ"]
    names += ["margin", "usual margin"] if difference.scores_of else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in rows.items():
        cells = [name, f"{one.tokens:,}", f"{100 * one.choices:.3f} %", f"{100 * one.flipped:.2f} %"]
        if difference.scores_of:
            cells += ["" if margin is None else f"{margin:.2g}" for margin in (one.margin, one.usual)]
        table.add_row(*cells)
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _notes(difference: TraceDiff) -> list[str]:
    notes = ["choices differ: experts of A that B did not choose for the token, in whatever order."]
    if difference.scores_of:
        notes.append(
            f"margin: {difference.scores_of}'s score of a choice less its score of the one that took its "
            "place, "
            "median "
            "over flips; usual margin: the last chosen less the first not chosen, median over tokens."
        )
    else:
        notes.append("Neither has scores, so there are no margins; record with --scores.")
    if difference.only_a or difference.only_b:
        notes.append(
            f"Not compared: {difference.only_a:,} tokens that only A has, "
            f"{difference.only_b:,} that only B has."
        )
    return notes


def read_layers(text: str) -> list[int]:
    return option_numbers("--layers", text, "0,4,8-11", most=9_999)


def _is_trace(file: Path) -> bool:
    """A safetensors file begins with the length of its header and the header, which is JSON."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    with file.open("rb") as opened:
        return opened.read(9)[8:] == b"{" or file.suffix == ".safetensors"


def _recording(
    file: Path,
    experts: int | None,
    layers: str | None,
    num_layers: int | None,
    choices: int | None,
    start: int,
) -> Recording:
    if experts is None:
        raise ValueError("engines do not say how many experts a layer has; give --experts")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"--experts is {experts}; it must be between 1 and {MAX_EXPERTS:,}")
    requests = read_requests(file, num_layers=num_layers, choices=choices, start=start)
    there = requests[0].ids.shape[1]
    wanted = [*range(there)] if layers is None else read_layers(layers)
    if missing := [layer for layer in wanted if layer >= there]:
        raise ValueError(f"--layers names {missing[0]}, but {file} has {there} layers, counted from 0")
    if layers is not None:
        requests = [replace(request, ids=request.ids[:, wanted]) for request in requests]
    return Recording(requests=requests, layers=wanted, num_experts=experts)


def _write(recording: Recording, file: Path, out: Path, first_layer: int) -> None:
    requests, layers, E = recording.requests, recording.layers, recording.num_experts
    ids = np.concatenate([request.ids for request in requests]).astype(np.int64)
    T, _, K = ids.shape
    position_T = torch.cat([torch.arange(len(r.ids)) + r.start for r in requests])
    document_T = torch.arange(len(requests)).repeat_interleave(torch.tensor([len(r.ids) for r in requests]))
    gate_TK = torch.full((T, K), 1 / K)
    experts = [torch.from_numpy(ids[:, at].copy()) for at in range(len(layers))]
    write_trace(
        out,
        *(Routing(expert_TK=one, gate_TK=gate_TK, num_experts=E, ragged=False) for one in experts),
        source=f"mrb trace import {file.name}: experts of a serving engine; no gates (1 / K each)",
        layer_T=(first_layer + torch.tensor(layers)).repeat_interleave(T),
        position_T=position_T.repeat(len(layers)),
        document_T=document_T.repeat(len(layers)),
        documents=[request.name for request in requests],
    )

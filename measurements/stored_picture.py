"""Error against time of experts in 16, 8 and 4 bits, drawn by figures.py as docs/formats.png.

Times and errors of kernels are those of the records; what storing itself loses is the column `layer` of
`mrb formats --json > measurements/formats.json`. The two are independent, so their squares are added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOSSES = Path(__file__).with_name("formats.json")
TOKENS = (1, 64, 1024)
# all of Qwen3-30B-A3B's experts
TOPICS = (
    "experts", "stored_int8", "stored_int4_g128", "peers_int8", "peers_int4_g32", "peers_q8_0", "peers_q4_k",
    "peers_mxfp4", "peers_fp8_block",
)  # fmt: skip
BFLOAT16 = "bfloat16"
COLOURS = {  # Okabe and Ito 2008, and grey
    BFLOAT16: "#000000",
    "int8": "#0072B2",
    "q8_0": "#56B4E9",
    "fp8_block": "#999999",
    "int4_g128": "#D55E00",
    "int4_g32": "#E69F00",
    "q4_k": "#009E73",
    "mxfp4": "#CC79A7",
}
OURS, OURS_INT8 = "ours", "ours, rows of 8 bits"
MARKERS = {OURS: "o", OURS_INT8: "s", "llama.cpp": "^", "KTransformers": "v", "vLLM": "D"}
PEERS = {"llama_cpp": "llama.cpp", "kt": "KTransformers", "vllm_cpu": "vLLM"}
Point = tuple[int, str, str, float, float]


def stored_points(all_records: Mapping[str, Any]) -> list[Point]:
    """(tokens, format, kernel, ms, error against float32 weights), as drawn."""
    losses = {row["name"]: row["layer"] for row in json.loads(LOSSES.read_text())["layer"]}
    rows = [row for topic in TOPICS for row in all_records[topic].rows]
    return [
        (
            row["T"],
            format_,
            kernel,
            float(f"{row['median_ms']:.4g}"),
            float(f"{math.hypot(row['error'], losses.get(format_, 0.0)):.3g}"),
        )
        for row in rows
        if row["T"] in TOKENS and row["error"] is not None
        for format_, kernel in [_kind(row)]
        if format_ != BFLOAT16 or not row["store"]
    ]


def _kind(row: Mapping[str, Any]) -> tuple[str, str]:
    """Format and kernel: native(store=int8_a8) is ("int8", "ours, rows of 8 bits")."""
    name, _, option = row["impl"].removesuffix(")").partition("(store=")
    format_ = option.removesuffix("_a8") or BFLOAT16
    return format_, PEERS.get(name) or (OURS_INT8 if option.endswith("_a8") else OURS)


def draw_stored(points: Sequence[Point], path: Path, metadata: Mapping[str, str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.6, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(TOKENS), sharey=True, squeeze=False)[0]
    for axes, T in zip(panels, TOKENS, strict=True):
        mine = [point for point in points if point[0] == T]
        for _, format_, kernel, ms, error in mine:
            axes.plot(
                ms, error, MARKERS[kernel], color=COLOURS[format_], ms=7, mew=1.6,
                mfc="white" if kernel != OURS and kernel != OURS_INT8 else COLOURS[format_],
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=f"{T:,} token{'s' * (T > 1)}", xlabel="ms")
        if mine:
            low, high = (end(point[3] for point in mine) for end in (min, max))
            axes.set_xlim(low / 1.3, high * 1.3)
            ticks = [low, math.sqrt(low * high), high]
            axes.set_xticks(ticks, [f"{float(f'{tick:.3g}'):,g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error against float32 weights")
    colours = [Line2D([], [], color=colour, lw=5, label=name) for name, colour in COLOURS.items()]
    markers = [
        Line2D([], [], color="#444444", marker=marker, lw=0, label=name, mew=1.6,
               mfc="white" if not name.startswith(OURS) else "#444444")
        for name, marker in MARKERS.items()
    ]  # fmt: skip
    for handles, place in ((colours, "outside upper center"), (markers, "outside lower center")):
        figure.legend(handles=handles, fontsize=8.5, frameon=False, ncols=len(handles), loc=place)
    figure.savefig(path, metadata=dict(metadata))

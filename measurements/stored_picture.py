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
# implementation, which records have it, label, colour (Okabe and Ito 2008), marker
KINDS = (
    ("native", "experts", "bfloat16", "#000000", "o"),
    ("vllm_cpu", "experts", "bfloat16, vLLM", "#999999", "D"),
    ("native(store=int8)", "stored_int8", "int8", "#0072B2", "o"),
    ("native(store=int8_a8)", "stored_int8", "int8, rows too", "#0072B2", "s"),
    ("native(store=int4_g128)", "stored_int4_g128", "int4_g128", "#D55E00", "o"),
    ("native(store=int4_g128_a8)", "stored_int4_g128", "int4_g128, int8 rows", "#D55E00", "s"),
)
Point = tuple[int, str, float, float]


def stored_points(all_records: Mapping[str, Any]) -> list[Point]:
    """(tokens, label, ms, error against float32 weights), as drawn."""
    losses = {row["name"]: row["layer"] for row in json.loads(LOSSES.read_text())["layer"]}
    return [
        (
            row["T"],
            label,
            float(f"{row['median_ms']:.4g}"),
            float(f"{math.hypot(row['error'], losses.get(row['store'], 0.0)):.3g}"),
        )
        for impl, topic, label, _, _ in KINDS
        for row in all_records[topic].rows
        if row["impl"] == impl and row["error"] is not None
    ]


def draw_stored(points: Sequence[Point], path: Path, metadata: Mapping[str, str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens = sorted({point[0] for point in points})
    figure = Figure(figsize=(2.2 * max(len(tokens), 1), 3.1), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(tokens), 1), sharey=True, squeeze=False)[0]
    for axes, T in zip(panels, tokens, strict=False):
        for _, _, label, colour, marker in KINDS:
            mine = [point for point in points if point[:2] == (T, label)]
            axes.plot(
                [point[2] for point in mine], [point[3] for point in mine], marker, color=colour, ms=7,
                label=label, mfc=colour if marker != "s" else "white", mew=1.6,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=f"{T} token{'s' * (T > 1)}", xlabel="ms")
        low, high = min(p[2] for p in points if p[0] == T), max(p[2] for p in points if p[0] == T)
        axes.set_xlim(low / 1.5, high * 1.5)
        ticks = [low, math.sqrt(low * high), high]
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error against float32 weights")
    if points:
        figure.legend(
            *panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, ncols=len(KINDS),
            loc="outside upper center",
        )  # fmt: skip
    figure.savefig(path, metadata=dict(metadata))

"""Draws a trace as one picture: load, evenness, pairs of experts, experts kept from token to token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from moe_routing_bench.report.drawing import BLUE, GREY, RED, figure
from moe_routing_bench.workloads.trace import Trace
from moe_routing_bench.workloads.trace_summary import LayerSummary, lift_EE

# with more experts, sorting them by similarity takes too long
MAX_ORDERED = 512
TICKS = 24


def draw_trace(
    trace: Trace, summaries: list[LayerSummary], path: Path, *, title: str, layer: int | None = None
) -> None:
    """Draws a trace. layer: the layer whose pairs of experts are drawn; None: the middle one."""
    shown = summaries[len(summaries) // 2].layer if layer is None else layer
    lift = lift_EE((trace if shown is None else trace.part(layer=shown)).routing).numpy()
    made = figure(13, 10)
    panels = made.subplots(2, 2)
    _load(made, panels[0][0], summaries)
    _evenness(panels[0][1], summaries)
    _pairs(made, panels[1][0], lift, shown, trace.routing.num_choices)
    _overlap(panels[1][1], summaries, trace)
    made.suptitle(title, fontsize=13, x=0.01, ha="left")
    made.savefig(path)


def _load(figure: Any, axes: Any, summaries: list[LayerSummary]) -> None:
    load_NE = np.array([one.load_E for one in summaries], dtype=float)
    ratio_NE = load_NE / load_NE.mean(axis=1, keepdims=True)
    image = axes.imshow(
        ratio_NE, aspect="auto", interpolation="nearest", cmap="YlGnBu", vmin=0,
        vmax=max(2.0, float(ratio_NE.max())),
    )  # fmt: skip
    figure.colorbar(image, ax=axes, label="pairs of the expert / mean of its layer", shrink=0.9)
    for row, expert in zip(*np.nonzero(load_NE == 0), strict=True):
        if load_NE.size <= 4096:
            axes.text(expert, row, "x", ha="center", va="center", fontsize=8)
    _layer_ticks(axes, summaries, axis="y")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title("Load: 1 is the mean, x is an expert that no token chose", loc="left", fontsize=11)


def _evenness(axes: Any, summaries: list[LayerSummary]) -> None:
    place = np.arange(len(summaries))
    most = math.log2(len(summaries[0].load_E)) or 1.0
    axes.bar(place, [100 * one.entropy_bits / most for one in summaries], width=0.6, color=BLUE, alpha=0.35)
    axes.set_ylim(0, 108)
    axes.set_ylabel("entropy of the load, % of log2(E)", color=BLUE)
    right = axes.twinx()
    ratio = [one.max_over_mean for one in summaries]
    right.plot(place, ratio, color=RED, marker="o", linewidth=1.5)
    right.set_ylim(0, 1.15 * max(ratio))
    right.set_ylabel("busiest expert / mean", color=RED)
    if len(summaries) <= TICKS:
        for x, y in zip(place, ratio, strict=True):
            right.annotate(
                f"{y:.2f}",
                (x, y),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                color=RED,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            )
    _layer_ticks(axes, summaries, axis="x")
    for each in (axes, right):
        each.spines["top"].set_visible(False)
    axes.set_xlabel("layer")
    axes.set_title("Evenness: bars at 100 % and line at 1 mean equal use", loc="left", fontsize=11)


def _pairs(figure: Any, axes: Any, lift: Any, layer: int | None, K: int) -> None:
    where = "" if layer is None else f" in layer {layer}"
    axes.set_title(f"Pairs of experts{where}: how often one token uses both", loc="left", fontsize=11)
    if K < 2 or not np.isfinite(lift).any():
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no token uses two experts", ha="center", transform=axes.transAxes, color=GREY)
        return
    with np.errstate(divide="ignore"):
        bits = np.clip(np.log2(lift), -3, 3)  # never together: -3
    order = _by_similarity(bits)
    image = axes.imshow(bits[np.ix_(order, order)], cmap="PuOr_r", vmin=-3, vmax=3, interpolation="nearest")
    axes.set_facecolor("#a8a8a8")
    bar = figure.colorbar(image, ax=axes, shrink=0.9, ticks=[-3, -2, -1, 0, 1, 2, 3])
    bar.ax.set_yticklabels(["1/8 or less", "1/4", "1/2", "as expected", "2 x", "4 x", "8 x or more"])
    if len(order) <= 64:
        size = 9 if len(order) <= 32 else 6
        for ticks, labels in (
            (axes.set_xticks, axes.set_xticklabels),
            (axes.set_yticks, axes.set_yticklabels),
        ):
            ticks(range(len(order)))
            labels([str(expert) for expert in order], fontsize=size)
    axes.set_xlabel("experts, similar ones next to each other; expected: by popularity alone; grey: no pair")


def _by_similarity(bits: Any) -> list[int]:
    """Sorts experts so that similar ones are next to each other; experts that no token chose come last."""
    used = [expert for expert, row in enumerate(bits) if np.isfinite(row).any()]
    unused = sorted({*range(len(bits))} - {*used})
    if 2 < len(used) <= MAX_ORDERED:
        from scipy.cluster.hierarchy import leaves_list, linkage

        rows = np.nan_to_num(bits[np.ix_(used, used)])
        used = [used[place] for place in leaves_list(linkage(rows, method="average", optimal_ordering=True))]
    return used + unused


def _overlap(axes: Any, summaries: list[LayerSummary], trace: Trace) -> None:
    axes.set_title("Experts kept from one token to the next of a document", loc="left", fontsize=11)
    overlaps = [(place, one.overlap) for place, one in enumerate(summaries) if one.overlap is not None]
    if not overlaps:
        axes.set_axis_off()
        axes.text(
            0.5,
            0.5,
            "the trace has no positions and documents",
            ha="center",
            transform=axes.transAxes,
            color=GREY,
        )
        return
    place = [x for x, _ in overlaps]
    lines: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("kept", [overlap.kept for _, overlap in overlaps], {"color": BLUE, "marker": "o", "linewidth": 2}),
        (
            "any two tokens of a document",
            [overlap.by_document for _, overlap in overlaps],
            {"color": RED, "marker": "s"},
        ),
        ("any two tokens", [overlap.by_chance for _, overlap in overlaps], {"color": GREY, "marker": "."}),
    ]
    for label, values, style in lines:
        if all(value is not None for value in values):
            axes.plot(place, [100 * value for value in values], label=label, markersize=6, **style)
    even = 100 * trace.routing.num_choices / trace.routing.num_experts
    axes.axhline(
        even, color="black", linewidth=1, linestyle=":", label=f"K / E = {even:.1f} %: all used equally"
    )
    axes.set_ylim(0, None)
    axes.set_ylabel("experts in common, %")
    axes.set_xlabel("layer")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _layer_ticks(axes, summaries, axis="x")


def _layer_ticks(axes: Any, summaries: list[LayerSummary], *, axis: str) -> None:
    step = math.ceil(len(summaries) / TICKS)
    places = range(0, len(summaries), step)
    names = ["all" if summaries[place].layer is None else str(summaries[place].layer) for place in places]
    if axis == "x":
        axes.set_xticks(places, names)
        axes.set_xlim(-0.6, len(summaries) - 0.4)
    else:
        axes.set_yticks(places, names)

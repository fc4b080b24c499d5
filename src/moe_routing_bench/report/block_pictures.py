"""Draws where the time of a MoE block goes, as stacked bars. matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from textwrap import fill

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.report.drawing import figure

# colours that colour-blind people can tell apart (Okabe and Ito 2008)
COLOURS = {
    "route": "#56B4E9", "pack": "#E69F00", "gemm": "#0072B2", "combine": "#009E73", "fused": "#CC79A7",
    "shared": "#F0E442", "attention": "#E69F00", "norms": "#009E73", "experts": "#0072B2",
    "python": "#999999", "rest": "#999999",
}  # fmt: skip
TITLES = {
    "gemm": "GEMM and activation", "fused": "one kernel: gather, GEMM, weighted sum",
    "python": "Python between operations", "rest": "residuals and Python", "pack": "pack (plan, gather)",
}  # fmt: skip


def draw_shares(outcome: CellOutcome, shares: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws bars: their length is the time without the profiler, their parts are the profiler's shares."""
    rows = [one for one in outcome.implementations if one.samples and one.implementation.text in shares]
    names = [name for name in COLOURS if any(name in shares[row.implementation.text] for row in rows)]
    made = figure(10, 1.9 + 0.62 * len(rows))
    axes = made.add_subplot()
    longest = max(1e3 * median(row.samples) for row in rows)
    for place, row in enumerate(rows):
        start, ms = 0.0, 1e3 * median(row.samples)
        for name in names:
            width = ms * shares[row.implementation.text].get(name, 0.0)
            axes.barh(place, width, left=start, color=COLOURS[name], edgecolor="white", linewidth=0.6)
            if width > 0.05 * longest:
                percent = f"{100 * width / ms:.0f} %"
                dark = name in ("gemm", "experts", "python", "rest", "combine", "norms")
                axes.text(
                    start + width / 2, place, percent, ha="center", va="center", fontsize=9,
                    color="white" if dark else "black",
                )  # fmt: skip
            start += width
        ratio = row.comparison.ratio if row.comparison is not None else 1.0
        label = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
        label += "" if row.comparison is None else f" ({1 / ratio:.2f}x)"
        axes.text(start + 0.01 * longest, place, label, va="center", fontsize=10)
    axes.set_yticks(
        range(len(rows)), [fill(row.implementation.text.replace(",", ", "), 36) for row in rows], fontsize=9
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17 * longest)
    axes.set_xlabel("milliseconds per call, median without the profiler")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh(0, 0, color=COLOURS[name], label=TITLES.get(name, name)) for name in names]
    made.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    case, s = outcome.experiment, outcome.experiment.shape
    axes.set_title(
        f"{case.case}: T={s.T} D={s.D} F={s.F} E={s.E} K={s.K}, {case.dtype}, {outcome.experiment.workload}\n"
        f"on {this_machine().name}; {outcome.rounds} interleaved rounds",
        fontsize=10, loc="left",
    )  # fmt: skip
    made.savefig(path)

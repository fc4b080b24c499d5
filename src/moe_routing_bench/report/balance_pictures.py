"""Pictures of balance controllers on a stream whose topics drift and jump."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from moe_routing_bench.report.drawing import figure
from moe_routing_bench.studies.drift import SERIES, BalanceStudy

# a colour for each controller, similar colours for related ones; a dashed line lies on top of another line
STYLES = {
    "no control": ("#222222", "-"),
    "switch loss, weight 0.1": ("#f0a35e", "-"),
    "switch loss, weight 1": ("#c2410c", "-"),
    "sign_bias": ("#1f5fa8", "-"),
    "centred_bias": ("#7fd0ff", "--"),
    "sign_bias, rate 0.01": ("#16b3c4", "-"),
    "quantile": ("#7a3fb8", "-"),
    "l1_strength": ("#2e8b3d", "-"),
    "p_threshold": ("#9a8f1d", "-"),
    "threshold_ema": ("#d6418c", "-"),
}
# each series has a panel: its title, a factor, and the unit of the axis
PANELS = {
    "max_violation": ("Max violation", 1, "largest load / mean load - 1"),
    "drop_rate": ("Dropped with a capacity factor of 1.25", 100, "% of chosen pairs"),
    "entropy_bits": ("Entropy of the load", 1, "bits"),
    "experts_per_token": ("Experts per token", 1, "mean"),
    "agreement": ("Choices shared with no control", 100, "% of the experts that either chose"),
    "label_share": ("What the chosen experts tell about the topic", 100, "% of the topic's entropy"),
}
STARTS_FAR_OFF = ("drop_rate", "experts_per_token")  # the ReLU router does, until its regulariser has grown
SMOOTH = 9  # a point of a line is the mean of this many steps


def draw_balance(study: BalanceStudy, path: Path) -> None:
    """Draws a panel for each series and a line for each controller, and marks the jumps."""
    made = figure(14, 13, dpi=90)
    stream = study.stream
    panels = made.subplots(3, 2, sharex=True)
    for axes, name in zip(panels.flat, PANELS, strict=True):
        title, factor, unit = PANELS[name]
        for track in study.tracks:
            colour, line = STYLES.get(track.subject.name, ("#888888", "-"))
            at, values = _smoothed([factor * value for value in track.series[name]])
            axes.plot(at, values, color=colour, linestyle=line, linewidth=1.8, label=track.subject.name)
        for jump in stream.jumps:
            axes.axvline(jump, color="#999999", linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.set_ylabel(unit, fontsize=11)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, stream.steps - 1)
    for name in STARTS_FAR_OFF:
        _look_past_the_start(study, panels.flat[list(PANELS).index(name)], name)
    levels = {
        "max_violation": (study.chance, "chance"),
        "entropy_bits": (math.log2(stream.E), "even"),
        "experts_per_token": (stream.K, f"K = {stream.K}"),
    }
    for name, (level, word) in levels.items():
        axes = panels.flat[list(PANELS).index(name)]
        axes.axhline(level, color="#999999", linewidth=1.2, linestyle="--")
        axes.annotate(
            word, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), va="center",
            textcoords="offset points", color="#666666", fontsize=10, annotation_clip=False,
        )  # fmt: skip
    for axes in panels[-1]:
        axes.set_xlabel("step (one batch)", fontsize=11)
    for jump in stream.jumps:
        panels[0][0].annotate(
            "topics jump", (jump, 1), xycoords=("data", "axes fraction"), xytext=(4, -2),
            textcoords="offset points", va="top", color="#666666", fontsize=10,
        )  # fmt: skip
    handles, labels = panels[0][0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=11, frameon=False)
    made.suptitle(
        f"Balance controllers on a stream whose topics drift and jump: T={stream.T}, D={stream.D}, "
        f"E={stream.E}, K={stream.K}, seed {stream.seed}; lines are means of {SMOOTH} steps",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    made.savefig(path)


def _look_past_the_start(study: BalanceStudy, axes: Any, name: str) -> None:
    """Shows the range of the last two thirds. A note names the lines that start above it and their start."""
    _, factor, _ = PANELS[name]
    first = study.stream.jumps[0]
    lines = {track.subject.name: _smoothed(track.series[name]) for track in study.tracks}
    later = [factor * y for at, ys in lines.values() for x, y in zip(at, ys, strict=True) if x >= first]
    margin = 0.08 * (max(later) - min(later)) or 0.5
    low, high = min(later) - margin, max(later) + margin
    axes.set_ylim(low, high)
    above = {subject: factor * max(ys) for subject, (_, ys) in lines.items() if factor * max(ys) > high}
    words = "\n".join(f"{subject} starts at {value:.3g}" for subject, value in above.items())
    axes.annotate(
        words, (0, 1), xycoords="axes fraction", xytext=(6, -2), textcoords="offset points", va="top",
        fontsize=10, color=STYLES.get(next(iter(above), ""), ("#444444", ""))[0],
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _smoothed(values: list[float]) -> tuple[list[float], list[float]]:
    """Returns means of SMOOTH steps, three points per window. More points would only make the files
    larger."""
    width = min(SMOOTH, len(values))
    places = range(0, len(values) - width + 1, max(1, width // 3))
    return [place + (width - 1) / 2 for place in places], [
        sum(values[place : place + width]) / width for place in places
    ]


assert set(PANELS) == set(SERIES)

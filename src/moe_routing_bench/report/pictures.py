"""Pictures of results, drawn without a screen. matplotlib is imported only to draw."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from moe_routing_bench.report.drawing import BLUE, FORMATS, GREY, RED, figure
from moe_routing_bench.studies.power import PowerStudy


def check_picture_path(path: Path) -> None:
    """Checks the path before measuring, so that no run is lost because its picture cannot be written."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} should end in {', '.join(FORMATS)}, because it will be a picture")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; make it first")


def draw_power(study: PowerStudy, path: Path) -> None:
    """Draws the share of slow-downs that were found by size, and how often the same code was called
    different."""
    from matplotlib.lines import Line2D

    made = figure(10, 6)
    axes = made.add_subplot()
    slowed = [row for row in study.rows if row.percent > 0]
    if slowed:
        share = [100 * row.share for row in slowed]
        ends = (
            [100 * (row.share - row.interval[0]) for row in slowed],
            [100 * (row.interval[1] - row.share) for row in slowed],
        )
        axes.errorbar(
            [row.percent for row in slowed], share, yerr=ends, color=BLUE, marker="o", markersize=7,
            linewidth=2, capsize=5, elinewidth=1.3, label="slow-down found (SLOWER), 95 % interval", zorder=3,
        )  # fmt: skip
        for row in slowed:
            axes.annotate(
                f"{100 * row.share:.0f} % of {row.trials}", (row.percent, 100 * row.share), xytext=(9, -6),
                textcoords="offset points", va="top", color=BLUE, fontsize=10,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, zorder=2.5,
            )  # fmt: skip
    if (same := study.row(0)) is not None:
        low, high = (100 * end for end in same.interval)
        axes.errorbar(
            [0], [100 * same.share], yerr=([100 * same.share - low], [high - 100 * same.share]), color=RED,
            marker="s", markersize=7, capsize=5, linewidth=0, elinewidth=1.3,
            label="same code called FASTER or SLOWER, 95 % interval", zorder=3,
        )  # fmt: skip
        compared = same.trials - same.verdicts.get("FAILED", 0)
        axes.annotate(
            f"same code called\ndifferent: {100 * same.share:.1f} %\nof {compared} trials\n"
            f"({low:.1f} to {high:.1f} %)",
            (0, high), xytext=(-0.2, min(max(45, high + 8), 78)), color=RED, fontsize=10,
            arrowprops={"arrowstyle": "-", "color": RED, "linewidth": 0.6, "relpos": (0.12, 0)},
        )  # fmt: skip
    axes.axhline(1, color=RED, linewidth=1, linestyle=":", label="1 %: limit for false calls")
    axes.axhline(95, color=GREY, linewidth=1, linestyle="--", label="95 %: goal for a slow-down of 5 %")
    axes.set_xlim(-0.35, max(row.percent for row in study.rows) + 1.1)
    axes.set_ylim(-7, 104)
    axes.set_xticks([row.percent for row in study.rows])
    axes.set_xlabel("true slow-down, %")
    axes.set_ylabel("share of trials, %")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    data_first = sorted(range(len(labels)), key=lambda i: isinstance(handles[i], Line2D))
    made.legend(
        [handles[i] for i in data_first], [labels[i] for i in data_first], loc="outside lower center",
        ncols=2, fontsize=10, frameon=False,
    )  # fmt: skip
    axes.set_title(_title(study), fontsize=11, loc="left")
    made.savefig(path)


def _title(study: PowerStudy) -> str:
    policy, weather = study.policy, study.weather
    unfinished = "" if study.finished else f" Stopped after {len(study.trials)} trials."
    threads = "1 thread" if policy["threads"] == 1 else f"{policy['threads']} threads"
    return (
        f"What the benchmark finds on {study.machine['name']}.{unfinished}\n"
        f"{policy['min_rounds']} to {policy['max_rounds']} rounds, at most {policy['max_seconds']:g} s, "
        f"until the ratio is known to {100 * policy['target']:g} %; {policy['cache']} caches, {threads}; "
        f"median {median(trial.rounds for trial in study.trials):.0f} rounds\n"
        f"{study.case}; load {weather['load_before']:.1f} before and {weather['load_after']:.1f} after, "
        f"{weather['steal_percent']:.1f} % of time stolen; "
        f"{len(study.trials)} trials in {study.seconds / 60:.1f} min"
    )

"""Draws a metric over commits: points, levels between steps, and places where the method changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_routing_bench.report.drawing import COLOURS, INK, PAPER, Picture, Table, figure, label, style
from moe_routing_bench.report.page import Page, Section
from moe_routing_bench.results.history import METRICS, CaseHistory, History

MAX_PANELS, MAX_TICKS, MAX_ROWS = 12, 16, 1_000
UNITS = {"ratio": "ratio to the baseline", "ms": "milliseconds"}


def steps_table(past: History) -> Table:
    head = ("case", "implementation", "kind", "at commit", "day", "before", "after", "after / before")
    rows = []
    for series, step in past.steps[:MAX_ROWS]:
        point = series.points[step.at]
        numbers = (f"{step.before:.4g}", f"{step.after:.4g}", f"{step.ratio:.3f}")
        rows.append((series.where, series.implementation, step.kind, point.name, point.day, *numbers))
    return Table(head=head, rows=tuple(rows), words=5)


def series_table(series: Sequence[CaseHistory]) -> Table:
    head = ("case", "implementation", "machine", "points", "first", "last", "steps", "method changes")
    rows = [
        (
            one.where, one.implementation, one.machine, f"{len(one.points)}", f"{one.points[0].value:.4g}",
            f"{one.points[-1].value:.4g}", f"{len(one.steps)}", f"{len(one.method_changes)}",
        )
        for one in series[:MAX_ROWS]
    ]  # fmt: skip
    return Table(head=head, rows=tuple(rows), words=3)


def draw(past: History) -> Picture | None:
    """Draws the series with the largest steps, one panel each."""
    shown = [one for one in past.series if len(one.points) > 1][:MAX_PANELS]
    if not shown:
        return None
    with style():
        made = figure(9.5, 2.3 * len(shown) + 0.4)
        for axes, one in zip(made.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
            _panel(axes, one)
            axes.set_ylabel(UNITS[past.metric], fontsize=8.5)
    left = sum(len(one.points) > 1 for one in past.series) - len(shown)
    caption = (
        "Points are in the order in which commits were first measured, with 99 % intervals if there is one. "
        "Hollow: the source was changed after the commit. Thick lines are levels between steps. Dashed: the "
        "method changed here. " + (f"{left:,} more series are in the table." if left else "")
    )
    title = f"{len(past.steps):,} step{'s' * (len(past.steps) != 1)} in {len(past.series):,} series"
    return Picture(name="history", title=title, caption=caption, figure=made)


def _panel(axes: Any, one: CaseHistory) -> None:
    x = list(range(len(one.points)))
    bars = [2.576 * point.error * point.value for point in one.points]
    axes.errorbar(x, [p.value for p in one.points], yerr=bars, fmt="none", ecolor=COLOURS[0], elinewidth=1)
    for dirty, face in ((False, COLOURS[0]), (True, PAPER)):
        some = [at for at in x if one.points[at].dirty is dirty]
        axes.plot(some, [one.points[at].value for at in some], "o", color=COLOURS[0], mfc=face, markersize=5)
    bounds = [0, *(step.at for step in one.steps), len(x)]
    levels = [one.steps[0].before, *(step.after for step in one.steps)] if one.steps else []
    for level, a, b in zip(levels, bounds, bounds[1:], strict=False):
        axes.plot([a - 0.4, b - 0.6], [level, level], color=COLOURS[5], linewidth=3, alpha=0.8, zorder=1)
    for step in one.steps:
        axes.annotate(
            f"{step.kind}, {step.ratio:.2f}x", (step.at - 0.5, step.after), xytext=(2, 6),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    for at in one.method_changes:
        axes.axvline(at - 0.5, color=INK, linewidth=1, linestyle="--")
    every = max(1, -(-len(x) // MAX_TICKS))
    axes.set_xticks(x[::every], [label(p.name, 12) for p in one.points[::every]], rotation=30, fontsize=7.5)
    axes.set_xlim(-0.6, len(x) - 0.4)
    axes.margins(y=0.25)
    axes.set_title(f"{label(one.implementation, 40)}: {label(one.where, 60)}")


def over_commits(past: History, command: str) -> Page:
    picture = draw(past)
    steps = steps_table(past)
    sections = [
        Section(
            title="Steps" if steps.rows else "No step",
            text=() if steps.rows else ("No series has a step that is larger than the limit.",),
            tables=(steps,) if steps.rows else (),
            pictures=() if picture is None else (picture,),
        ),
        Section(title="Series", tables=(series_table(past.series),)),
    ]
    without = (
        f" {past.without:,} records name no commit, so their version and code are used instead."
        if past.without
        else ""
    )
    return Page(
        title="Measurements over commits",
        answer=(
            f"Series: {len(past.series):,}, steps: {len(past.steps):,}.",
            f"{METRICS[past.metric].capitalize()}.{without}",
        ),
        chapters=((UNITS[past.metric], tuple(sections)),),
        notes=(*past.left_out.first, *past.left_out.remarks),
        command=command,
        data={"rows": [], "hovers": {}},
    )

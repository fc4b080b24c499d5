"""Figures of timing records: stages, bandwidth, roofline, layouts, routers, noise.

Each function takes a chapter or a group and gives a picture, or None if there is nothing to show.
"""

from __future__ import annotations

import math

from moe_routing_bench.report.drawing import (
    COLOURS,
    INK,
    MAX_MARKS,
    PAPER,
    Picture,
    colours,
    figure,
    file_name,
    label,
    legend,
    logarithmic,
    patches,
    style,
)
from moe_routing_bench.report.reading import Chapter, Group, ratio_of
from moe_routing_bench.results.record import Record

MAX_BARS = 24
STAGE_COLOURS = {
    "route": "#56B4E9", "plan": "#8878D8", "dispatch": "#E69F00", "grouped_gemm": "#0072B2",
    "expert_ffn": "#0072B2", "experts": "#0072B2", "combine": "#009E73", "write_back": "#009E73",
    "attention": "#D55E00", "shared": "#999933",
}  # fmt: skip


def stages(group: Group) -> Picture | None:
    """Stacked bars of the contenders whose stages were timed."""
    bars = [
        (cell, record)
        for cell in group.cells
        for record in cell.passed
        if record.timing is not None and record.timing.stages
    ]
    if not bars:
        return None
    shown = bars[:MAX_BARS]
    names = list(dict.fromkeys(stage for _, record in shown for stage in _stages_of(record)))
    rest = iter(colour for colour in COLOURS if colour not in STAGE_COLOURS.values())
    colour = {name: STAGE_COLOURS.get(name) or next(rest, "#7F7F7F") for name in names}
    with style():
        made = figure(9.5, 1.2 + 0.5 * len(shown))
        axes = made.add_subplot()
        for place, (_, record) in enumerate(shown):
            start = 0.0
            for name, seconds in _stages_of(record).items():
                axes.barh(place, 1e3 * seconds, left=start, color=colour[name], edgecolor=PAPER, height=0.7)
                start += 1e3 * seconds
            assert record.timing is not None
            whole = 1e3 * record.timing.median
            axes.plot([whole, whole], [place - 0.42, place + 0.42], color=INK, linewidth=1.5)
        ticks = [
            f"{label(cell.names[record.record_id], 40)}\n{label(cell.first.experiment.case, 40)}"
            for cell, record in shown
        ]
        axes.set_yticks(range(len(shown)), ticks, fontsize=8.5)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds: stages timed apart, stacked; the line is the whole, timed as one")
        legend(made, patches(colour))
    more = f" {len(bars) - len(shown)} more are in the tables." if len(bars) > len(shown) else ""
    caption = f"Where the time goes, stage by stage.{more}"
    return Picture(name=file_name("stages", group.title), title=group.title, caption=caption, figure=made)


def _stages_of(record: Record) -> dict[str, float]:
    return record.timing.stages if record.timing is not None else {}


def bandwidth(group: Group) -> Picture | None:
    """Bytes a second of packing by both conventions, against T x D; a panel for each, a marker for each K."""
    points = [
        (cell, record)
        for cell in group.cells
        for record in cell.passed
        if record.work is not None and record.work.bw_strict is not None
    ]
    if len(points) < 2:
        return None
    from matplotlib.lines import Line2D

    colour = colours(group.contenders)
    choices = sorted({(cell.first.experiment.E, cell.first.experiment.K) for cell, _ in points})
    most = max(
        max(record.work.bw_2pass or 0, record.work.bw_strict or 0) for _, record in points if record.work
    )
    elements = sorted({cell.first.experiment.T * cell.first.experiment.D for cell, _ in points})
    marker = {one: "osD^vP*X<>"[place % 10] for place, one in enumerate(choices)}
    with style():
        made = figure(9.5, 4.2)
        both = made.subplots(1, 2, sharey=True)
        for axes, name in zip(both, ("bw_2pass", "bw_strict"), strict=True):
            for one in choices:
                some = [(c, r) for c, r in points if (c.first.experiment.E, c.first.experiment.K) == one]
                axes.scatter(
                    [c.first.experiment.T * c.first.experiment.D for c, _ in some],
                    [(getattr(r.work, name) or 0) / 1e9 for _, r in some],
                    c=[colour[c.names[r.record_id]] for c, r in some], marker=marker[one], s=36, alpha=0.85,
                    linewidths=0, rasterized=len(points) > MAX_MARKS,
                )  # fmt: skip
            logarithmic(axes.xaxis)
            if len(elements) <= 8:
                axes.set_xticks(elements, [f"{one / 1e6:.3g}" for one in elements])
                axes.set_xlabel("T x D, million elements")
            else:
                axes.set_xlabel("T x D, elements")
            axes.set_title(name)
            axes.set_ylim(0, 1.1 * most / 1e9)
        both[0].set_ylabel("GB/s")
        handles = patches({name: colour[name] for name in group.contenders})
        handles += [
            Line2D([], [], marker=marker[one], linestyle="", color=INK, label=f"E={one[0]:,} K={one[1]}")
            for one in choices[:12]
        ]
        legend(made, handles)
    caption = (
        "bw_2pass: what dispatch and combine read and write by the usual count, T x K rows in each pass. "
        "bw_strict: each byte that must move, counted once."
    )
    return Picture(name=file_name("bandwidth", group.title), title=group.title, caption=caption, figure=made)


def roofline(chapter: Chapter) -> Picture | None:
    """Useful operations a second against operations per byte, and what was executed, under the roofs that the
    records were held against."""
    points = [
        (group, cell, record)
        for group in chapter.groups
        for cell in group.cells
        for record in cell.passed
        if record.work is not None
        and record.work.useful_flops
        and record.work.weight_bytes + record.work.activation_bytes
    ]
    if len(points) < 2:
        return None
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys((group.span, group.direction, group.dtype) for group, _, _ in points))
    colour = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(kinds)}
    many = len(points) > MAX_MARKS
    with style():
        made = figure(9.5, 5.2)
        axes = made.add_subplot()
        roofs: set[tuple[float, float]] = set()
        spots: list[tuple[float, float, float, str, bool]] = []  # the last: as fast as the baseline
        for group, _, record in points:
            work, timing = record.work, record.timing
            assert work is not None and timing is not None
            x = work.useful_flops / (work.weight_bytes + work.activation_bytes)
            useful, executed = (
                work.useful_flops / timing.median / 1e9,
                work.executed_flops / timing.median / 1e9,
            )
            kind = colour[group.span, group.direction, group.dtype]
            spots.append((x, useful, executed, kind, ratio_of(record) <= 1))
            if work.roof_seconds and not work.roof_busy:
                roofs.add((x, work.useful_flops / work.roof_seconds / 1e9))
        padded = [spot for spot in spots if spot[2] > 1.01 * spot[1]]
        axes.vlines(
            [spot[0] for spot in padded], [spot[1] for spot in padded], [spot[2] for spot in padded],
            colors=[spot[3] for spot in padded], linewidth=0.8, alpha=0.5, rasterized=many,
        )  # fmt: skip
        axes.scatter(
            [spot[0] for spot in padded], [spot[2] for spot in padded], s=20, facecolors="none",
            edgecolors=[spot[3] for spot in padded], rasterized=many,
        )  # fmt: skip
        for best, alpha in ((False, 0.45), (True, 0.9)):
            some = [spot for spot in spots if spot[4] is best]
            axes.scatter(
                [spot[0] for spot in some], [spot[1] for spot in some], s=26, c=[spot[3] for spot in some],
                alpha=alpha, linewidths=0, rasterized=many,
            )  # fmt: skip
        if roofs:
            x_of, y_of = zip(*sorted(roofs), strict=True)
            axes.scatter(x_of, y_of, marker="_", s=60, c=INK, linewidths=1.4, rasterized=many)
        logarithmic(axes.xaxis)
        logarithmic(axes.yaxis)
        axes.set_xlabel("useful operations for each byte that must move")
        axes.set_ylabel("GFLOP/s")
        handles = [
            Line2D([], [], marker="o", linestyle="", color=value, label=label(", ".join(kind)))
            for kind, value in colour.items()
        ]
        hollow = Line2D([], [], marker="o", linestyle="", mfc="none", mec=INK, label="executed, padding too")
        dash = Line2D([], [], marker="_", linestyle="", color=INK, label="roof of a record")
        legend(made, [*handles, hollow, dash])
    caption = (
        "Filled: useful operations (pairs of token and expert); hollow: executed ones, with padding. The "
        "dash above a point is its roof: the most that this machine could do for that record, by the highest "
        "rates ever seen on it. Pale: slower than the baseline of its cell."
    )
    return Picture(name=file_name("roofline", _place(chapter)), caption=caption, figure=made)


def layouts(group: Group) -> Picture | None:
    """Waste, drops and time against the load of the busiest expert, if a cell compares layouts."""
    if group.shared[0] is not None:
        return None
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for cell in group.cells:
        for record in cell.passed:
            routing = record.routing
            if routing is None or routing.tile_efficiency is None:
                continue
            waste = 100 * (1 - routing.tile_efficiency)
            point = (routing.max_over_mean, waste, dropped_percent(record), ratio_of(record))
            rows.setdefault(cell.names[record.record_id], []).append(point)
    if not rows:
        return None
    from matplotlib.lines import Line2D

    colour = colours(group.contenders)
    titles = ("Rows that are padding, %", "Pairs dropped, %", "Time over the baseline's")
    with style():
        made = figure(9.5, 4.0)
        panels = made.subplots(1, 3)
        for name, points in rows.items():
            points.sort()
            for place, axes in enumerate(panels, start=1):
                axes.plot(
                    [point[0] for point in points], [point[place] for point in points], "o", markersize=5,
                    color=colour[name], alpha=0.9, rasterized=len(points) > MAX_MARKS,
                )  # fmt: skip
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("busiest expert over the mean")
            axes.set_ylim(bottom=0)
        handles = [
            Line2D([], [], marker="o", linestyle="", color=colour[name], label=label(name, 60))
            for name in group.contenders
            if name in rows
        ]
        legend(made, handles, 2)
    caption = (
        "Each point is a layout in one cell; to the right, routing is less even. A shorter time with drops "
        "is less work done, not a better layout. Times are paired with the baseline's, round by round."
    )
    return Picture(name=file_name("layouts", group.title), title=group.title, caption=caption, figure=made)


def dropped_percent(record: Record) -> float:
    """Of the pairs of token and choice, those that no expert computed."""
    dropped = record.routing.dropped_pairs if record.routing is not None else None
    return 100 * (dropped or 0) / max(1, record.experiment.T * record.experiment.K)


def routers(group: Group) -> Picture | None:
    """What each router costs beside how even its load is, if a cell compares routers."""
    if group.shared[1] is not None:
        return None
    cells = [cell for cell in group.cells if len(cell.passed) > 1][:4]
    if not cells:
        return None
    rows = max(len(cell.passed) for cell in cells)
    with style():
        made = figure(9.5, len(cells) * (0.9 + 0.27 * min(rows, MAX_BARS)))
        panels = made.subplots(len(cells), 2, squeeze=False)
        for (left, right), cell in zip(panels, cells, strict=True):
            shown = cell.passed[:MAX_BARS]
            places = range(len(shown))
            for place, record in enumerate(shown):
                comparison = record.comparison
                ratio, low, high = (
                    (1, 1, 1) if comparison is None else (comparison.ratio, comparison.low, comparison.high)
                )
                left.barh(place, ratio, color=COLOURS[0] if comparison else COLOURS[11], height=0.7)
                left.plot([low, high], [place, place], color=INK, linewidth=1.3)
                routing = record.routing
                if routing is not None:
                    dropped = dropped_percent(record)
                    right.barh(place, routing.cv, color=COLOURS[2], height=0.7)
                    said = f"{routing.cv:.2f}" + (f", {dropped:.1f} % dropped" if dropped else "")
                    right.text(routing.cv, place, f" {said}", va="center", fontsize=8)
            left.set_yticks(places, [label(cell.names[one.record_id], 40) for one in shown], fontsize=8.5)
            right.set_yticks(places, [])
            left.set_xlabel("time over the baseline's (grey), 99 % interval")
            right.set_xlabel("cv of the load: 0 is even, lower is better")
            left.set_title(label(cell.title, 60))
            for axes in (left, right):
                axes.invert_yaxis()
                axes.grid(axis="y", visible=False)
            right.margins(x=0.25)
    caption = (
        "Left: time, paired with the baseline's round by round. Right: how uneven the experts' load is, and "
        "what a layout dropped. Rules that follow the scores are as uneven as the workload makes them; how "
        "even a trained router is, `mrb train` shows."
    )
    return Picture(name=file_name("routers", group.title), title=group.title, caption=caption, figure=made)


def noise(chapter: Chapter) -> Picture | None:
    """How far the baseline was from its own twin in every cell."""
    floors = sorted(100 * cell.cell.aa_floor for cell in chapter.cells if len(cell.cell.records) > 1)
    if len(floors) < 3:
        return None
    with style():
        made = figure(9.5, 2.6)
        axes = made.add_subplot()
        share = [100 * (place + 1) / len(floors) for place in range(len(floors))]
        axes.step(floors, share, where="post", color=COLOURS[0])
        axes.axvline(2, color=INK, linewidth=1, linestyle="--")
        axes.annotate("2 %: the least that counts", (2, 8), xytext=(5, 0), textcoords="offset points")
        axes.set_xlabel("distance of the baseline from its own twin, %")
        axes.set_ylabel("% of cells")
        axes.set_ylim(0, 102)
        most = max(3.0, 1.1 * floors[math.ceil(0.95 * len(floors)) - 1])
        axes.set_xlim(0, most)
    caption = (
        "The same code timed twice in the same rounds. A difference smaller than the distance of these two "
        "is UNDECIDED."
    )
    if beyond := sum(floor > most for floor in floors):
        caption += f" {beyond:,} cells are further out, up to {floors[-1]:.0f} %."
    return Picture(name=file_name("noise", _place(chapter)), caption=caption, figure=made)


def _place(chapter: Chapter) -> str:
    return f"{chapter.setting['threads']} threads {chapter.setting['machine']}"

"""Figures of timing records: time and memory, layouts, stages, bandwidth, roofline, routers, noise.

Each function takes a chapter or a group and returns a picture, or None if there is nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from moe_routing_bench.report.ceiling import ceilings_of
from moe_routing_bench.report.drawing import (
    COLOURS,
    INK,
    MAX_MARKS,
    PAPER,
    Picture,
    Table,
    colours,
    figure,
    file_name,
    label,
    legend,
    logarithmic,
    patches,
    style,
    times_axis,
)
from moe_routing_bench.report.reading import Cell, Chapter, Group, ratio_of
from moe_routing_bench.results.record import Record

MAX_BARS = 24
WHOLE = ("layer", "block", "expert_ffn")
MAX_TABLE = 200
SAME_MEMORY = 1.05  # peaks of the same code differ by up to this factor
STAGE_COLOURS = {
    "route": "#56B4E9", "plan": "#8878D8", "dispatch": "#E69F00", "grouped_gemm": "#0072B2",
    "expert_ffn": "#0072B2", "experts": "#0072B2", "combine": "#009E73", "write_back": "#009E73",
    "attention": "#D55E00", "shared": "#999933",
}  # fmt: skip


def numbers(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], words: int = 2) -> Table:
    """Makes the table of a figure's numbers with at most MAX_TABLE rows."""
    left = len(rows) - MAX_TABLE
    note = (
        f"{left:,} more rows are in the records; mrb results export DIR --csv FILE writes all."
        if left > 0
        else ""
    )
    return Table(head=head, rows=tuple(rows[:MAX_TABLE]), words=words, note=note)


def memory(group: Group) -> Picture | None:
    """Draws time against peak memory, each divided by the smallest of its cell: the median of every
    implementation with the range over cells. For parts of a layer memory says little, so they are not
    drawn."""
    if not group.decides or group.span not in WHOLE:
        return None
    points: dict[str, list[tuple[float, float, float]]] = {}
    for cell in group.cells:
        compared = (
            cell.contest.ratios if cell.contest is not None else {}
        )  # an implementation that drops pairs is not in it
        known = [
            (one, one.peak_rss_bytes)
            for one in cell.passed
            if one.peak_rss_bytes and cell.names[one.record_id] in compared
        ]
        if len(known) < 2:
            continue
        fastest, least = min(ratio_of(one) for one, _ in known), min(size for _, size in known)
        for one, size in known:
            point = ratio_of(one) / fastest, size / least, size / 2**20
            points.setdefault(cell.names[one.record_id], []).append(point)
    if len(points) < 2:
        return None
    middle = {name: [median(some) for some in zip(*of, strict=True)] for name, of in points.items()}
    ordered = sorted(middle, key=lambda name: middle[name])
    colour = colours(group.implementations)
    with style():
        made = figure(5.6, 3.6)
        axes = made.add_subplot()
        for name in ordered:
            (x, y, _), (xs, ys, _) = middle[name], zip(*points[name], strict=True)
            axes.plot([min(xs), max(xs)], [y, y], color=colour[name], linewidth=1)
            axes.plot([x, x], [min(ys), max(ys)], color=colour[name], linewidth=1)
            axes.plot(x, y, "o", color=colour[name], markersize=8)
        for place, axis in enumerate((axes.xaxis, axes.yaxis)):
            times_axis(axis, 0.95, max(1.3, *(point[place] for of in points.values() for point in of)))
        axes.set_xlabel("time / fastest time of the case")
        axes.set_ylabel("peak memory / smallest of the case")
        legend(made, patches({name: colour[name] for name in ordered}), 2)
    small = min(ordered, key=lambda name: (middle[name][1], middle[name][0]))
    finding = f"{ordered[0]} is the fastest, {small} needs the least memory"
    if middle[ordered[0]][1] < SAME_MEMORY * middle[small][1]:
        finding = f"{ordered[0]} is the fastest, and no other needs clearly less memory"
    rows = [
        (name, f"{len(points[name]):,}", *(f"{value:.2f}" for value in middle[name][:2]),
         f"{middle[name][2]:,.0f}", f"{max(size for *_, size in points[name]):,.0f}")
        for name in ordered
    ]  # fmt: skip
    head = ("implementation", "cases", "time / fastest", "memory / smallest", "MiB", "max MiB")
    return Picture(
        name=file_name("memory", group.title), title=f"{group.title}: {finding}",
        caption="Lower and further left is better. Points are medians over cases, lines show the range. "
        "Memory is the peak of the process that ran the implementation, with the weights.",
        figure=made, table=numbers(head, rows, 1),
    )  # fmt: skip


def stages(group: Group) -> Picture | None:
    """Draws stacked bars of the implementations whose stages were timed."""
    bars = [
        (cell, record, record.timing)
        for cell in group.cells
        for record in cell.passed
        if record.timing is not None and record.timing.stages
    ]
    if not bars:
        return None
    shown = bars[:MAX_BARS]
    names = list(dict.fromkeys(stage for *_, timing in shown for stage in timing.stages))
    rest = iter(colour for colour in COLOURS if colour not in STAGE_COLOURS.values())
    colour = {name: STAGE_COLOURS.get(name) or next(rest, "#7F7F7F") for name in names}
    with style():
        made = figure(9.5, 1.2 + 0.5 * len(shown))
        axes = made.add_subplot()
        for place, (_, _, timing) in enumerate(shown):
            start = 0.0
            for name, seconds in timing.stages.items():
                axes.barh(place, 1e3 * seconds, left=start, color=colour[name], edgecolor=PAPER, height=0.7)
                start += 1e3 * seconds
            whole = 1e3 * timing.median
            axes.plot([whole, whole], [place - 0.42, place + 0.42], color=INK, linewidth=1.5)
            axes.plot([1e3 * timing.p25, 1e3 * timing.p75], [place, place], color=INK, linewidth=1.5)
        ticks = [
            f"{label(cell.names[record.record_id], 40)}\n{label(cell.first.experiment.case, 40)}"
            for cell, record, _ in shown
        ]
        axes.set_yticks(range(len(shown)), ticks, fontsize=8.5)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds: stages timed one by one, stacked; black: the whole call")
        legend(made, patches(colour))
    tops = [max(timing.stages.items(), key=lambda item: item[1]) for *_, timing in bars]
    shares = [
        100 * most / (sum(timing.stages.values()) or 1)
        for (_, most), (*_, timing) in zip(tops, bars, strict=True)
    ]
    longest = " or ".join(dict.fromkeys(name for name, _ in tops))
    ends = " to ".join(dict.fromkeys(f"{end:.0f}" for end in (min(shares), max(shares))))
    rows = [
        (cell.first.experiment.case, cell.names[record.record_id], f"{1e3 * timing.median:.4g}",
         *(f"{1e3 * timing.stages[name]:.4g}" if name in timing.stages else "" for name in names))
        for cell, record, timing in bars
    ]  # fmt: skip
    limits = [f" {limit[0].upper()}{limit[1:]}." for limit in ceilings_of([one.stages for *_, one in bars])]
    more = f" {len(bars) - len(shown)} more are in the table." if len(bars) > len(shown) else ""
    return Picture(
        name=file_name("stages", group.title),
        title=f"{group.title}: the longest stage ({longest}) takes {ends} % of the time",
        caption="The vertical line is the median of the whole call; the line across it is the middle half "
        f"of the samples.{more}{''.join(limits)}",
        figure=made, table=numbers(("case", "implementation", "ms", *names), rows),
    )  # fmt: skip


def bandwidth(group: Group) -> Picture | None:
    """Draws bytes per second of packing against T x D: a panel for each convention, a marker for each K."""
    points = [
        (cell, record, record.work, record.timing)
        for cell in group.cells
        for record in cell.passed
        if record.work is not None and record.work.bw_strict is not None and record.timing is not None
    ]
    if len(points) < 2:
        return None
    from matplotlib.lines import Line2D

    colour = colours(group.implementations)
    choices = sorted({(cell.first.experiment.E, cell.first.experiment.K) for cell, *_ in points})
    most = max(max(work.bw_2pass or 0, work.bw_strict or 0) for _, _, work, _ in points)
    elements = sorted({cell.T * cell.first.experiment.D for cell, *_ in points})
    marker = {one: "osD^vP*X<>"[place % 10] for place, one in enumerate(choices)}
    many = len(points) > MAX_MARKS
    by_name: dict[str, list[float]] = {}
    rows = []
    for cell, record, work, _ in points:
        name, rates = cell.names[record.record_id], [(work.bw_2pass or 0) / 1e9, (work.bw_strict or 0) / 1e9]
        by_name.setdefault(name, []).append(rates[1])
        rows.append((cell.title, name, *(f"{rate:.1f}" for rate in rates)))
    with style():
        made = figure(9.5, 4.2)
        both = made.subplots(1, 2, sharey=True)
        for axes, field in zip(both, ("bw_2pass", "bw_strict"), strict=True):
            for one in choices:
                some = [each for each in points if (each[1].experiment.E, each[1].experiment.K) == one]
                x = [cell.T * record.experiment.D for cell, record, *_ in some]
                y = [(getattr(work, field) or 0) / 1e9 for _, _, work, _ in some]
                of = [colour[cell.names[record.record_id]] for cell, record, *_ in some]
                rounds = [[t.median / t.p75, t.median / t.p25] for *_, t in some]
                low, high = (
                    [rate * part[end] for rate, part in zip(y, rounds, strict=True)] for end in (0, 1)
                )
                axes.vlines(x, low, high, colors=of, linewidth=1, rasterized=many)
                axes.scatter(x, y, c=of, marker=marker[one], s=36, alpha=0.85, linewidths=0, rasterized=many)
        for axes, title in zip(both, ("bw_2pass", "bw_strict"), strict=True):
            logarithmic(axes.xaxis)
            if len(elements) <= 8:
                axes.set_xticks(elements, [f"{one / 1e6:.3g}" for one in elements])
                axes.set_xlabel("T x D, million elements")
            else:
                axes.set_xlabel("T x D, elements")
            axes.set_title(title)
            axes.set_ylim(0, 1.15 * most / 1e9)
        both[0].set_ylabel("GB/s")
        handles = patches({name: colour[name] for name in group.implementations})
        handles += [
            Line2D([], [], marker=marker[one], linestyle="", color=INK, label=f"E={one[0]:,} K={one[1]}")
            for one in choices[:12]
        ]
        legend(made, handles)
    best = max(by_name, key=lambda name: median(by_name[name]))
    finding = f"{best} moves the most, {median(by_name[best]):.1f} GB/s at the median"
    return Picture(
        name=file_name("bandwidth", group.title), title=f"{group.title}: {finding}",
        caption="bw_2pass: bytes that dispatch and combine read and write in the usual count, T x K rows in "
        "each pass. bw_strict: each byte that must move, counted once. Lines show the middle half of the "
        "rounds.",
        figure=made, table=numbers(("case", "implementation", "bw_2pass, GB/s", "bw_strict, GB/s"), rows),
    )  # fmt: skip


def roofline(chapter: Chapter) -> Picture | None:
    """Draws useful and executed operations per second against operations per byte, under the roofs of the
    records."""
    points = [
        (group, cell, record, record.work, record.timing)
        for group in chapter.groups
        for cell in group.cells
        for record in cell.passed
        if record.timing is not None
        and record.work is not None
        and record.work.useful_flops
        and record.work.weight_bytes + record.work.activation_bytes
    ]
    if len(points) < 2:
        return None
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys((group.span, group.direction, group.dtype) for group, *_ in points))
    colour = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(kinds)}
    many = len(points) > MAX_MARKS
    rows, best = [], dict[str, float]()
    spots: list[tuple[float, float, float, str, bool]] = []  # the last one: is it as fast as the baseline?
    roofs: set[tuple[float, float]] = set()
    for group, cell, record, work, timing in points:
        x = work.useful_flops / (work.weight_bytes + work.activation_bytes)
        useful, executed = (flops / timing.median / 1e9 for flops in (work.useful_flops, work.executed_flops))
        kind = colour[group.span, group.direction, group.dtype]
        spots.append((x, useful, executed, kind, ratio_of(record) <= 1))
        if work.roof_seconds and not work.roof_busy:
            roofs.add((x, work.useful_flops / work.roof_seconds / 1e9))
        share = record.share_of_roof
        if share is not None:
            best[cell.anchor] = max(best.get(cell.anchor, 0.0), 100 * share)
        reached = "" if share is None else f"{100 * share:.0f} %"
        rows.append((cell.title, cell.names[record.record_id], f"{x:.3g}", f"{useful:.4g}", reached))
    with style():
        made = figure(9.5, 5.2)
        axes = made.add_subplot()
        padded = [spot for spot in spots if spot[2] > 1.01 * spot[1]]
        axes.vlines(
            [spot[0] for spot in padded], [spot[1] for spot in padded], [spot[2] for spot in padded],
            colors=[spot[3] for spot in padded], linewidth=0.8, alpha=0.5, rasterized=many,
        )  # fmt: skip
        axes.scatter(
            [spot[0] for spot in padded], [spot[2] for spot in padded], s=20, facecolors="none",
            edgecolors=[spot[3] for spot in padded], rasterized=many,
        )  # fmt: skip
        for fast, alpha in ((False, 0.45), (True, 0.9)):
            some = [spot for spot in spots if spot[4] is fast]
            axes.scatter(
                [spot[0] for spot in some], [spot[1] for spot in some], s=26, c=[spot[3] for spot in some],
                alpha=alpha, linewidths=0, rasterized=many,
            )  # fmt: skip
        if roofs:
            x_of, y_of = zip(*sorted(roofs), strict=True)
            axes.scatter(x_of, y_of, marker="_", s=60, c=INK, linewidths=1.4, rasterized=many)
        logarithmic(axes.xaxis)
        logarithmic(axes.yaxis)
        axes.set_xlabel("useful operations per byte that must move")
        axes.set_ylabel("GFLOP/s")
        handles = [
            Line2D([], [], marker="o", linestyle="", color=value, label=label(", ".join(kind)))
            for kind, value in colour.items()
        ]
        hollow = Line2D([], [], marker="o", linestyle="", mfc="none", mec=INK, label="executed, with padding")
        dash = Line2D([], [], marker="_", linestyle="", color=INK, label="roof of a record")
        legend(made, [*handles, *[hollow] * bool(padded), *[dash] * bool(roofs)])
    finding = f"The most useful work is {max(spot[1] for spot in spots):,.0f} GFLOP/s; no roof is recorded"
    if best:
        shares = best.values()
        finding = (
            f"The best of each case reaches {median(shares):.0f} % of the machine's roof at the median "
            f"({min(shares):.0f} % to {max(shares):.0f} %)"
        )
    return Picture(
        name=file_name("roofline", _place(chapter)), title=finding,
        caption="Filled: useful operations (pairs of token and expert). Hollow: executed operations, with "
        "padding. The dash above a point is its roof: the most that this machine could do for that record, "
        "at the highest rates seen on it. Pale: slower than the baseline of its case.",
        figure=made,
        table=numbers(("case", "implementation", "operations per byte", "GFLOP/s", "of roof"), rows),
    )  # fmt: skip


def layouts(group: Group) -> Picture | None:
    """Draws padding, drops and time against the load of the busiest expert, if a cell compares layouts."""
    if group.shared[0] is not None:
        return None
    found: dict[str, list[tuple[Cell, Record, tuple[float, float, float]]]] = {}
    for cell in group.cells:
        for record in cell.passed:
            routing = record.routing
            if routing is not None and routing.tile_efficiency is not None:
                waste = 100 * (1 - routing.tile_efficiency)
                values = waste, dropped_percent(record), ratio_of(record)
                found.setdefault(cell.names[record.record_id], []).append((cell, record, values))
    if not found:
        return None
    from matplotlib.lines import Line2D

    colour = colours(group.implementations)
    titles = ("Rows that are padding, %", "Pairs dropped, %", "Time / baseline's time")
    with style():
        made = figure(9.5, 4.0)
        panels = made.subplots(1, 3)
        for name, points in found.items():
            x, one, many = [cell.skew for cell, *_ in points], colour[name], len(points) > MAX_MARKS
            for place, axes in enumerate(panels):
                y = [values[place] for *_, values in points]
                axes.plot(x, y, "o", markersize=5, color=one, alpha=0.9, rasterized=many)
            ends = [(c.low, c.high) if (c := record.comparison) else (1.0, 1.0) for _, record, _ in points]
            panels[2].vlines(x, *zip(*ends, strict=True), colors=one, linewidth=1, rasterized=many)
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("busiest expert / mean load")
            axes.set_ylim(bottom=0)
        handles = [
            Line2D([], [], marker="o", linestyle="", color=colour[name], label=label(name, 60))
            for name in group.implementations
            if name in found
        ]
        legend(made, handles, 2)
    drops = {name: max(values[1] for *_, values in points) for name, points in found.items()}
    whole = [name for name in found if not drops[name]]
    time = {name: median(values[2] for *_, values in points) for name, points in found.items()}
    finding = f"{min(whole, key=time.__getitem__)} is the fastest that drops no pair" if whole else ""
    if max(drops.values()) > 0:
        most = max(drops, key=drops.__getitem__)
        finding = "; ".join(filter(None, (finding, f"{most} drops up to {drops[most]:.0f} % of the pairs")))
    rows = [
        (cell.title, name, f"{cell.skew:.1f}", *(f"{value:.1f}" for value in values[:2]), f"{values[2]:.3f}")
        for name, points in found.items()
        for cell, _, values in points
    ]
    head = ("case", "implementation", "busiest / mean", "padding, %", "dropped, %", "time / baseline's")
    return Picture(
        name=file_name("layouts", group.title), title=f"{group.title}: {finding}",
        caption="Each point is a layout in one case, with the 99 % interval of its time. Further right the "
        "routing is less even. A layout that drops pairs does less work, so its shorter time does not make "
        "it better.",
        figure=made, table=numbers(head, rows),
    )  # fmt: skip


def dropped_percent(record: Record) -> float:
    """Returns the share of pairs of token and choice that no expert computed, in percent."""
    dropped = record.routing.dropped_pairs if record.routing is not None else None
    return 100 * (dropped or 0) / max(1, record.experiment.T * record.experiment.K)


def routers(group: Group) -> Picture | None:
    """Draws the cost of each router and how even its load is, if a cell compares routers."""
    if group.shared[1] is not None:
        return None
    cells = [cell for cell in group.cells if len(cell.passed) > 1][:4]
    if not cells:
        return None
    longest, rows = max(len(cell.passed) for cell in cells), []
    with style():
        made = figure(9.5, len(cells) * (0.9 + 0.27 * min(longest, MAX_BARS)))
        panels = made.subplots(len(cells), 2, squeeze=False)
        for (left, right), cell in zip(panels, cells, strict=True):
            shown = cell.passed[:MAX_BARS]
            places = range(len(shown))
            for place, record in enumerate(shown):
                one, routing = record.comparison, record.routing
                ratio, low, high = (1.0, 1.0, 1.0) if one is None else (one.ratio, one.low, one.high)
                left.barh(place, ratio, color=COLOURS[0] if one else COLOURS[11], height=0.7)
                left.plot([low, high], [place, place], color=INK, linewidth=1.3)
                assert routing is not None  # it passed
                dropped = dropped_percent(record)
                right.barh(place, routing.cv, color=COLOURS[2], height=0.7)
                said = f"{routing.cv:.2f}" + (f", {dropped:.1f} % dropped" if dropped else "")
                right.text(routing.cv, place, f" {said}", va="center", fontsize=8)
                interval = "" if one is None else f"{low:.2f} to {high:.2f}"
                rows.append(
                    (cell.title, cell.names[record.record_id], f"{ratio:.2f}", interval, f"{routing.cv:.2f}",
                     f"{dropped:.1f}")
                )  # fmt: skip
            left.set_yticks(places, [label(cell.names[one.record_id], 40) for one in shown], fontsize=8.5)
            right.set_yticks(places, [])
            left.set_xlabel("time / baseline's time (grey), 99 % interval")
            right.set_xlabel("cv of the load: 0 is even, lower is better")
            left.set_title(label(cell.title, 60))
            for axes in (left, right):
                axes.invert_yaxis()
                axes.grid(axis="y", visible=False)
            right.margins(x=0.25)
    first = cells[0]
    fast, slow = (first.names[first.passed[place].record_id] for place in (0, -1))
    times = ratio_of(first.passed[-1]) / ratio_of(first.passed[0])
    head = ("case", "implementation", "time / baseline's", "99 % interval", "cv", "dropped, %")
    return Picture(
        name=file_name("routers", group.title),
        title=f"{group.title}: {slow} takes {times:.1f}x the time of {fast}",
        caption="Left: time, paired with the baseline by round. Right: how uneven the load of the experts "
        "is, and what a layout dropped. Routers that follow the scores are as uneven as the workload; `mrb "
        "train` shows how even a trained router is.",
        figure=made, table=numbers(head, rows),
    )  # fmt: skip


def noise(chapter: Chapter) -> Picture | None:
    """Draws by how much two copies of the baseline differed in every cell."""
    floors = sorted(100 * cell.cell.aa_floor for cell in chapter.cells if len(cell.cell.records) > 1)
    if len(floors) < 3:
        return None
    worst = floors[math.ceil(0.95 * len(floors)) - 1]
    share = [100 * (place + 1) / len(floors) for place in range(len(floors))]
    with style():
        made = figure(9.5, 2.6)
        axes = made.add_subplot()
        axes.step(floors, share, where="post", color=COLOURS[0])
        axes.axvline(2, color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            "2 %: smaller differences do not count", (2, 8), xytext=(5, 0), textcoords="offset points"
        )
        axes.set_xlabel("difference between the baseline and a second copy of it, %")
        axes.set_ylabel("% of cases")
        axes.set_ylim(0, 102)
        most = max(3.0, 1.1 * worst)
        axes.set_xlim(0, most)
    caption = "The same code was timed twice in the same rounds. A smaller difference than this is UNDECIDED."
    if beyond := sum(floor > most for floor in floors):
        caption += f" Cases that differ by more: {beyond:,}, up to {floors[-1]:.0f} %."
    ends = [
        (f"{part} %", f"{floors[math.ceil(part / 100 * len(floors)) - 1]:.2f} %")
        for part in (50, 75, 95, 100)
    ]
    return Picture(
        name=file_name("noise", _place(chapter)),
        title=f"Two copies of the same code differ by {median(floors):.1f} % at the median, and by at most "
        f"{worst:.1f} % in 95 % of the cases",
        caption=caption, figure=made, table=numbers(("of the cases", "differ by at most"), ends, 1),
    )  # fmt: skip


def _place(chapter: Chapter) -> str:
    return f"{chapter.setting['threads']} threads {chapter.setting['machine']}"

"""Draws a study: quality against cost, loss over steps, load over steps, experts by text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_routing_bench.report.drawing import (
    GREY,
    INK,
    PAPER,
    Picture,
    Table,
    colours,
    figure,
    file_name,
    label,
    save,
    style,
)
from moe_routing_bench.report.reading import Lines, study_lines
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.train.pareto import Pareto
from moe_routing_bench.train.study import TUNING

PANELS = {
    "seconds": ("seconds of training steps, one thread", 1.0),
    "train_flops": ("TFLOP of training", 1e-12),
    "parameters": ("million parameters", 1e-6),
    "peak_bytes": ("MiB at the peak", 2.0**-20),
}
MAX_RULES = 6  # in figures with a panel for each router


def pictures(reached: Pareto, trainings: Sequence[Training], lines: Lines) -> list[Picture]:
    """Draws the records of a study, and the load of experts and their texts if every run has its lines.

    Runs that branch off to end at equal seconds are points of the tables and have no curves of their own.
    """
    by_rule: dict[str, list[Training]] = {}
    for one in trainings:
        if one.tokens != reached.tokens:
            continue
        by_rule.setdefault(one.rule, []).append(one)
    rules = [one.rule for one in reached.standings]
    routed = [rule for rule in rules if rule in lines and lines[rule][0][0].layers]
    colour = colours(rules)
    with style():
        drawn = [_pareto(reached, colour)]
        if all(rule in by_rule for rule in rules):
            drawn.append(_curves(reached, by_rule, colour))
        if routed and all(rule in lines for rule in rules):
            drawn += [_load(routed, lines, colour), _experts(routed, lines), _sources(routed, lines)]
    return [replace(one, name=file_name(one.name, reached.study)) for one in drawn]


def draw_study(folder: Path, reached: Pareto, target: Path) -> list[str]:
    """Draws all pictures as PNG and returns their names."""
    kept = [
        one
        for one in read_trainings(folder)
        if not one.study.endswith(TUNING) and one.tokens == reached.tokens
    ]
    drawn = pictures(reached, kept, study_lines(folder, kept))
    named = [replace(one, name=one.name.partition("-")[0]) for one in drawn]
    return [path.name for one in named for path in save(one, target, (".png",))]


def _pareto(reached: Pareto, colour: dict[str, str]) -> Picture:
    made = figure(11, 8.4)
    panels = made.subplots(2, 2)
    for axes, (cost, (unit, scale)) in zip(panels.flat, PANELS.items(), strict=True):
        _front(axes, reached, cost, scale)
        for one in reached.standings:
            x = scale * getattr(one, cost)
            low, high = one.loss.interval or (one.loss.mean, one.loss.mean)
            hollow = {"mfc": PAPER} if one.sees_future else {}
            axes.errorbar(
                x, one.loss.mean, yerr=[[one.loss.mean - low], [high - one.loss.mean]], fmt="o", markersize=8,
                capsize=3, color=colour[one.rule], label=label(one.title), **hollow,
            )  # fmt: skip
        low, high = axes.get_xlim()
        middle = (low + high) / 2
        axes.set_xlim(min(low, 0.9 * middle), max(high, 1.1 * middle))  # a difference of a tenth looks small
        axes.set_xlabel(unit)
        axes.set_ylabel("held-out loss, nats per byte")
        _within(axes, reached)
    handles, labels = panels[0][0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    front = [one for one in reached.standings if not one.sees_future and "seconds" not in one.dominated_by]
    front.sort(key=lambda one: one.seconds)
    said = ", ".join(f"{one.rule} ({one.loss.said()} in {one.seconds:.0f} s)" for one in front)
    return Picture(
        name="pareto", title=f"No router is both better and faster than these: {said}",
        caption=f"Lower is better, further left is cheaper; {reached.tokens:,} bytes, "
        f"{reached.standings[0].seeds} seeds. Bars are 95 % intervals over seeds. Hollow: it sees later "
        "tokens. The line joins the routers that no other dominates. The table of the study has the numbers.",
        figure=made,
    )  # fmt: skip


def _within(axes: Any, reached: Pareto) -> None:
    """Scales to the routers that can write text. Routers that see later tokens and have much lower losses are
    named in a note instead."""
    losses = [one.loss.mean for one in reached.standings if not one.sees_future]
    spread = [bound for one in reached.standings if not one.sees_future for bound in one.loss.interval or ()]
    low, high = min([*losses, *spread]), max([*losses, *spread])
    margin = 0.12 * (high - low) or 0.05
    axes.set_ylim(low - margin, high + margin)
    outside = [
        f"{one.rule} {one.loss.mean:.3f}"
        for one in reached.standings
        if not low - margin <= one.loss.mean <= high + margin
    ]
    if outside:
        axes.annotate(
            f"outside: {', '.join(outside)}", (0.02, 0.02), xycoords="axes fraction", color=GREY, fontsize=9
        )


def _front(axes: Any, reached: Pareto, cost: str, scale: float) -> None:
    """Draws a line through the routers that no other dominates."""
    points = sorted(
        (scale * getattr(one, cost), one.loss.mean)
        for one in reached.standings
        if not one.sees_future and cost not in one.dominated_by
    )
    axes.step(
        [x for x, _ in points], [y for _, y in points], where="post", color=GREY, linewidth=1, alpha=0.7
    )


def _curves(reached: Pareto, by_rule: dict[str, list[Training]], colour: dict[str, str]) -> Picture:
    made = figure(11, 5.2)
    left, right = made.subplots(1, 2)
    best = min(one.loss.mean for one in reached.standings if not one.sees_future)
    for one in reached.standings:
        runs = by_rule[one.rule]
        steps = [point.step for point in runs[0].curve][1:]
        losses = np.array([[point.loss for point in training.curve][1:] for training in runs])
        style = {"color": colour[one.rule], "linestyle": "--" if one.sees_future else "-"}
        for axes, x in ((left, steps), (right, [step * one.step_seconds for step in steps])):
            axes.plot(x, losses.mean(0), label=label(one.title), linewidth=1.6, **style)
            axes.fill_between(
                x, losses.min(0), losses.max(0), color=colour[one.rule], alpha=0.15, linewidth=0
            )
    for axes, unit in ((left, "step"), (right, "seconds in steps, one thread")):
        axes.axhline(reached.trigram, color=INK, linewidth=1, linestyle=":")
        word = axes.annotate(
            "byte trigrams", (1, reached.trigram),
            xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=9, annotation_clip=True,
        )  # fmt: skip
        word.set_in_layout(False)  # it may be far outside the axes
        axes.set_ylim(best - 0.1, max(reached.trigram + 0.15, best + 0.9))
        axes.set_xlabel(unit)
        axes.set_ylabel("held-out loss, nats per byte")
    right.axvline(reached.budget, color=GREY, linewidth=1, linestyle="--")
    handles, labels = left.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    writes = [one for one in reached.standings if not one.sees_future]
    tokens, seconds = (
        min(writes, key=key).rule
        for key in (lambda one: one.loss.mean, lambda one: one.at_equal_seconds.mean)
    )
    rows = []
    for one in reached.standings:
        for at in zip(*(training.curve for training in by_rule[one.rule]), strict=False):
            reached_at = [point.loss for point in at]
            ends = f"{min(reached_at):.3f} to {max(reached_at):.3f}"
            rows.append((one.title, f"{at[0].step:,}", f"{at[0].step * one.step_seconds:.1f}", ends))
    return Picture(
        name="curves",
        title=f"{tokens} has the lowest loss after equal tokens, {seconds} after equal seconds",
        caption="Held-out loss. Bands show the range from the lowest to the highest seed. Dashed: the "
        "seconds at which the routers are compared.",
        figure=made, table=Table(head=("rule", "step", "seconds", "loss, all seeds"), rows=tuple(rows)),
    )  # fmt: skip


def _load(rules: Sequence[str], lines: Lines, colour: dict[str, str]) -> Picture:
    made = figure(11, 5.2)
    panels = made.subplots(1, 3)
    titles = (
        "Max violation: busiest expert / mean - 1",
        "Entropy of the load, share of log2(E)",
        "Dead experts, %",
    )
    ends = {}
    for rule in rules:
        values: dict[int, list[tuple[float, float, float]]] = {}
        for _, events in lines[rule]:
            for event in events:
                for load in event.get("layers", {}).values():
                    E = len(load["share_E"])
                    most = math.log2(E) or 1.0
                    row = (load["max_violation"], load["entropy_bits"] / most, 100 * load["dead_experts"] / E)
                    values.setdefault(event["step"], []).append(row)
        steps = sorted(values)
        means = np.array([np.mean(values[step], axis=0) for step in steps])
        ends[rule] = means[-1]
        for place, axes in enumerate(panels):
            axes.plot(steps, means[:, place], color=colour[rule], label=label(rule), linewidth=1.6)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    ordered = sorted(ends, key=lambda rule: float(ends[rule][0]))
    even, uneven = (f"{rule} {1 + ends[rule][0]:.2f}x" for rule in (ordered[0], ordered[-1]))
    rows = tuple((rule, *(f"{value:.3f}" for value in ends[rule])) for rule in ordered)
    return Picture(
        name="load", title=f"At the end the load is most even with {even}, least even with {uneven}",
        caption="Over the steps of training, mean over layers and seeds. The table has the last step.",
        figure=made, table=Table(head=("rule", *titles), rows=rows),
    )  # fmt: skip


def _experts(rules: Sequence[str], lines: Lines) -> Picture:
    """Draws the load of each expert over the steps in the last layer of seed 0, the busiest at the end on
    top."""
    shown, rows = rules[:MAX_RULES], []
    made = figure(9.5, 1.1 + 1.25 * len(shown))
    panels = made.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    image = None
    for axes, rule in zip(panels, shown, strict=True):
        events = [event for event in lines[rule][0][1] if event.get("layers")]
        load_SE = np.array([list(event["layers"].values())[-1]["share_E"] for event in events])
        load_SE *= load_SE.shape[1]  # 1 is the mean
        ordered = load_SE[:, np.argsort(-load_SE[-1])]
        steps = [event["step"] for event in events]
        image = axes.imshow(
            ordered.T, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2, interpolation="nearest",
            extent=(steps[0], steps[-1] + 1, load_SE.shape[1] + 0.5, 0.5),
        )  # fmt: skip
        axes.set_title(label(rule))
        axes.set_ylabel("expert")
        axes.grid(False)
        rows += [
            (rule, f"{place}", *(f"{ordered[at, place - 1]:.2f}" for at in (0, len(steps) // 2, -1)))
            for place in range(1, load_SE.shape[1] + 1)
        ]
    panels[-1].set_xlabel("step")
    made.colorbar(image, ax=panels, label="load / mean load", shrink=0.8)
    most = {rule: max(float(row[4]) for row in rows if row[0] == rule) for rule in shown}
    word = ", ".join(f"{rule} {most[rule]:.1f}x" for rule in sorted(most, key=most.__getitem__))
    head = ("rule", "expert", "first step", "middle", "last step")
    return Picture(
        name="experts", title=f"Load of the busiest expert / mean load after training: {word}",
        caption="The last layer of the first seed. Each row is an expert, and the busiest at the end is on "
        "top. White is the mean load, dark orange twice the mean or more, dark purple no load.",
        figure=made, table=Table(head=head, rows=tuple(rows)),
    )  # fmt: skip


def _sources(rules: Sequence[str], lines: Lines) -> Picture:
    """Draws which expert reads which text in the last layer of seed 0, before the first step and at the
    end."""
    shown, rows = rules[:MAX_RULES], []
    made = figure(max(9.0, 3.2 * len(shown) + 1), 6.6)
    panels = made.subplots(2, len(shown), squeeze=False)
    image = None
    for column, rule in enumerate(shown):
        evaluations = [event for event in lines[rule][0][1] if "losses" in event]
        told = []
        for row, (event, when) in enumerate(((evaluations[0], "before"), (evaluations[-1], "after"))):
            axes, name = panels[row][column], list(event["knowledge"])[-1]
            known = event["knowledge"][name]
            share_LE = np.array(known["by_source"])
            even = np.maximum(share_LE.mean(0, keepdims=True), 1e-9)
            image = axes.imshow(share_LE / even, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2)
            told.append(100 * known["of"]["source"])
            axes.set_title(f"{label(rule)}, {when}\ntells {told[-1]:.1f} %", fontsize=10)
            names = [label(one) for one in event["losses"]]
            axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            axes.set_xticks([])
        rows.append((rule, *(f"{value:.1f}" for value in told)))
    for axes in panels[1]:
        axes.set_xlabel("expert")
    if image is not None:
        made.colorbar(image, ax=panels, label="share of the text's pairs / mean over texts", shrink=0.8)
    most = max(rows, key=lambda row: float(row[2]))
    return Picture(
        name="sources",
        title=f"With {most[0]} the chosen expert tells most about the text: {most[2]} % after training",
        caption="Experts by text in the last layer of the first seed, on held-out text.",
        figure=made, table=Table(head=("rule", "before, %", "after, %"), rows=tuple(rows)),
    )  # fmt: skip

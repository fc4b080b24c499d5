"""Pictures of a study: quality against cost, loss over steps, load over steps, experts by text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_routing_bench.report.drawing import GREY, INK, PAPER, Picture, colours, figure, file_name, style
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.train.pareto import Pareto
from moe_routing_bench.train.study import TUNING, curves

PANELS = {
    "seconds": ("seconds of training steps, one thread", 1.0),
    "train_flops": ("TFLOP of training", 1e-12),
    "parameters": ("million parameters", 1e-6),
    "peak_bytes": ("MiB at the peak", 2.0**-20),
}
CAPTIONS = {
    "pareto": "Lower is better, to the left is cheaper. Bars are 95 % intervals over seeds; hollow: sees "
    "later tokens; the line joins what nothing dominates.",
    "curves": "At equal tokens and at equal seconds; bands from the lowest to the highest seed.",
}
Lines = dict[str, list[tuple[Training, list[dict[str, Any]]]]]


def pictures(reached: Pareto, trainings: Sequence[Training]) -> list[Picture]:
    """Quality against cost, and the loss over steps and seconds: what the records of a study hold."""
    by_rule: dict[str, list[Training]] = {}
    for one in trainings:
        by_rule.setdefault(one.rule, []).append(one)
    rules = [one.rule for one in reached.standings]
    colour = colours(rules)
    with style():
        drawn = {"pareto": _pareto(reached, colour)}
        if all(rule in by_rule for rule in rules):
            drawn["curves"] = _curves(reached, by_rule, colour)
    return [
        Picture(name=file_name(name, reached.study), caption=CAPTIONS[name], figure=made)
        for name, made in drawn.items()
    ]


def draw_study(folder: Path, reached: Pareto, target: Path) -> list[str]:
    """Draw what there is as PNG, load and experts too if the lines of every run are there; the names."""
    kept = [one for one in read_trainings(folder) if not one.study.endswith(TUNING)]
    drawn = {f"{one.name.partition('-')[0]}.png": one.figure for one in pictures(reached, kept)}
    lines: Lines = {}
    for training, events in curves(folder, kept):
        if events:
            lines.setdefault(training.rule, []).append((training, events))
    rules = [one.rule for one in reached.standings]
    routed = [rule for rule in rules if rule in lines and lines[rule][0][0].layers]
    with style():
        if routed and all(rule in lines for rule in rules):
            drawn["load.png"] = _load(reached, routed, lines, colours(rules))
            drawn["sources.png"] = _sources(reached, routed, lines)
        for name, made in drawn.items():
            made.savefig(target / name, dpi=100)
    return list(drawn)


def _pareto(reached: Pareto, colour: dict[str, str]) -> Any:
    made = figure(11, 8.4)
    panels = made.subplots(2, 2)
    for axes, (cost, (label, scale)) in zip(panels.flat, PANELS.items(), strict=True):
        _front(axes, reached, cost, scale)
        for one in reached.standings:
            x = scale * getattr(one, cost)
            low, high = one.loss.interval or (one.loss.mean, one.loss.mean)
            hollow = {"mfc": PAPER} if one.sees_future else {}
            axes.errorbar(
                x, one.loss.mean, yerr=[[one.loss.mean - low], [high - one.loss.mean]], fmt="o", markersize=8,
                capsize=3, color=colour[one.rule], label=one.title, **hollow,
            )  # fmt: skip
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss, nats per byte")
        _within(axes, reached)
    handles, labels = panels[0][0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    seeds = reached.standings[0].seeds
    made.suptitle(
        f"Study {reached.study}: quality against cost. {reached.tokens:,} bytes, {seeds} seeds.\nBars: 95 % "
        "intervals; hollow: sees later tokens; line: not dominated",
        x=0.01, ha="left",
    )  # fmt: skip
    return made


def _within(axes: Any, reached: Pareto) -> None:
    """The scale of the rules that write; far better losses of those that see the future are noted instead."""
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
    """Steps through the rules that no other dominates."""
    points = sorted(
        (scale * getattr(one, cost), one.loss.mean)
        for one in reached.standings
        if not one.sees_future and cost not in one.dominated_by
    )
    axes.step(
        [x for x, _ in points], [y for _, y in points], where="post", color=GREY, linewidth=1, alpha=0.7
    )


def _curves(reached: Pareto, by_rule: dict[str, list[Training]], colour: dict[str, str]) -> Any:
    made = figure(11, 5.2)
    left, right = made.subplots(1, 2)
    best = min(one.loss.mean for one in reached.standings if not one.sees_future)
    for one in reached.standings:
        runs = by_rule[one.rule]
        steps = [point.step for point in runs[0].curve][1:]
        losses = np.array([[point.loss for point in training.curve][1:] for training in runs])
        style = {"color": colour[one.rule], "linestyle": "--" if one.sees_future else "-"}
        for axes, x in ((left, steps), (right, [step * one.step_seconds for step in steps])):
            axes.plot(x, losses.mean(0), label=one.title, linewidth=1.6, **style)
            axes.fill_between(
                x, losses.min(0), losses.max(0), color=colour[one.rule], alpha=0.15, linewidth=0
            )
    for axes, label in ((left, "step"), (right, "seconds in steps, one thread")):
        axes.axhline(reached.trigram, color=INK, linewidth=1, linestyle=":")
        word = axes.annotate(
            "byte trigrams", (1, reached.trigram),
            xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=9, annotation_clip=True,
        )  # fmt: skip
        word.set_in_layout(False)  # it may be far outside
        axes.set_ylim(best - 0.1, max(reached.trigram + 0.15, best + 0.9))
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss, nats per byte")
    right.axvline(reached.budget, color=GREY, linewidth=1, linestyle="--")
    handles, labels = left.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    made.suptitle(
        f"Study {reached.study}: held-out loss at equal tokens and at equal seconds; bands from the "
        "lowest to the highest seed",
        x=0.01, ha="left",
    )  # fmt: skip
    return made


def _load(reached: Pareto, rules: Sequence[str], lines: Lines, colour: dict[str, str]) -> Any:
    made = figure(11, 5.2)
    panels = made.subplots(1, 3)
    titles = (
        "Max violation: busiest expert / mean - 1",
        "Entropy of the load, share of log2(E)",
        "Dead experts, %",
    )
    for rule in rules:
        runs = lines[rule]
        values: dict[int, list[tuple[float, float, float]]] = {}
        for _, events in runs:
            for event in events:
                for load in event.get("layers", {}).values():
                    E = len(load["share_E"])
                    most = math.log2(E) or 1.0
                    row = (load["max_violation"], load["entropy_bits"] / most, 100 * load["dead_experts"] / E)
                    values.setdefault(event["step"], []).append(row)
        steps = sorted(values)
        means = np.array([np.mean(values[step], axis=0) for step in steps])
        for place, axes in enumerate(panels):
            axes.plot(steps, means[:, place], color=colour[rule], label=rule, linewidth=1.6)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=4)
    made.suptitle(f"Study {reached.study}: load over steps, mean over layers and seeds", x=0.01, ha="left")
    return made


def _sources(reached: Pareto, rules: Sequence[str], lines: Lines) -> Any:
    """The last layer of seed 0: which expert reads which text, before the first step and at the end."""
    shown = rules[:6]
    made = figure(max(9.0, 3.2 * len(shown) + 1), 6.6)
    panels = made.subplots(2, len(shown), squeeze=False)
    image = None
    for column, rule in enumerate(shown):
        evaluations = [event for event in lines[rule][0][1] if "losses" in event]
        for row, (event, when) in enumerate(((evaluations[0], "before"), (evaluations[-1], "after"))):
            axes, name = panels[row][column], list(event["knowledge"])[-1]
            known = event["knowledge"][name]
            share_LE = np.array(known["by_source"])
            even = np.maximum(share_LE.mean(0, keepdims=True), 1e-9)
            image = axes.imshow(share_LE / even, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2)
            axes.set_title(f"{rule}, {when}\ntells {100 * known['of']['source']:.1f} %", fontsize=10)
            names = list(event["losses"])
            axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            axes.set_xticks([])
    for axes in panels[1]:
        axes.set_xlabel("expert")
    if image is not None:
        made.colorbar(image, ax=panels, label="share of the text's pairs / mean over texts", shrink=0.8)
    made.suptitle(
        f"Study {reached.study}: experts by text in the last layer, held-out text, seed 0", x=0.01, ha="left"
    )
    return made

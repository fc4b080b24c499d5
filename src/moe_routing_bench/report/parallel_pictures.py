"""The picture of a plan: the time of a step by parts, and memory, for each degree of expert parallelism."""

from __future__ import annotations

from pathlib import Path

from moe_routing_bench.planner.plans import ParallelPlan, Question
from moe_routing_bench.planner.step import PARTS
from moe_routing_bench.report.drawing import GREY, RED, figure

COLOURS = dict(zip(PARTS, ("#c9a227", "#8a8a8a", "#1f5fa8", "#3d8f5f", "#7fb2e5"), strict=True))


def draw_plan(model: str, question: Question, reply: ParallelPlan, path: Path) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    best_of = [reply.of(degree) for degree in reply.degrees]
    places = range(len(best_of))
    made = figure(10, 7)
    above, below = made.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    under = [0.0] * len(best_of)
    for part in PARTS:
        heights = [1e3 * one.seconds[part] for one in best_of]
        above.bar(places, heights, bottom=under, width=0.66, color=COLOURS[part], label=part)
        under = [low + more for low, more in zip(under, heights, strict=True)]
    for place, one in zip(places, best_of, strict=True):
        taken = reply.best is not None and one.degree == reply.best.degree
        how = "" if one.degree == 1 else one.transport.replace("_", " ")
        how += f"\n+{one.copies} copies" if one.copies else ""
        above.annotate(
            f"{1e3 * one.total:.3g}\n{how}", (place, under[place]), xytext=(0, 4), textcoords="offset points",
            ha="center", fontsize=8, color=RED if taken else GREY, weight="bold" if taken else "normal",
        )  # fmt: skip
    above.set_ylim(0, 1.3 * max(under))
    above.set_ylabel("ms per layer, forward")
    above.legend(frameon=False, ncols=len(PARTS), loc="upper left")
    above.set_title(
        f"{model} on {question.gpus:,} GPUs, {question.tokens:,} tokens each, {question.workload} routing\n"
        f"A model, not a measurement. {question.fabric.title}",
        loc="left", fontsize=10,
    )  # fmt: skip
    room = question.memory / 1e9
    colours = ["#3d8f5f" if one.fits else "#d9a09c" for one in best_of]
    below.bar(places, [one.memory / 1e9 for one in best_of], width=0.66, color=colours)
    below.axhline(room, color=RED, linewidth=1, linestyle="--")
    below.annotate(
        f"room: {room:.0f} GB", (len(best_of) - 0.6, room), xytext=(0, 3), textcoords="offset points",
        ha="right", fontsize=9, color=RED,
    )  # fmt: skip
    below.set_yscale("log")
    below.yaxis.set_major_formatter(ScalarFormatter())
    below.yaxis.set_minor_formatter(NullFormatter())
    below.set_ylabel("GB per rank")
    below.set_xticks(places, [f"{one.degree:,}" for one in best_of])
    below.set_xlabel("degree of expert parallelism: ranks that share the experts")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    made.savefig(path)

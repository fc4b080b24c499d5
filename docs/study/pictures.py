"""The figures of the study as SVG: those of `mrb results report` on the committed records, and four more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from facts import MEASUREMENTS, grid, load, quality, records, standings
from matplotlib.ticker import NullFormatter

from moe_routing_bench.report.drawing import COLOURS, GREY, INK, Picture, figure, style
from moe_routing_bench.report.finding import results_folders
from moe_routing_bench.report.page import make_page
from moe_routing_bench.report.reading import read

# the name of a file here: what `mrb results report --figures` calls it
FROM_REPORT = {
    "layouts": "layouts-layer-bfloat16-layouts-compared",
    "routers": "routers-layer-train-float32-routers-compared",
    "soft_stages": "stages-layer-bfloat16-routers-compared",
    "noise": "noise-2-threads",
    "curves": "curves-routers",
}
SOURCES = (*sorted((MEASUREMENTS / "records").glob("*.tar.xz")), MEASUREMENTS / "training")


def pictures() -> Iterator[Picture]:
    with results_folders(SOURCES) as found:
        page = make_page(read(found), "")
        for name, start in FROM_REPORT.items():
            named = [one for one in page.pictures if one.name.startswith(start)]
            made = max(named, key=lambda one: len(one.table.rows) if one.table else 0)  # of several chapters
            if made.figure._suptitle is not None:
                made.figure.suptitle("")  # the caption says it
            yield replace(made, name=name)
    with style():
        yield Picture(name="gains", caption="", figure=_gains())
        yield Picture(name="pareto", caption="", figure=_pareto())
        yield Picture(name="drift", caption="", figure=_drift())
        yield Picture(name="soft_growth", caption="", figure=_soft_growth())


def write(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for picture in pictures():
        paths.append(folder / f"{picture.name}.svg")
        with style():
            picture.figure.savefig(paths[-1], facecolor="white", metadata={"Date": None, "Creator": None})
    return paths


def _gains() -> Any:
    """Each cell of the grid in bfloat16: how many times faster ours is than the two others."""
    rows = records()["grid"].where(dtype="bfloat16")
    made = figure(9.5, 3.4)
    axes = made.add_subplot()
    cases = sorted({(row["D"], row["E"], row["T"], row["case"]) for row in rows.rows})
    for place, (label, start) in enumerate(
        (("Transformers' best", grid.HF), ("vLLM's CPU kernel", grid.VLLM))
    ):
        found = {row["case"]: row for row in rows.best(start)}
        at = [number for number, case in enumerate(cases) if case[3] in found]
        mine = [found[cases[number][3]] for number in at]
        reach = [[row["ratio"] - row["low"] for row in mine], [row["high"] - row["ratio"] for row in mine]]
        axes.bar(
            [number + 0.4 * place - 0.2 for number in at], [row["ratio"] for row in mine], 0.38, yerr=reach,
            capsize=2, color=COLOURS[place], label=label,
        )  # fmt: skip
    names = [case[3].partition("/")[2].removesuffix(f"-{case[2]}-bfloat16") for case in cases]
    labels = [
        f"{case[2]:,}\n{name if case[2] == 16 else ''}" for case, name in zip(cases, names, strict=True)
    ]
    axes.set_xticks(range(len(cases)), labels)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xlabel("tokens")
    axes.set_ylabel("times faster")
    made.legend(loc="outside upper center", ncols=2)
    return made


def _pareto() -> Any:
    """Each rule on a line of its own: held-out loss on the left, the time of a step on the right."""
    ordered = list(standings("routers").values())
    made = figure(9.5, 4.4)
    panels = made.subplots(1, 2, sharey=True)
    for place, one in enumerate(ordered):
        colour = GREY if one["sees_future"] else COLOURS[1] if one["max_violation"] is None else COLOURS[0]
        for axes, value, (low, high) in (
            (panels[0], one["loss"]["mean"], one["loss"]["interval"]),
            (panels[1], one["step_ratio"], one["step_interval"]),
        ):
            reach = [[value - low], [high - value]]
            axes.errorbar(value, place, xerr=reach, fmt="o", capsize=3, color=colour)
    names = [f"{one['rule']} *" if one["sees_future"] else one["rule"] for one in ordered]
    panels[0].set_yticks(range(len(ordered)), names)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("held-out loss, nats per byte, 95 % interval")
    panels[1].set_xlabel("time of a training step over softmax_topk's")
    panels[1].axvline(1, color=INK, linewidth=1)
    return made


def _drift() -> Any:
    """Max violation over the steps of the drifting stream, smoothed over 15 steps."""
    found = load("routers", "balance.json")
    made = figure(9.5, 3.8)
    axes = made.add_subplot()
    wanted = (
        "no control",
        "switch loss, weight 1",
        "sign_bias",
        "sign_bias, rate 0.01",
        "quantile",
        "l1_strength",
    )
    for place, name in enumerate(wanted):
        track = next(one for one in found["tracks"] if one["subject"]["name"] == name)
        values = np.convolve(track["series"]["max_violation"], np.ones(15) / 15, mode="valid")
        label = f"{name} ({track['subject']['router']})"
        axes.plot(np.arange(len(values)) + 14, values, color=COLOURS[place], label=label)
    for jump in found["stream"]["jumps"]:
        axes.axvline(jump, color=INK, linewidth=1, linestyle="--")
    axes.axhline(found["chance_max_violation"], color=GREY, linewidth=1, linestyle=":")
    axes.set_ylim(0, 2)
    axes.set_xlabel("step (dashed: the text jumps; dotted: experts drawn at random)")
    axes.set_ylabel("max violation, mean of 15 steps")
    made.legend(loc="outside lower center", ncols=3)
    return made


def _soft_growth() -> Any:
    rows = quality.soft_growth()
    made = figure(9.5, 3.0)
    axes = made.add_subplot()
    lengths = [int(row[0]) for row in rows]
    for place, (label, column) in enumerate((("softmax_topk, K = 2", 1), ("soft_moe", 2))):
        axes.plot(lengths, [row[column] for row in rows], "o-", color=COLOURS[place], label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in a sequence; 2,048 tokens a step")
    axes.set_ylabel("ms a step")
    axes.legend()
    return made

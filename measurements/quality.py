"""The table of docs/quality.md, and numbers of the study, from the runs in measurements/training.

    mrb train pareto DIR --out measurements/training/STUDY
    python measurements/quality.py

A test compares the page with these files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from marked import rewrite, table

from moe_routing_bench.train.predicting import predicted

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "quality.md"
RUNS = HERE / "training"
STUDIES = ("routers", "balance", "capacity", "chain", "specialise", "perft", "original")
HEAD = (
    "study", "rule", "held-out loss", "difference", "at equal seconds", "step", "MFLOP a token",
    "max violation",
)  # fmt: skip


def load(study: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RUNS / study / "pareto.json").read_text())
    return found


def studies_table() -> str:
    """All studies, a line for each rule; the baseline of a study has no difference."""
    lines = []
    for study in STUDIES:
        found = load(study)
        for one in found["standings"]:
            violation = one["max_violation"]
            lines.append((
                study,
                f"{one['rule']} *" if one["sees_future"] else one["rule"],
                spread(one["loss"]),
                "" if one["rule"] == found["baseline"] else spread(one["difference"], "+"),
                f"{one['at_equal_seconds']['mean']:.2f}",
                f"{one['step_ratio']:.2f}",
                f"{one['flops_per_token'] / 1e6:.2f}",
                "" if violation is None else f"{violation:.2f}",
            ))  # fmt: skip
    return table(HEAD, lines)


def spread(value: dict[str, Any], sign: str = "") -> str:
    """1.775±0.041: the mean, and half of its 95 % interval."""
    mean = f"{value['mean']:{sign}.3f}"
    if value["interval"] is None:
        return mean
    low, high = value["interval"]
    return f"{mean}±{(high - low) / 2:.3f}"


def gives_away(what: str, when: str = "tells") -> dict[str, list[float]]:
    """Rule -> of each layer and seed, how much the chosen expert says about `what`, in % of its entropy."""
    found: dict[str, list[float]] = {}
    with (RUNS / "routers" / "trainings.jsonl").open() as file:
        for run in map(json.loads, file):
            if run["study"] == "routers" and run["experts_per_token"]:
                shares = [100 * layer[when][what] for layer in run["layers"] if layer[when]]
                found.setdefault(run["rule"], []).extend(shares)
    return {rule: shares for rule, shares in found.items() if shares}


def layers_table() -> str:
    """The time of a step beside what the layer benchmark predicts."""
    with tempfile.TemporaryDirectory() as scratch:  # a query leaves copies beside the records
        records = Path(shutil.copytree(RUNS / "layers", Path(scratch) / "layers"))
        rows = predicted(RUNS / "routers", records)
    lines = [
        (
            one.rule,
            f"{one.layer:.2f}",
            f"{one.predicted:.1f} ({one.between[0]:.1f} to {one.between[1]:.1f})",
            f"{one.step:.1f}",
            f"{100 * one.gap:+.1f} %" if number else "",
        )
        for number, one in enumerate(rows)
    ]
    return table(("rule", "layer, ms", "predicted step, ms", "step, ms", "gap"), lines)


def soft_growth() -> list[tuple[str, float, float, float]]:
    """(sequence, milliseconds of a step of top-2, of Soft-MoE, their ratio)."""
    seconds = json.loads((RUNS / "soft" / "times.json").read_text())["seconds"]
    lines = []
    for length in dict.fromkeys(name.split(", ")[1] for name in seconds):
        top, soft = (1e3 * median(seconds[f"{rule}, {length}"]) for rule in ("softmax_topk", "soft_moe"))
        lines.append((length.removesuffix(" tokens"), top, soft, soft / top))
    return lines


if __name__ == "__main__":
    rewrite(DOCUMENT, {"studies": studies_table()})
    print(f"{DOCUMENT} agrees with the studies.")

"""The tables of docs/quality.md, written from what is in measurements/training.

    mrb train pareto DIR --out measurements/training/STUDY
    python measurements/quality.py

A test holds the document to these files.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from moe_routing_bench.train.predicting import predicted

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "quality.md"
STUDIES = HERE / "training"
HEAD = (
    "rule", "held-out, nats per byte", "from {baseline}", "at equal seconds", "ms a step", "ratio",
    "MFLOP a token", "thousand parameters", "MiB", "max violation", "rate", "decode, 8 prompts",
)  # fmt: skip
EARLY = 75  # steps: the first evaluation after the start


def table(found: dict[str, Any]) -> str:
    """One study as a Markdown table, and a line about how it was taken."""
    heads = [head.format(baseline=found["baseline"]) for head in HEAD]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for standing in found["standings"]:
        decode = standing["decode"].get("8")
        cells = (
            f"{standing['rule']} (sees the future)" if standing["sees_future"] else standing["rule"],
            _spread(standing["loss"], ""),
            "" if standing["rule"] == found["baseline"] else _spread(standing["difference"], "+"),
            f"{standing['at_equal_seconds']['mean']:.3f}",
            f"{1e3 * standing['step_seconds']:.0f}",
            "{:.2f} ({:.2f} to {:.2f})".format(standing["step_ratio"], *standing["step_interval"]),
            f"{standing['flops_per_token'] / 1e6:.2f}",
            f"{standing['parameters'] / 1e3:,.0f}",
            f"{standing['peak_bytes'] / 2**20:.0f}",
            "" if standing["max_violation"] is None else f"{standing['max_violation']:.2f}",
            f"{standing['learning_rate']:g}",
            f"{decode:,.0f}" if decode else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    made = found["made"]
    seeds = found["standings"][0]["seeds"]
    lines += [
        "",
        f"{found['tokens']:,} bytes, {seeds} seed{'s' if seeds > 1 else ''}; ± is half of a 95 % interval "
        f"over seeds; equal seconds: after {found['budget']:.0f} s; byte trigrams "
        f"{found['trigram']:.3f} nats. {made['machine']}, {made['threads']} thread, "
        f"commit {made['commit'][:10]}.",
    ]
    return "\n".join(lines)


def _spread(value: dict[str, Any], sign: str) -> str:
    mean = f"{value['mean']:{sign}.3f}"
    if value["interval"] is None:
        return mean
    low, high = value["interval"]
    return f"{mean} ± {(high - low) / 2:.3f}"


def inside_table() -> str:
    """What the runs of `routers` did on the way, and what their experts chose by at the end."""
    head = (
        "rule", f"held-out after {EARLY} steps", "experts a token at the end", "gives away of the letter",
        "of the text's source", "of the source before training", "layers that collapsed on the way",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    runs: dict[str, list[dict[str, Any]]] = {}
    with (STUDIES / "routers" / "trainings.jsonl").open() as file:
        for run in map(json.loads, file):
            if run["study"] == "routers" and run["experts_per_token"]:
                runs.setdefault(run["rule"], []).append(run)
    for rule, seeds in runs.items():
        early = mean(point["loss"] for run in seeds for point in run["curve"] if point["step"] == EARLY)
        layers = [layer for run in seeds for layer in run["layers"]]
        cells = (
            rule,
            f"{early:.2f}",
            f"{mean(run['experts_per_token'] for run in seeds):.2f}",
            _shares(layers, "tells", "character"),
            _shares(layers, "tells", "source"),
            _shares(layers, "tells_at_first", "source"),
            _collapses([said for run in seeds for said in run["collapsed"]], len(layers)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Gives away: the chosen expert, in % of the entropy of the letter's class or of the text's source.",
        "The least and the most of all layers and seeds.",
    ]
    return "\n".join(lines)


def _collapses(said: list[str], layers: int) -> str:
    """_collapses(["layer 2 from step 75, until step 225: ..."], 9) is "1 of 9, until step 225"."""
    until = [int(re.search(r"until step (\d+)", sentence)[1]) for sentence in said]  # type: ignore[index]
    return f"{len(said)} of {layers}, until step {max(until)}" if said else ""


def _shares(layers: list[dict[str, Any]], when: str, what: str) -> str:
    shares = [100 * layer[when][what] for layer in layers if layer[when]]
    return f"{min(shares):.1f} to {max(shares):.1f} %" if shares else ""


def layers_table() -> str:
    """The time of a step beside what the layer benchmark lets one expect."""
    lines = ["| rule | layer, ms | predicted step, ms | step, ms | gap |", "|---" * 5 + "|"]
    with tempfile.TemporaryDirectory() as scratch:  # a query leaves copies beside the records
        records = Path(shutil.copytree(STUDIES / "layers", Path(scratch) / "layers"))
        rows = predicted(STUDIES / "routers", records)
    for number, row in enumerate(rows):
        low, high = row.between
        gap = f"{100 * row.gap:+.1f} %" if number else ""
        lines.append(
            f"| {row.rule} | {row.layer:.2f} | {row.predicted:.1f} ({low:.1f} to {high:.1f}) "
            f"| {row.step:.1f} | {gap} |"
        )
    return "\n".join(lines)


def soft_table() -> str:
    """Steps of Soft-MoE beside those of top-2, for longer and longer sequences."""
    times = json.loads((STUDIES / "soft" / "times.json").read_text())
    rules = ("softmax_topk", "soft_moe")
    head = ("sequence", *(f"{rule}, ms a step" for rule in rules), "ratio of medians")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for length in dict.fromkeys(name.split(", ")[1] for name in times["seconds"]):
        top, soft = (1e3 * median(times["seconds"][f"{rule}, {length}"]) for rule in rules)
        lines.append(f"| {length.removesuffix(' tokens')} | {top:.0f} | {soft:.0f} | {soft / top:.2f} |")
    made = times["made"]
    how = f"{times['rounds']} rounds in turns, {made['threads']} thread, load {made['load']:.1f} afterwards"
    lines += ["", f"{how}. {made['machine']}, commit {made['commit'][:10]}."]
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Every table of the document by its name there."""
    studies = {
        path.parent.name: table(json.loads(path.read_text())) for path in STUDIES.glob("*/pareto.json")
    }
    return {**studies, "inside": inside_table(), "layers": layers_table(), "soft": soft_table()}


def written(text: str, fresh_tables: Mapping[str, str] | None = None) -> str:
    """The document with every table as the files have it; which_router.py has tables of its own."""
    for name, fresh in (tables() if fresh_tables is None else fresh_tables).items():
        begin, end = (f"<!-- table {name}: {word} -->" for word in ("begin", "end"))
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert found and closed and begin not in after, f"the document needs one place for table {name}"
        text = f"{before}{begin}\n{fresh}\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    print(f"{DOCUMENT} is as the studies have it.")

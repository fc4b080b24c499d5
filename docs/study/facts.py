"""Every number and table of the study by its name, from the records and results under measurements/.

A source writes `{{grid_transformers_bfloat16}}` or, on a line of its own, `{{table layouts}}`, and `fill`
puts the value there. Nothing else in this folder states a measured number.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "measurements"
sys.path.insert(0, str(MEASUREMENTS))  # the scripts that write README's figures and the other documents

import figures as grid  # noqa: E402
import quality  # noqa: E402
import which_router  # noqa: E402

Row = dict[str, Any]
SHORT = "rule", "held-out loss", "difference", "at equal seconds", "step", "max violation"


def fill(text: str) -> str:
    """A source with its placeholders filled. ValueError names one that does not exist."""
    known = {**facts(), **{f"table {name}": body for name, body in tables().items()}}

    def value(match: re.Match[str]) -> str:
        name = match[1].strip()
        if name not in known:
            raise ValueError(f"the study asks for {{{{{name}}}}}, which no record gives")
        return known[name]

    return re.sub(r"\{\{(.+?)\}\}", value, text)


@cache
def records() -> dict[str, grid.Records]:
    return grid.read()


def load(*parts: str) -> Any:
    return json.loads(MEASUREMENTS.joinpath(*parts).read_text())


@cache
def standings(study: str) -> dict[str, Row]:
    return {one["rule"]: one for one in quality.load(study)["standings"]}


def drift() -> dict[str, Row]:
    """Controller -> its summary on the stream that drifts and jumps."""
    return {one["subject"]["name"]: one["summary"] for one in load("routers", "balance.json")["tracks"]}


@cache
def facts() -> dict[str, str]:
    """Numbers that stand in sentences."""
    all_records = records()
    cells, layouts = all_records["grid"], all_records["layouts"]
    bfloat16, float32 = (cells.where(dtype=name) for name in ("bfloat16", "float32"))
    rules, balance, chain = standings("routers"), standings("balance"), standings("chain")
    power = {row["percent"]: row for row in load("bench", "power.json")["rows"]}
    pack = [row for row in all_records["pack"].rows if row["impl"] == "native+native"]
    plain = [row for row in all_records["plain"].rows if row["role"] != "baseline"]
    soft = all_records["soft"].where(router="soft_moe(slots_per_expert=8)").rows
    growth = quality.soft_growth()
    known = {
        "source": grid.source(all_records),
        "records": f"{sum(len(one.rows) for one in all_records.values()):,}",
        "grid_transformers_bfloat16": _decided(bfloat16.best(grid.HF)),
        "grid_transformers_float32": _decided(float32.best(grid.HF)),
        "grid_vllm": _decided(bfloat16.best(grid.VLLM)),
        "mean_transformers": grid.times(_mean(bfloat16.best(grid.HF))),
        "mean_vllm": grid.times(_mean(bfloat16.best(grid.VLLM))),
        "pack_bandwidth": grid.bandwidth(pack, "bw_strict"),
        "plain_ratio": grid.times(_mean(plain)),
        "soft_layer": " and ".join(f"{row['ratio']:.2f}" for row in soft),
        "soft_first": grid.times(growth[0][3]),
        "soft_last": grid.times(growth[-1][3]),
        "soft_from": growth[0][0],
        "soft_to": growth[-1][0],
        "trainings": str(sum(one["seeds"] for one in rules.values())),
        "bytes": f"{quality.load('routers')['tokens']:,}",
        "hash_difference": quality.spread(rules["hashed"]["difference"], "+"),
        "spread_low": f"{min(_half(one) for one in rules.values()):.3f}",
        "spread_high": f"{max(_half(one) for one in rules.values()):.3f}",
        "relu_experts": f"{rules['relu']['experts_per_token']:.2f}",
        "no_balance": f"{1 + balance['none']['max_violation']:.1f}",
        "gates_alone": f"{standings('specialise')['gates']['difference']['mean']:.2f}",
        "adapters": f"{standings('perft')['routed']['difference']['mean']:.2f}",
        "capacity_2": which_router.more(standings("capacity")["capacity 2"]["step_ratio"]),
        "chain_gain": f"{-chain['2 in a chain']['difference']['mean']:.3f}",
        "chain_one_gain": f"{-chain['1 in a chain']['difference']['mean']:.3f}",
        "equal_wrong": f"{sum(power[0]['verdicts'].get(word, 0) for word in ('FASTER', 'SLOWER'))}",
        "equal_trials": str(power[0]["trials"]),
        **{f"power_{percent}": str(row["verdicts"].get("SLOWER", 0)) for percent, row in power.items()},
        **{f"step_{_key(rule)}": which_router.more(one["step_ratio"]) for rule, one in rules.items()},
        **{f"chain_step_{rule[0]}": which_router.more(one["step_ratio"]) for rule, one in chain.items()},
        **{f"decode_{_key(rule)}": f"{one['decode'].get('8', 0):,.0f}" for rule, one in rules.items()},
        **{f"violation_{_key(rule)}": f"{one['max_violation'] or 0:.2f}" for rule, one in rules.items()},
        **{f"balance_{_key(rule)}": f"{one['max_violation']:.2f}" for rule, one in balance.items()},
        **{
            f"jump_{_key(name)}": f"{100 * one['after_jump']['drop_rate']:.1f} %"
            for name, one in drift().items()
        },
        **{f"routing_{rule}": which_router.more(row["ratio"]) for rule, row in which_router.costs().items()},
    }
    for workload in dict.fromkeys(row["workload"] for row in layouts.rows):
        rows = layouts.where(workload=workload).rows
        bmm = [row for row in rows if row["impl"].startswith("staged")]
        key = _key(workload.partition("(")[0])
        known[f"bmm_{key}"] = grid.times(_mean(bmm))
        known[f"bmm_dropped_{key}"] = grid._dropped(bmm)
        known[f"busiest_{key}"] = f"{max(row['max_over_mean'] for row in rows):.1f}"
    return known


def claims() -> dict[str, bool]:
    """What the sentences say beside their numbers -> whether the records still say it."""
    layouts, rules = records()["layouts"].rows, standings("routers")
    cost, trained = which_router.costs(), set(rules)
    gaps = {line.split(" | ")[0].strip("| "): line for line in quality.layers_table().splitlines()[3:]}
    gap = {rule: abs(float(line.split(" | ")[-1].split()[0])) for rule, line in gaps.items()}
    chain = standings("chain")
    writing = [one for one in rules.values() if not one["sees_future"] and one["max_violation"] is not None]
    large = [row for row in records()["large_olmoe"].rows if row["impl"] == "vllm_cpu"]
    return {
        "nothing that drops no pair is faster than compact": not any(
            row["verdict"] == "FASTER" and not row["dropped_pairs"] for row in layouts
        ),
        "compact and block are level": all(
            row["verdict"] in (None, "SAME", "UNDECIDED")
            for row in layouts
            if row["layout"].startswith("block")
        ),
        "no rule that writes is clearly better than top-2": not any(
            one["difference"]["interval"][1] < 0 for one in writing if one["rule"] != "softmax_topk"
        ),
        "no learned rule is shown to be better than top-2": not any(
            which_router.outcomes(end)[rule] == "better"
            for end in ("tokens", "1")
            for rule in which_router.outcomes(end).keys()
            - {"hashed", "dense, equal FLOPs", "dense, equal parameters"}
        ),
        "relu has the lowest mean loss": min(rules.values(), key=lambda one: one["loss"]["mean"])["rule"]
        == "relu",
        "relu does fewer operations than top-2": rules["relu"]["flops_per_token"]
        < rules["softmax_topk"]["flops_per_token"],
        "sigmoid_bias is the most even causal rule": min(writing, key=lambda one: one["max_violation"])[
            "rule"
        ]
        == "sigmoid_bias",
        "sixteen rules were timed, ten of them trained": (len(cost), len(trained & set(cost))) == (16, 10),
        "one turn has most of the chain's gain": chain["1 in a chain"]["difference"]["mean"]
        < 0.75 * chain["2 in a chain"]["difference"]["mean"],
        "one turn in a chain costs nothing": chain["1 in a chain"]["step_interval"][0]
        < 1
        < chain["1 in a chain"]["step_interval"][1],
        "three predictions are within two per cent": all(
            gap[rule] <= 2 for rule in ("hashed", "random_fixed", "sigmoid_bias")
        ),
        "two miss by more than a tenth": min(gap["switch"], gap["noisy_topk"]) > 10,
        "in a longer run vLLM's kernel is not told apart": [row["verdict"] for row in large] == ["UNDECIDED"],
        "ours is the fastest in every cell of the grid": all(
            row["ratio"] >= 1 for row in records()["grid"].where(dtype="bfloat16").rows
        ),
        "a larger step is as even when settled": abs(
            drift()["sign_bias"]["settled"]["max_violation"]
            - drift()["sign_bias, rate 0.01"]["settled"]["max_violation"]
        )
        < 0.05,
        "routed adapters are the best in the mean": list(standings("perft"))[:2] == ["all weights", "routed"],
    }


def _decided(rows: Sequence[Row]) -> str:
    """2.2x faster (10 cells, 1.82x to 2.7x; decided in 10 of 10 cells)"""
    return f"{grid.compared(rows).removesuffix(')')}; decided in {grid.decided(rows)})"


def _mean(rows: Sequence[Row]) -> float:
    return geometric_mean(row["ratio"] for row in rows)


def _half(one: Row) -> float:
    low, high = one["loss"]["interval"]
    return (high - low) / 2


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


@cache
def tables() -> dict[str, str]:
    """Tables in Markdown, each narrow enough for a page."""
    return {
        "grid": _grid_table(),
        "layouts": _table(grid.LAYOUTS_HEAD, grid.layouts_lines(records()["layouts"])),
        "skew": _skew_table(),
        "moving": _moving_table(),
        "routers": which_router_table(),
        "advice": which_router.advice(),
        "losses": which_router.losses(),
        "findings": which_router.bullets(),
        "soft": _table(("sequence", "top-2, ms a step", "Soft-MoE, ms a step", "ratio of medians"), [
            (length, f"{top:.0f}", f"{soft:.0f}", f"{ratio:.2f}")
            for length, top, soft, ratio in quality.soft_growth()
        ]),
        "drift": _drift_table(),
        "regret": _regret_table(),
        "layers": quality.layers_table(),
        "power": _power_table(),
        **{f"study {name}": _study_table(name) for name in (
            "routers", "balance", "capacity", "chain", "specialise", "perft"
        )},
    }  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(grid.table(head, rows))


def _grid_table() -> str:
    """Every cell of the three models in bfloat16: our time, and that of the others over ours."""
    rows = sorted(
        records()["grid"].where(dtype="bfloat16").rows, key=lambda row: (row["D"], row["E"], row["T"])
    )
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row["case"].removesuffix("-bfloat16").partition("/")[2] or row["case"], []).append(
            row
        )

    def one(cell: list[Row], start: str) -> str:
        mine = [row for row in cell if row["impl"].startswith(start)]
        if not mine:
            return "no time"
        best = min(mine, key=lambda row: row["ratio"])
        return f"{best['ratio']:.2f} ({best['low']:.2f} to {best['high']:.2f}) {best['verdict']}"

    lines = [
        (name, *(f"{row['median_ms']:.3g}" for row in cell if row["role"] == "baseline"),
         one(cell, grid.HF), one(cell, grid.VLLM))
        for name, cell in cells.items()
    ]  # fmt: skip
    head = ("model and tokens", "ours, ms", "Transformers' best, time over ours", "vLLM's kernel")
    return _table(head, lines)


def _skew_table() -> str:
    lines = []
    for (_, _, workload, _), cell in records()["skew"].cells.items():
        ours = next(row for row in cell if row["role"] == "baseline")
        theirs = [row for row in cell if row["role"] != "baseline"]
        ratio = (
            "no time"
            if not theirs
            else f"{theirs[0]['ratio']:.2f} ({theirs[0]['low']:.2f} to {theirs[0]['high']:.2f})"
        )
        lines.append((workload, f"{ours['max_over_mean']:.1f}", f"{ours['median_ms']:.1f}", ratio))
    head = ("routing", "busiest expert over the mean", "ours, ms", "Transformers' grouped_mm over ours")
    return _table(head, sorted(lines, key=lambda line: float(line[1])))


def _moving_table() -> str:
    wanted = (("plain", "rows out and back, T = 16,384"), ("routing", "top-k, plan, rows out and back"))
    lines = []
    for topic, what in wanted:
        for row in records()[topic].rows:
            ratio = (
                "1"
                if row["role"] == "baseline"
                else f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            )
            lines.append(
                (
                    what,
                    row["impl"].replace("+", " + "),
                    f"{row['median_ms']:.3g}",
                    ratio,
                    row["verdict"] or "baseline",
                )
            )
    return _table(("span", "implementation", "ms", "ratio", "verdict"), lines)


def which_router_table() -> str:
    """The cost of every rule: routing alone at E = 64, and a step of training where it was trained."""
    cost, trained = which_router.costs(), standings("routers")
    lines = []
    for name, row in sorted(cost.items(), key=lambda item: item[1]["ratio"]):
        one = trained.get(name)
        lines.append((
            f"`{name}`", f"{row['milliseconds']:.1f}",
            f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
            "" if one is None else f"{one['step_ratio']:.2f}",
            "" if one is None else f"{one['peak_bytes'] / 2**20:.0f}",
        ))  # fmt: skip
    return _table(
        ("rule", "routing alone, ms", "over softmax_topk", "step over softmax_topk", "peak MiB"), lines
    )


def _drift_table() -> str:
    lines = []
    for track in load("routers", "balance.json")["tracks"]:
        settled, jumped = track["summary"]["settled"], track["summary"]["after_jump"]
        steps = ["never" if one is None else str(one) for one in track["summary"]["steps_to_even"]]
        lines.append((
            track["subject"]["name"], f"`{track['subject']['router']}`",
            f"{settled['max_violation']:.2f}", f"{jumped['max_violation']:.2f}", ", ".join(steps),
            f"{100 * settled['drop_rate']:.1f} %", f"{100 * jumped['drop_rate']:.1f} %",
        ))  # fmt: skip
    head = ("control", "rule", "max violation", "after a jump", "steps to even", "dropped", "after a jump")
    return _table(head, lines)


def _regret_table() -> str:
    """One implementation for all cells of the grid in bfloat16, against the best of each cell."""
    cells = [
        {row["impl"]: row["ratio"] for row in cell}
        for key, cell in records()["grid"].cells.items() if key[1] == "bfloat16"
    ]  # fmt: skip
    lines = []
    for name in sorted({impl for cell in cells for impl in cell}):
        losses = sorted(cell[name] / min(cell.values()) - 1 for cell in cells if name in cell)
        lines.append((
            f"`{name}`", f"{sum(loss == 0 for loss in losses)} of {len(cells)}",
            f"{100 * losses[len(losses) // 2]:.0f} %", f"{100 * losses[-1]:.0f} %",
            str(len(cells) - len(losses)),
        ))  # fmt: skip
    lines.sort(key=lambda line: float(line[2].split()[0]))
    return _table(("always this one", "fastest in", "median loss", "worst loss", "cells it lacks"), lines)


def _power_table() -> str:
    lines = [
        (
            f"{row['percent']} %" if row["percent"] else "none: the same code",
            row["trials"],
            *(row["verdicts"].get(word, 0) for word in ("SLOWER", "FASTER", "SAME", "UNDECIDED")),
        )
        for row in load("bench", "power.json")["rows"]
    ]
    return _table(("slow-down planted", "comparisons", "SLOWER", "FASTER", "SAME", "UNDECIDED"), lines)


def _study_table(name: str) -> str:
    found = quality.load(name)
    lines = [
        (
            f"{one['rule']} *" if one["sees_future"] else one["rule"],
            quality.spread(one["loss"]),
            "" if one["rule"] == found["baseline"] else quality.spread(one["difference"], "+"),
            f"{one['at_equal_seconds']['mean']:.3f}",
            f"{one['step_ratio']:.2f}",
            "" if one["max_violation"] is None else f"{one['max_violation']:.2f}",
        )
        for one in found["standings"]
    ]
    return _table(SHORT, lines)

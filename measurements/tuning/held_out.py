"""Do decisions of a tuning hold where nothing was tuned, and do two tunings agree?

    python measurements/tuning/held_out.py use tuned/decisions.json --tokens 3,24,200 --workload uniform
    python measurements/tuning/held_out.py agree a/decisions.json b/decisions.json

use: times what impl="auto" would choose beside the kernel's own rules, for other numbers of tokens, another
workload or other sizes (--width, --hidden). With --best also the settings that were ranked at the nearest
number of tokens, from the results beside the decisions, and the regret: how much slower the chosen one is
than the fastest. Without it nothing is known of cells that keep the default. agree: two tunings agree in
an entry if they chose the same, or each found the other's choice no slower than its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import base_name
from moe_routing_bench.ops.decisions import DecisionEntry, Winner, read_decisions
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.record import RANKED
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef


def chosen(entry: DecisionEntry, tokens: int) -> Winner | None:
    """What "auto" takes for so many tokens; None: nothing was measured there."""
    return next(one for most, one in entry.spans if most is None or tokens <= most)


def ranked(folder: Path, entry: DecisionEntry, tokens: int) -> list[str]:
    """The settings that were ranked again, for the number of tokens that is nearest by ratio."""
    sizes = " AND ".join(f"{letter} = {getattr(entry.facts, letter)}" for letter in "DFEK")
    query = f"""SELECT DISTINCT T, impl_spec FROM records WHERE suite = '{RANKED}' AND status = 'PASSED'
        AND role IN ('baseline', 'candidate') AND {sizes} AND dtype = '{entry.facts.dtype}'"""
    found = [(T, ImplementationRef.read(spec)) for T, spec in run_query(folder, query)[1]]
    found = [(T, one) for T, one in found if one.frozen == entry.facts.frozen]
    nearest = min((T for T, _ in found), key=lambda T: abs(math.log(T / tokens)), default=0)
    return sorted(one.name for T, one in found if T == nearest)


def used(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    start_server()
    for entry in read_decisions(asked.files[0]).entries:
        default = base_name(entry.by_tokens[0].impl)
        for T in map(int, asked.tokens.split(",")):
            winner = chosen(entry, T)
            name = winner.impl if winner else default
            finalists = ranked(asked.files[0].parent, entry, T) if asked.best else []
            names = list(dict.fromkeys((default, name, *finalists)))
            row = {"T": T, "dtype": entry.facts.dtype, "chosen": winner and winner.impl}
            if len(names) == 1:
                yield {**row, "verdict": "the default, not timed"}
                continue
            facts = entry.facts._asdict()
            sizes = {**{letter: facts[letter] for letter in "DFEK"}, **asked.sizes}
            cell = Experiment(
                span=entry.op, case=f"own/{T}", T=T, **sizes, dtype=entry.facts.dtype,
                activation=entry.facts.activation, threads=entry.threads, max_seconds=asked.seconds,
                workload=asked.workload or entry.workload,
                implementations=tuple(
                    ImplementationRef(name=one, frozen=entry.facts.frozen) for one in names
                ),
            )  # fmt: skip
            outcome = run_cell(cell, budget=Budget(asked.seconds, kit_apart=True))
            yield {**row, **judged(outcome, default, name)}


def judged(outcome: CellOutcome, default: str, name: str) -> dict[str, Any]:
    """The chosen setting beside the default, and beside the fastest of all that were timed."""
    timed = {one.implementation.name: one for one in outcome.implementations if one.samples}
    if not {default, name} <= timed.keys():
        return {"verdict": "no time"}
    row: dict[str, Any] = {"verdict": "the default"}
    if (gain := timed[name].comparison) is not None:
        row = {
            "ratio": gain.ratio,
            "low": gain.interval[0],
            "high": gain.interval[1],
            "verdict": gain.verdict,
        }
    if len(timed) > len({default, name}):
        ratios = {one: it.comparison.ratio if it.comparison else 1.0 for one, it in timed.items()}
        best = min(ratios, key=ratios.__getitem__)
        row |= {"best": best, "timed": len(timed), "regret": ratios[name] / ratios[best] - 1}
        if best != name:
            row["beside best"] = compare(timed[best].samples, timed[name].samples).verdict
    return row


def agreeing(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    a, b = (
        {
            (entry.op, entry.facts, entry.workload, won.T): won
            for entry in read_decisions(path).entries
            for won in entry.by_tokens
        }
        for path in asked.files
    )
    for key in sorted(a.keys() & b.keys(), key=str):
        mine, its = a[key], b[key]
        tie = mine.impl in its.ties and its.impl in mine.ties
        verdict = "same" if mine.impl == its.impl else "tie" if tie else "differ"
        yield {"T": key[-1], "dtype": key[1].dtype, "a": mine.impl, "b": its.impl, "verdict": verdict}


def summary(rows: list[dict[str, Any]]) -> str:
    bad = sum(row["verdict"] in ("SLOWER", "differ") for row in rows)
    words = [f"{bad} of {len(rows)} are SLOWER or differ"]
    for name, what in (
        ("ratio", "lose at most {} against the default"),
        ("regret", "have a regret of at most {}"),
    ):
        losses = sorted(max(0.0, row[name] - (name == "ratio")) for row in rows if name in row)
        if losses:
            worst = f"{100 * losses[math.ceil(0.95 * len(losses)) - 1]:.1f} %"
            words.append(f"95 % of {len(losses)} timed cells {what.format(worst)}")
    if untimed := sum(row["verdict"] == "the default, not timed" for row in rows):
        words.append(f"{untimed} keep the default and were not timed; --best times the others beside it")
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("use", "agree"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", default="3,24,200,2000")
    parser.add_argument("--workload", default="")
    parser.add_argument("--width", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each cell")
    parser.add_argument("--best", action="store_true", help="time all that were ranked, for the regret")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.sizes = {name: size for name, size in (("D", asked.width), ("F", asked.hidden)) if size}
    rows = []
    for row in used(asked) if asked.what == "use" else agreeing(asked):
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(summary(rows))
    if asked.out is not None:
        known = {
            "machine": this_machine().name,
            "load": os.getloadavg()[0],
            "files": list(map(str, asked.files)),
        }
        asked.out.write_text(json.dumps({**known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Do decisions of a tuning hold where nothing was tuned, and do two tunings agree?

    python measurements/tuning/held_out.py use tuned/decisions.json --tokens 3,24,200 --workload uniform
    python measurements/tuning/held_out.py agree a/decisions.json b/decisions.json

use: times what impl="auto" would choose beside the kernel's own rules, for other numbers of tokens, another
workload or other sizes (--width, --hidden). agree: two tunings agree in an entry if they chose the same, or
each found the other's choice no slower than its own.
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
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import base_name
from moe_routing_bench.ops.decisions import DecisionEntry, Winner, read_decisions
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef


def chosen(entry: DecisionEntry, tokens: int) -> Winner | None:
    """What "auto" takes for so many tokens; None: nothing was measured there."""
    return next(one for most, one in entry.spans if most is None or tokens <= most)


def used(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    start_server()
    for entry in read_decisions(asked.files[0]).entries:
        for T in map(int, asked.tokens.split(",")):
            winner = chosen(entry, T)
            row = {"T": T, "dtype": entry.facts.dtype, "chosen": winner and winner.impl}
            if winner is None or winner.impl == base_name(winner.impl):
                yield {**row, "verdict": "the default"}
                continue
            names = (base_name(winner.impl), winner.impl)
            facts = entry.facts._asdict()
            sizes = {**{letter: facts[letter] for letter in "DFEK"}, **asked.sizes}
            both = tuple(ImplementationRef(name=one, frozen=entry.facts.frozen) for one in names)
            cell = Experiment(
                span=entry.op, case=f"own/{T}", T=T, **sizes, dtype=entry.facts.dtype,
                activation=entry.facts.activation, threads=entry.threads, max_seconds=asked.seconds,
                workload=asked.workload or entry.workload, implementations=both,
            )  # fmt: skip
            one = run_cell(cell, budget=Budget(asked.seconds, kit_apart=True)).implementations[1]
            if one.comparison is None:
                yield {**row, "verdict": str(one.status)}
                continue
            low, high = one.comparison.interval
            ratio = {"ratio": one.comparison.ratio, "low": low, "high": high}
            yield {**row, **ratio, "verdict": one.comparison.verdict}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("use", "agree"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", default="3,24,200,2000")
    parser.add_argument("--workload", default="")
    parser.add_argument("--width", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each cell")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.sizes = {name: size for name, size in (("D", asked.width), ("F", asked.hidden)) if size}
    rows = []
    for row in used(asked) if asked.what == "use" else agreeing(asked):
        print(json.dumps(row), flush=True)
        rows.append(row)
    bad = sum(row["verdict"] in ("SLOWER", "differ") for row in rows)
    losses = sorted(max(0.0, row.get("ratio", 1.0) - 1) for row in rows)
    worst = losses[max(0, math.ceil(0.95 * len(losses)) - 1)] if losses else 0.0
    print(f"{bad} of {len(rows)} are SLOWER or differ; 95 % of cells lose at most {100 * worst:.1f} %")
    if asked.out is not None:
        known = {
            "machine": this_machine().name,
            "load": os.getloadavg()[0],
            "files": list(map(str, asked.files)),
        }
        asked.out.write_text(json.dumps({**known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

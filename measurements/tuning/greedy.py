"""How far is greedy from the best of a small space, and how many evaluations does it save?

Every setting of a space is timed beside the default in one paired run. Then greedy is replayed on these
ratios: it picks from the same table, so both see the same noise. Writes greedy.json beside this file.

    python measurements/tuning/greedy.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.tuning.search import KnobSpace, exhaustive, greedy
from moe_routing_bench.tuning.tune import ratios_of, space_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SIZES = {"D": 512, "F": 256, "E": 16, "K": 2, "dtype": "bfloat16", "threads": 1, "min_rounds": 8}
SPACES = {
    "rows x strip, 512 tokens, frozen": (512, True, ("rows", "strip")),
    "rows x strip_out, 512 tokens": (512, False, ("rows", "strip_out")),
    "in_place x strip_out, 128 tokens": (128, False, ("in_place", "strip_out")),
}
SEARCHES = {"greedy": greedy, "greedy without pairs": partial(greedy, pairs=False), "exhaustive": exhaustive}


@dataclass(frozen=True)
class Few:
    """A space with some of the knobs, each a stage of its own."""

    whole: KnobSpace
    names: Sequence[str]

    @property
    def starts(self) -> Sequence[str]:
        return self.whole.starts

    def stages(self, setting: str) -> list[list[str]]:
        return [[name] for name in self.names]

    def settings(self, setting: str, names: Sequence[str]) -> list[str]:
        return self.whole.settings(setting, names)


def replayed(search: Any, table: dict[str, float]) -> dict[str, Any]:
    """The best setting that a search finds in the table, and how often it asked."""
    seen, evaluations = {"native": 1.0}, 0
    race = next(search)
    try:
        while True:
            evaluations += len(race.settings)
            seen |= {one: table[one] for one in race.settings}
            race = search.send({one: table[one] for one in race.settings})
    except StopIteration:
        best = min(seen, key=seen.__getitem__)
        return {"best": best, "ratio": seen[best], "settings": len(seen), "evaluations": evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each space")
    asked = parser.parse_args()
    start_server()
    spaces = []
    for title, (T, frozen, names) in SPACES.items():
        default = ImplementationRef(name="native", frozen=frozen)
        case = Experiment(
            span="expert_ffn",
            case=f"own/{T}",
            T=T,
            max_seconds=asked.seconds,
            implementations=(default,),
            **SIZES,
        )
        space = Few(space_of(case), names)
        settings = space.settings("native", names)
        cell = replace(case, implementations=tuple(replace(default, name=name) for name in settings))
        outcome = run_cell(cell, budget=Budget(asked.seconds, kit_apart=True))
        table = ratios_of(outcome)
        found = {name: replayed(search(space), table) for name, search in SEARCHES.items()}
        best = found["exhaustive"]["ratio"]
        how_far = {name: one["ratio"] / best - 1 for name, one in found.items()}
        failed = {one.label: one.status for one in outcome.implementations if not one.samples}
        spaces.append(
            {
                "space": title, "settings": len(settings), "rounds": outcome.rounds, **found,
                "slower_than_the_best_by": how_far, "noise": outcome.aa_floor, "failed": failed,
                "table": table,
            }
        )  # fmt: skip
        print(title, found, how_far, f"noise {outcome.aa_floor}", flush=True)
    document = {
        "command": f"python measurements/tuning/greedy.py --seconds {asked.seconds:g}",
        "machine": this_machine().name,
        "load": os.getloadavg()[0],
        "spaces": spaces,
    }
    Path(__file__).with_name("greedy.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

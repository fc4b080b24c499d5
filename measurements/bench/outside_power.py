"""How often the verdict on code from outside is wrong: A/A comparisons, and a known slow-down, by run_cell.

python measurements/bench/outside_power.py             75 minutes on a quiet machine  -> outside_power.json
python measurements/bench/outside_power.py --disturb   another process is busy -> outside_power_disturbed.json

A cell compares the built-in baseline with four copies of it from a folder, and for the slow-downs with four
copies that work 5 % longer by their own clock; each copy is a comparison. They share the 60 s that
`mrb bench` has by default, so a kernel measured alone is known better than here. The file is written after
each cell, two of the same to one that is slower: it may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

BUSY = "while True: sum(range(10**6))"
SLOW_DOWN = 0.05
COPIES = 4
# T, D, F, E, K: calls of about 0.5 ms to 10 ms on a slow core
SIZES = ((16, 128, 128, 8, 2), (64, 256, 256, 8, 2), (256, 256, 512, 8, 2))
KERNEL = '''
"""A copy of the default{how}."""
import time
from moe_routing_bench.ops.expert_ffn.op import op

FORWARD_ONLY = True
honest = op.get("staged").run


def run(x_TD, gate_TK, plan, weights):
    began = time.perf_counter()
    y_TD = honest(x_TD, gate_TK, plan, weights)
    until = began + (1 + {more}) * (time.perf_counter() - began)
    while {more} and time.perf_counter() < until:
        pass
    return y_TD
'''


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--same", type=int, default=200)
    options.add_argument("--slower", type=int, default=100)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--disturb", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    disturbed = "_disturbed" if given.disturb else ""
    out = given.out or Path(__file__).parent / f"outside_power{disturbed}.json"
    folder = Path(tempfile.mkdtemp())
    (folder / "expert_ffn").mkdir()
    for name, more in (("copy", 0.0), ("slower_copy", SLOW_DOWN)):
        for n in range(COPIES):
            text = KERNEL.format(how=f", {100 * more:g} % slower", more=more).lstrip()
            (folder / "expert_ffn" / f"{name}_{n}.py").write_text(text)
    busy = subprocess.Popen([sys.executable, "-c", BUSY]) if given.disturb else None
    made = {"machine": this_machine().name, **source_version()}  # before the file changes
    made |= {"disturbed": given.disturb, "seconds": given.seconds, "copies in a cell": COPIES}
    results: dict[str, list[Compared]] = {"copy": [], "slower_copy": []}
    try:
        for name in in_turn(given.same // COPIES, given.slower // COPIES):
            results[name] += compared(folder, name, len(results[name]) // COPIES, given.seconds)
            summary = {**made, **summarised(results)}
            out.write_text(json.dumps(summary, indent=1) + "\n")
    finally:
        if busy is not None:
            busy.kill()
    print(json.dumps({key: value for key, value in summary.items() if key != "ratios"}, indent=1))


def in_turn(same: int, slower: int) -> Iterator[str]:
    """What each cell compares: in_turn(4, 2) is copy, copy, slower_copy, copy, copy, slower_copy."""
    done = 0
    for number in range(1, same + 1):
        yield "copy"
        while done < slower * number // same:
            yield "slower_copy"
            done += 1


def summarised(results: dict[str, list[Compared]]) -> dict[str, Any]:
    return {
        **{name: dict(Counter(row.verdict for row in rows)) for name, rows in results.items()},
        "ratios": {name: [round(row.ratio, 4) for row in rows] for name, rows in results.items()},
        "rounds": {name: median(row.rounds for row in rows) for name, rows in results.items() if rows},
        "half_interval": {name: median(row.half for row in rows) for name, rows in results.items() if rows},
    }


@dataclass(frozen=True)
class Compared:
    """Compared(verdict="SAME", ratio=1.003, half=0.012, rounds=210): half an interval of 99 %."""

    verdict: str  # a status where something was not timed
    ratio: float
    half: float
    rounds: int


def compared(folder: Path, name: str, i: int, seconds: float) -> list[Compared]:
    """The comparisons of one cell."""
    T, D, F, E, K = SIZES[i % len(SIZES)]
    shape = MoEShape(T=T, D=D, F=F, E=E, K=K)
    case = Experiment(case="own/power", span="expert_ffn", **vars(shape), dtype="float32")
    implementations = (
        ImplementationRef(name="staged"),
        *(ImplementationRef(name=f"{name}_{n}") for n in range(COPIES)),
    )
    experiment = replace(
        case, workload="uniform", implementations=implementations, include=(str(folder),), max_seconds=seconds
    )
    rows = []
    for one in run_cell(experiment).implementations[1:]:
        if one.comparison is None:
            row = Compared(str(one.status), math.nan, math.nan, 0)
        else:
            low, high = one.comparison.interval
            row = Compared(
                one.comparison.verdict, one.comparison.ratio, (high - low) / 2, one.comparison.rounds
            )
        rows.append(row)
        print(f"{name} {i}: {row} {one.reason[:80]}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()

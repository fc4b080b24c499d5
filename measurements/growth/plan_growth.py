"""How the planning of a sweep grows with its cells.

    python measurements/growth/plan_growth.py [CELLS ...]

For each number of cells, in a process of its own: CPU seconds to make the cells, to plan them when nothing is
measured, and to plan them again when all have results. They are CPU seconds of one thread, which a busy
machine changes little. Importing is not counted. The cells are those of `mrb sweep layer` with five
workloads and six implementations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CELLS = (100, 1_000, 10_000)
WORKLOADS = ["uniform", "zipf(1.1)", "zipf(1.2)", "zipf(1.5)", "hot_rank(share=0.6)"]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    found = call()
    return found, round(time.process_time() - began, 2)


def measured(count: int) -> dict[str, Any]:
    import moe_routing_bench.fleet.sweep as sweep
    from moe_routing_bench.bench.choosing import MeasureOptions, SizeOptions, WhatOptions, sweep_experiments
    from moe_routing_bench.bench.status import Status

    sizes = SizeOptions(
        tokens=",".join(str(8 * n) for n in range(1, count // 20 + 1)), experts="32,64", topk="1,2"
    )
    what = WhatOptions(workload=WORKLOADS)
    cells, made = timed(lambda: sweep_experiments("layer", sizes, what, MeasureOptions(), dry_run=True))
    with tempfile.TemporaryDirectory() as folder:
        plan, planned = timed(lambda: sweep.plan_sweep(cells, Path(folder, "none")))
        keys = sweep.LocalExecutor().keys(cells)
        known = {key: {Status.PASSED} for some in keys for key in some}
        sweep.latest_states = lambda folder: known  # type: ignore[assignment]
        again, resumed = timed(lambda: sweep.plan_sweep(cells, Path(folder)))
    assert len(plan.todo) == len(cells) == again.done == count
    return {"cells": count, "made": made, "planned": planned, "planned again, all done": resumed}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(int(sys.argv[2]))))
        return
    for count in [int(word) for word in sys.argv[1:]] or CELLS:
        subprocess.run([sys.executable, __file__, "--one", str(count)], check=True)


if __name__ == "__main__":
    main()

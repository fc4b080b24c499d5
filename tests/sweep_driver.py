"""A sweep of tiny cells that others kill: python sweep_driver.py FOLDER CELLS [bad kernels...]

Prints a line for each cell that is on disk. Bad kernels stand in cells of their own, beside an honest one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import torch

from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep
from moe_routing_bench.ops.registry import include
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

KERNELS = Path(__file__).parent / "red_team" / "kernels"
HOW = {"min_rounds": 8, "max_rounds": 8, "step_seconds": 8, "memory_gib": 2, "checked": 2, "target": 0.5}


def make_cells(count: int, bad: list[str]) -> list[Experiment]:
    """Honest pairs; spread among them one cell for each bad kernel."""
    at = {(i + 1) * count // (len(bad) + 1): name for i, name in enumerate(bad)}
    return [
        Experiment(
            case=f"own/{i}",
            span="combine",
            T=16 + i,
            D=32,
            F=32,
            E=4,
            K=2,
            dtype="float32",
            workload="uniform",
            implementations=(
                ImplementationRef(name="gather_sum"),
                ImplementationRef(name=at.get(i, "index_add")),
            ),
            **HOW,
            include=(str(KERNELS),) if i in at else (),
        )
        for i in range(count)
    ]


def cells_in(folder: Path) -> Counter[str]:
    """How often each cell was committed: sessions are folders, records of one cell share key and session."""
    return Counter(key for key, _ in {(r.cell_key, r.session) for r in iterate(folder)})


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if os.getsid(child.pid) == child.pid:  # a worker leads a session of its own
                found.append(child)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def main(folder: Path, count: int, bad: list[str]) -> None:
    torch.set_num_threads(1)
    if bad:
        include(KERNELS)
    cells = make_cells(count, bad)
    plan = plan_sweep(cells, folder)
    print(f"todo {len(plan.todo)}", flush=True)
    for outcome in run_sweep(plan.todo, folder, LocalExecutor()):
        print(
            f"done {outcome.experiment.case} {[str(o.status) for o in outcome.implementations]}", flush=True
        )


if __name__ == "__main__":
    # a job started in the background by a shell inherits "ignore Ctrl-C"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""A sweep of 60 cells through everything that can happen to it; writes sweep_crashes.json.

    python measurements/bench/sweep_crashes.py

Five cells hold kernels of the red team (memory, hang, segfault, SIGKILL to itself, silent exit) beside an
honest one. Meanwhile the sweep itself is killed with SIGKILL three times and a worker of it three times, at
random. Shown: how many cells each kill cost, and that at the end every cell is there once, no process is left
over and no honest kernel has a bad state but for the workers that were killed from outside.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from sweep_driver import cells_in, workers_of

from moe_routing_bench.bench.weather import weather
from moe_routing_bench.machine import this_machine
from moe_routing_bench.results.store import iterate

HERE = Path(__file__).parent
DRIVER = HERE / "sweep_driver.py"
BAD = {
    "allocates_until_oom": "OOM", "loops_forever": "TIMEOUT", "segfaults": "CRASHED",
    "kills_its_process": "CRASHED", "exits_in_silence": "CRASHED",
}  # fmt: skip
CELLS, KILLS = 60, 3


def some_worker(process: subprocess.Popen) -> list[psutil.Process]:
    """Between two cells there is none for a moment."""
    for _ in range(200):
        if alive := workers_of(process):
            return alive
        time.sleep(0.01)
    return []


def main() -> None:
    rng, started = random.Random(0), time.time()
    folder = Path(tempfile.mkdtemp(prefix="sweep-crashes-"))
    parent_kills, worker_kills, left_over = [], 0, 0
    sitting = 0
    while True:
        sitting += 1
        words = [sys.executable, str(DRIVER), str(folder), str(CELLS), *BAD]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        told, stop_after = 0, rng.randint(6, 14)
        for line in process.stdout:
            if not line.startswith("done"):
                continue
            told += 1
            if worker_kills < KILLS and told % 4 == 2 and (alive := some_worker(process)):
                rng.choice(alive).kill()
                worker_kills += 1
            if len(parent_kills) < KILLS and told == stop_after:
                time.sleep(rng.random())
                alive = workers_of(process)
                before = len(cells_in(folder))
                process.kill()
                process.wait()
                time.sleep(2)
                left_over += sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in alive)
                parent_kills.append({"told": told, "on_disk": before, "still_there": len(cells_in(folder))})
                break
        process.stdout.close()
        if process.wait() == 0:
            break
    counts = cells_in(folder)
    records = list(iterate(folder))
    bad = {
        r.implementation.label: str(r.correctness.status) for r in records if r.implementation.label in BAD
    }
    honest = Counter(str(r.correctness.status) for r in records if r.implementation.label not in BAD)
    reasons = sorted(
        {r.correctness.reason for r in records if r.correctness.reason and r.implementation.label not in BAD}
    )
    document = {
        "command": "python measurements/bench/sweep_crashes.py",
        "machine": this_machine().to_dict(),
        "load_1min_after": weather().load_1min,
        "seconds": round(time.time() - started),
        "cells": CELLS,
        "sittings": sitting,
        "parent_kills": parent_kills,
        "worker_kills_from_outside": worker_kills,
        "cells_on_disk_at_the_end": len(counts),
        "cells_committed_more_than_once": sum(n > 1 for n in counts.values()),
        "processes_left_over": left_over,
        "states_of_bad_kernels": bad,
        "expected_states": BAD,
        "states_of_honest_kernels": dict(honest),
        "reasons_of_honest_kernels": reasons,
    }
    (HERE / "sweep_crashes.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

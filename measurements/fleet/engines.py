"""The same 60 cells by every engine, and with random kill -9: equal sets of records, none twice.

    python measurements/fleet/engines.py FOLDER [--kills 16] [--only local,claim,ray,slurm] > engines.json

local: one process. claim: four workers on one store. ray: three raylets (ray.cluster_utils.Cluster). slurm:
an array of four on two nodes (Debian's slurm-wlm and munge, as root). In the runs with kills, workers,
drivers, raylets and slurmd die at random moments and the same command is given again. Times were taken on a
shared and busy machine: they show that every run ends, not how fast an engine is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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

from moe_routing_bench.results.mirror import mirror
from moe_routing_bench.results.store import iterate

TOKENS = ",".join(map(str, range(16, 31)))
SWEEP = f"""sweep combine --tokens {TOKENS} --experts 4,8 --topk 1,2 --width 32 --hidden 16 --dtype float32
    --impl gather_sum,index_add --workload uniform --min-rounds 8 --rounds 8 --target 0.5 --seconds 10
    --checked 1 --threads 1""".split()
MRB = [sys.executable, "-m", "moe_routing_bench"]
CELLS = 60
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
            r.workload.case,
            str(r.routing and r.routing.spec),
            r.contender,
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
        [*MRB, "merge", *parts, "--out", str(place / "out")], check=True, stdout=subprocess.DEVNULL
    )
    return place / "out"


ENGINES: dict[str, Callable[[Path, Kills | None], Path]] = {
    "local": local, "claim": claim, "ray": ray, "slurm": slurm,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0, help="runs with kill -9, spread over the engines")
    parser.add_argument("--only", default=",".join(ENGINES))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    names = asked.only.split(",")
    runs: list[dict[str, Any]] = []
    wanted: Counter[tuple[str, ...]] | None = None
    for number in range(len(names) + asked.kills):
        name = names[number % len(names)]
        kills = Kills(asked.seed + number) if number >= len(names) else None
        place = asked.folder.resolve() / f"{number:02d}-{name}"
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
    assert all(run["records"] == 2 * CELLS and not run["twice"] and run["same as the first"] for run in runs)
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": "busy", "runs": runs}, indent=1))


if __name__ == "__main__":
    main()

"""The same 60 cells by every engine, and with random kill -9: equal sets of records, none twice.

    python measurements/fleet/engines.py FOLDER [--kills 8] [--only local,claim,ray,slurm] > engines.json

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_routing_bench.results.mirror import mirror
from moe_routing_bench.results.store import iterate

TOKENS = ",".join(map(str, range(16, 31)))
SWEEP = f"""sweep combine --tokens {TOKENS} --experts 4,8 --topk 1,2 --width 32 --hidden 16 --dtype float32
    --impl gather_sum,index_add --workload uniform --min-rounds 8 --rounds 8 --target 0.5 --seconds 10
    --checked 1 --threads 1""".split()
MRB = [sys.executable, "-m", "moe_routing_bench"]
CELLS = 60
PATIENCE = 900.0


def start(out: str, *more: str, **environment: str) -> subprocess.Popen[str]:
    words = [*MRB, *SWEEP, "--out", out, *more]
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


def kill(process: subprocess.Popen[Any]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def local(place: Path, draw: random.Random | None) -> Path:
    for again in range(3 if draw else 1):
        process = start(str(place / "out"))
        if draw and again < 2:
            time.sleep(draw.uniform(8, 40))
            kill(process)
        else:
            ended(process)
    return place / "out"


def claim(place: Path, draw: random.Random | None) -> Path:
    url = f"file://{place}/store"
    os.environ["MRB_HOME"] = str(place / "home")
    workers = [start(url, "--claim") for _ in range(4)]
    if draw:  # leases of the dead hold for 140 s, so one is killed early
        time.sleep(draw.uniform(12, 40))
        for worker in draw.sample(workers, 2):
            kill(worker)
            workers.remove(worker)
    for worker in workers:
        ended(worker)
    return mirror(url).folder


def ray(place: Path, draw: random.Random | None) -> Path:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1, resources={"cell": 1}) for _ in range(3)]
    try:
        where = {"RAY_ADDRESS": cluster.address}
        process = start(str(place / "out"), "--engine", "ray", **where)
        if draw:
            time.sleep(draw.uniform(15, 50))
            cluster.remove_node(nodes.pop(draw.randrange(3)), allow_graceful=False)
            time.sleep(draw.uniform(0, 10))
            if process.poll() is None:
                kill(process)
            process = start(str(place / "out"), "--engine", "ray", **where)
        ended(process)
    finally:
        cluster.shutdown()
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


def slurm(place: Path, draw: random.Random | None) -> Path:
    """sbatch --wait --array=1-4; a lost node's tasks are queued again by Slurm (--requeue)."""
    (place / "state").mkdir()
    host = os.uname().nodename.partition(".")[0]
    (place / "slurm.conf").write_text(CONF.format(host=host, place=place))
    environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}

    def run(*words: str, check: bool = True) -> None:
        subprocess.run(words, env=environment, check=check, timeout=PATIENCE, stdout=subprocess.DEVNULL)

    if subprocess.run(["munge", "-n"], capture_output=True).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        run("su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged")
    run("slurmctld", "-f", environment["SLURM_CONF"])
    for node in ("n1", "n2"):
        run("slurmd", "-f", environment["SLURM_CONF"], "-N", node)
    words = " ".join([*MRB, *SWEEP, "--shard", "auto", "--out", f"{place}/part-$SLURM_ARRAY_TASK_ID"])
    (place / "job.sh").write_text(f"#!/bin/bash\n{words}\n")
    batch = [
        "sbatch",
        "--wait",
        "--requeue",
        "--array=1-4",
        "-o",
        f"{place}/said-%a.txt",
        str(place / "job.sh"),
    ]
    try:
        job = subprocess.Popen(batch, env=environment, stdout=subprocess.DEVNULL)
        if draw:
            time.sleep(draw.uniform(15, 40))
            os.kill(int((place / "slurmd-n1.pid").read_text()), signal.SIGKILL)
            time.sleep(3)
            (place / "slurmd-n1.pid").unlink()
            run("slurmd", "-f", environment["SLURM_CONF"], "-N", "n1")
        job.wait(PATIENCE)
        if draw:  # what the killed node did not end
            subprocess.run(batch, env=environment, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    finally:
        for name in ("ctld.pid", "slurmd-n1.pid", "slurmd-n2.pid"):
            if (place / name).exists():
                os.kill(int((place / name).read_text()), signal.SIGTERM)
        time.sleep(3)
    parts = sorted(str(p) for p in place.glob("part-*"))
    subprocess.run(
        [*MRB, "merge", *parts, "--out", str(place / "out")], check=True, stdout=subprocess.DEVNULL
    )
    return place / "out"


ENGINES: dict[str, Callable[[Path, random.Random | None], Path]] = {
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
        name, draw = names[number % len(names)], None
        if number >= len(names):
            draw = random.Random(asked.seed + number)
        place = asked.folder.resolve() / f"{number:02d}-{name}"
        place.mkdir(parents=True)
        began = time.monotonic()
        found = contents(ENGINES[name](place, draw))
        wanted = found if wanted is None else wanted
        runs.append(
            {
                "engine": name,
                "kill -9": draw is not None,
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

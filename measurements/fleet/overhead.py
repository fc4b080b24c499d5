"""What an engine costs for each cell, over `local`, and what starting it costs once.

    python measurements/fleet/overhead.py FOLDER [--passes 3] > overhead.json        on a quiet machine

Every engine measures the same cells with one worker: 8 of them, then 32, pass after pass, the engines in
turn. The seconds of a command are a + b * cells; b less the b of `local` is what a cell costs more. Clusters
and the S3 server (SeaweedFS, on this machine) run before a command is started.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from engines import SWEEP, TESTS, TOKENS, Slurm, ended, raylets, start

FEW, MANY = 8, 32


def sweep_of(cells: int) -> list[str]:
    """Four cells for each number of tokens."""
    tokens = ",".join(map(str, range(16, 16 + cells // 4)))
    return [tokens if word == TOKENS else word for word in SWEEP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--passes", type=int, default=3)
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True)
    servers = runpy.run_path(str(TESTS / "s3_server.py"))
    with ExitStack() as stack:
        server = stack.enter_context(servers["s3_server"](folder / "s3"))
        cluster, _ = stack.enter_context(raylets(1))
        slurm = stack.enter_context(Slurm(folder / "slurm"))
        os.environ.update(server.environment, MRB_HOME=str(folder / "home"))

        def command(*more: str, out: str = "", **where: str) -> Callable[[list[str], str], None]:
            return lambda sweep, name: ended(start(out + name, *more, sweep=sweep, **where))

        def array(sweep: list[str], name: str) -> None:
            for part in slurm.place.glob("part-*"):
                part.rename(folder / f"{name}-{part.name}")
            (slurm.place / "ended-1").unlink(missing_ok=True)
            jobs.append(slurm.batch(1, sweep))  # sbatch --wait looks only every half minute
            while not (slurm.place / "ended-1").exists():
                time.sleep(0.02)

        jobs: list[subprocess.Popen[bytes]] = []
        engines = {
            "local": command(out=f"{folder}/"),
            "local into s3://": command(out="s3://mrb/"),
            "--claim on s3://": command("--claim", out="s3://mrb/"),
            "ray": command("--engine", "ray", out=f"{folder}/", RAY_ADDRESS=cluster.address),
            "slurm": array,
        }
        seconds: dict[str, dict[int, list[float]]] = {name: {FEW: [], MANY: []} for name in engines}
        for number in range(asked.passes):
            for cells in (FEW, MANY):
                for name, run in engines.items():
                    began = time.monotonic()
                    run(sweep_of(cells), f"{number}-{cells}-{list(engines).index(name)}")
                    seconds[name][cells].append(round(time.monotonic() - began, 2))
                    print(name, cells, seconds[name][cells][-1], file=sys.stderr, flush=True)
        assert all(job.wait() == 0 for job in jobs)
    each = {
        name: median(many - few for few, many in zip(by[FEW], by[MANY], strict=True)) / (MANY - FEW)
        for name, by in seconds.items()
    }
    rows = [
        {
            "engine": name,
            "seconds a cell": round(each[name], 3),
            "more than local": round(each[name] - each["local"], 3),
            "once": round(median(by[FEW]) - FEW * each[name], 2),
            f"seconds of {FEW} cells": by[FEW],
            f"seconds of {MANY} cells": by[MANY],
        }
        for name, by in seconds.items()
    ]
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "engines": rows}, indent=1))


if __name__ == "__main__":
    main()

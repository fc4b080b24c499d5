"""A sweep as an array of a real Slurm (Debian's slurm-wlm and munge): two nodes on this machine, one of whose
daemons is killed while cells run."""

from __future__ import annotations

import os
import runpy
import shutil
from collections import Counter

import pytest

from command_line import mrb
from moe_routing_bench.results.folder import iterate
from repository import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.getuid() != 0,
        reason="needs Slurm and root: apt-get install slurm-wlm munge",
    ),
]
CELLS = 6
SWEEP = f"""sweep combine --tokens {",".join(map(str, range(16, 16 + CELLS)))} --experts 4 --topk 2 --width 32
    --hidden 16 --dtype float32 --impl gather_sum,index_add --workload uniform --min-rounds 8 --rounds 8
    --target 0.5 --seconds 10 --checked 1 --threads 1""".split()


def test_two_tasks_on_two_nodes_one_of_which_loses_its_daemon(tmp_path):
    slurm = runpy.run_path(str(ROOT / "measurements/fleet/engines.py"))["Slurm"]
    with slurm(tmp_path) as cluster:
        job = cluster.batch(2, SWEEP)
        while not list(tmp_path.glob("part-*/session=*/records.jsonl")):
            assert job.poll() is None
        cluster.kill_node("n1")
        cluster.start_node("n1")
        assert job.wait(300) == 0, [path.read_text() for path in tmp_path.glob("said-*")]
    parts = sorted(str(path) for path in tmp_path.glob("part-*"))
    assert len(parts) == 2
    mrb("results", "merge", *parts, "--out", tmp_path / "all")
    keys = Counter(r.cell_key for r in iterate(tmp_path / "all") if r.implementation.role == "baseline")
    assert len(keys) == CELLS and set(keys.values()) == {1}

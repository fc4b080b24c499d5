"""The engine ray on three raylets of this machine, one of which is lost while cells run."""

from __future__ import annotations

import json
import sys

import pytest

from child_process import python
from command_line import refused
from repository import ROOT

RAYLETS = """
import json, runpy, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from moe_routing_bench.fleet.engines import engine_named
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep

folder = Path(sys.argv[1])
make_cells = runpy.run_path(sys.argv[2])["make_cells"]
cells = make_cells(6, ["segfaults"])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=1, resources={"cell": 1}, labels={"kind": "good"}) for _ in range(3)]
cluster.add_node(num_cpus=1, resources={"cell": 1})  # and one of another kind, which shall measure nothing
ray.init(address=cluster.address, log_to_driver=False)
engine = engine_named("ray(kind=good)")
plan = plan_sweep(cells, folder, executor=engine)
outcomes = []
for outcome in run_sweep(plan.todo, folder, engine):
    outcomes.append(outcome)
    if len(outcomes) == 1:
        cluster.remove_node(nodes[0], allow_graceful=False)
again = plan_sweep(cells, folder, executor=engine)
print(json.dumps({
    "todo": len(plan.todo), "cells": len({r.cell_key for r in iterate(folder)}),
    "statuses": sorted({str(r.correctness.status) for r in iterate(folder)}),
    "twice": len(outcomes) - len({o.experiment.title for o in outcomes}),
    "done": again.done, "machines": sorted({o.environment["machine"]["name"] for o in outcomes}),
}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_raylet_costs_nothing_and_a_crash_of_a_kernel_is_a_result(tmp_path):
    pytest.importorskip("ray")
    ran = python(RAYLETS, tmp_path / "results", ROOT / "tests/sweep_driver.py")
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["todo"] == found["cells"] == found["done"] == 6 and found["twice"] == 0, found
    assert found["statuses"] == ["CRASHED", "PASSED"] and len(found["machines"]) == 1


LABELS = """
import json, os
import ray
from ray.cluster_utils import Cluster
from moe_routing_bench.fleet.engines import engine_named

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
good = cluster.add_node(num_cpus=1, resources={"cell": 1}, labels={"kind": "good"})
cluster.add_node(num_cpus=1, resources={"cell": 1})
ray.init(address=cluster.address, log_to_driver=False)
engine = engine_named("ray(kind=good)")
try:
    engine_named("ray(kind=best)")
except ValueError as error:
    refused = str(error)
every = engine_named("ray")
print(json.dumps({
    "nodes": list(engine._nodes()) == [good.node_id], "all": len(every._nodes()), "refused": refused,
}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_labels_choose_nodes():
    pytest.importorskip("ray")
    found = json.loads(python(LABELS).stdout.splitlines()[-1])
    assert found["nodes"] and found["all"] == 2
    assert "kind=best" in found["refused"] and "--labels kind=best" in found["refused"]


SENT = """
import json, os, shutil, sys
from dataclasses import replace
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from moe_routing_bench.fleet.engines import engine_named
from moe_routing_bench.ops.registry import include
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.trace import write_trace
from moe_routing_bench.workloads.workload import make_workload

place = Path(sys.argv[1])
kernels, trace = place / "mine", place / "routing.safetensors"
(kernels / "combine").mkdir(parents=True)
shutil.copy(sys.argv[2], kernels / "combine")
write_trace(trace, make_workload("zipf(1.2)", T=32, E=4, K=2).routing, source="test")
include(kernels)
cells = [
    Experiment(
        case=f"own/{T}", span="combine", T=T, D=32, F=32, E=4, K=2, dtype="float32",
        workload=f"trace({trace})",
        implementations=tuple(ImplementationRef(name=n) for n in ("gather_sum", Path(sys.argv[2]).stem)),
        min_rounds=8, max_rounds=8, checked=2, target=0.5, include=(str(kernels),),
    )
    for T in (16, 24)
]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1, resources={"cell": 1})
os.environ["MRB_HOME"] = str(place / "driver")
there = {"env_vars": {"MRB_HOME": str(place / "node")}}
ray.init(address=cluster.address, log_to_driver=False, runtime_env=there)
engine, folder = engine_named("ray"), place / "results"
(keys,) = zip(*map(tuple, engine.keys(cells)))
outcomes = []
for outcome in run_sweep(cells, folder, engine):
    outcomes.append(outcome)
    if len(outcomes) == 1:  # the second was handed to Ray already, and has all it needs
        kernels.rename(place / "away")
        trace.rename(place / "gone")
records = [r for r in iterate(folder)]
wide = replace(cells[0], W=2, include=(), workload="uniform", implementations=cells[0].implementations[:1])
try:
    list(engine.run([wide], roofs=None, on_progress=None, watch=None))
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "statuses": sorted({str(r.correctness.status) for r in records}),
    "engines": sorted({r.engine for r in records}),
    "cells": [o.experiment == c for o, c in zip(outcomes, cells)],
    "paths": all(f"--include-path {kernels}" in r.repro and str(trace) in r.repro for r in records),
    "keys": sorted(keys) == sorted(o.identity.key for o in outcomes), "refused": refused,
    "shipped": sorted(p.name for p in (place / "node" / "shipped").glob("*/*")),
}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_code_and_traces_are_sent_along(tmp_path):
    pytest.importorskip("ray")
    mine = tmp_path / "mine_alone.py"  # index_add under another name
    mine.write_text((ROOT / "src/moe_routing_bench/ops/combine/index_add.py").read_text())
    ran = python(SENT, tmp_path, mine)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["statuses"] == ["PASSED"] and found["engines"] == ["ray"] and found["cells"] == [True, True]
    assert found["paths"] and found["keys"] and found["shipped"] == ["mine", "routing.safetensors"]
    assert "2 CPUs" in found["refused"]


def test_engines_by_name(tmp_path):
    assert "'ray'" in refused("sweep", "seed-fused~scaled", "--out", tmp_path, "--engine", "rays")
    said = refused("sweep", "seed-fused~scaled", "--out", tmp_path, "--engine", "local(gpu=h100)")
    assert "labels" in said


def test_without_ray_the_engine_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused("sweep", "seed-fused~scaled", "--out", tmp_path, "--engine", "ray")
    assert "moe-routing-bench[ray]" in said

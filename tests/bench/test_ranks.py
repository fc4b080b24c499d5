"""A cell on several ranks: judged, paired, written as records; what fails is a status of its own."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench import measure as measure_file
from moe_routing_bench.bench import setup as setup_file
from moe_routing_bench.bench import trial as trial_file
from moe_routing_bench.bench.choosing import on_shared_threads
from moe_routing_bench.bench.clock import CacheFlusher
from moe_routing_bench.bench.hosts import rank_worker, shared_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.ranks import RankGroup
from moe_routing_bench.bench.measure import WARM_SAMPLES
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.spans.parallel import STAGES, placement_of, span
from moe_routing_bench.bench.spans.span import all_threads
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.fleet.ray_engine import _cpus
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytestmark = pytest.mark.slow

HOW = {"min_rounds": 8, "max_rounds": 8, "checked": 2, "target": 0.5, "max_seconds": 900}
SHAPE = MoEShape(T=24, D=32, F=16, E=8, K=2)
ROOFS = Roofs(
    machine="m", read_bytes={2: 1e9}, copy_bytes={2: 1e9}, gemm_flops={"float32": {2: 1e9}}, seconds=1.0
)


def cell_of(*specs: str, W: int = 2, **more: str) -> Experiment:
    case = Experiment(case="own/x", span="parallel", **vars(SHAPE), dtype="float32", **more)
    implementations = tuple(ImplementationRef(name=spec) for spec in specs or span.all_names())
    return replace(case, workload="source_ragged(own=0.7)", implementations=implementations, W=W, **HOW)


@pytest.mark.parametrize("W", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_transport_is_judged_and_timed(W: int) -> None:
    outcome = run_cell(cell_of(W=W))
    names = [one.implementation.name for one in outcome.implementations]
    assert names[0] == "all_to_all+all_to_all" and "hierarchical+hierarchical" in names
    for one in outcome.implementations:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert (
            len(one.samples) == 8 and tuple(one.stages) == STAGES["forward"] and one.checked_timed_calls == 2
        )
        assert one.wire is not None and one.wire.sent >= one.wire.least > 0
    baseline, *others = outcome.implementations
    assert outcome.baseline is baseline and all(one.comparison for one in others)
    assert outcome.twin is not None and outcome.twin.samples != baseline.samples
    nodes = next(one.wire for one in others if one.implementation.name.startswith("hierarchical"))
    assert nodes is not None and nodes.sent == nodes.least, "on one node it sends a token once to a rank"


@pytest.mark.parametrize("direction", ["train", "backward"])
def test_gradients_are_judged_and_timed(direction: str) -> None:
    outcome = run_cell(cell_of(direction=direction))
    for one in outcome.implementations:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert tuple(one.stages) == STAGES[direction] and one.checked_timed_calls == 2


def with_other_results(monkeypatch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    """The result of all ranks, one tensor of it multiplied."""
    joined = RankGroup.file

    def changed(self: RankGroup, file: str) -> Path:
        tensors = load_file(path := joined(self, file))
        save_file({**tensors, name: tensors[name] * factor}, path)
        return path

    monkeypatch.setattr(RankGroup, "file", changed)


def test_a_wrong_gradient_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_other_results(monkeypatch, "gradient of experts.w_in_EDG", 1.1)
    (one,) = run_cell(cell_of("all_to_all+all_to_all", direction="train")).outcomes
    assert one.status is Status.WRONG_VALUE and "gradient of experts.w_in_EDG" in one.reason


def test_what_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_other_results(monkeypatch, "out", 1.5)
    outcome = run_cell(cell_of("all_to_all+all_to_all"))
    assert [one.status for one in outcome.outcomes] == [Status.WRONG_VALUE] and outcome.rounds == 0


def test_a_rank_that_dies_ends_its_implementation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, taken = RankGroup.sample, list[int]()

    def dying(self: RankGroup, **how: Any) -> Any:
        taken.append(how["place"])
        if how["place"] == 1 and taken.count(1) == 3 + 2 + WARM_SAMPLES + 3:  # in the rounds
            self.others[0]._process.kill()
        return sample(self, **how)

    monkeypatch.setattr(RankGroup, "sample", dying)
    outcome = run_cell(cell_of("all_to_all+all_to_all", "all_gather+all_gather"))
    first, second = outcome.implementations
    assert first.status is Status.PASSED and len(first.samples) == 8
    assert second.status in (Status.CRASHED, Status.RUNTIME_ERROR) and not second.samples
    assert second.reason.startswith("rank ") and "during the rounds" in second.reason


def test_ranks_keep_to_the_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a record says of caches, processes, threads and checks is what happened."""
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    for file in (setup_file, trial_file):
        monkeypatch.setattr(file, "LONG_CALL", math.inf)
    monkeypatch.setattr(measure_file, "WARM_CALL", math.inf)
    asked: list[tuple[str, dict[str, Any]]] = []
    ask, start, begun = RankGroup.ask, RankGroup.__init__, list[int]()

    def asking(self: RankGroup, what: str, answer: type[Any], **how: Any) -> Any:
        asked.append((what, how))
        return ask(self, what, answer, **how)

    monkeypatch.setattr(RankGroup, "ask", asking)
    monkeypatch.setattr(
        RankGroup, "__init__", lambda self, one, cores: begun.append(one.W) or start(self, one, cores)
    )
    experiment = cell_of("all_to_all+all_to_all", "all_gather+all_gather")
    experiment = replace(experiment, cache="hot", processes=2)
    outcome = run_cell(experiment, roofs=ROOFS)
    for one in outcome.implementations:
        assert one.status is Status.PASSED, one.reason
        assert {"memory poisoned", "right on the kit's hard cases", "inputs unchanged"} <= {*one.checks}
        assert "weights unchanged" not in one.checks
        assert len(one.samples) == 16 and one.roof_seconds is not None
    assert outcome.rounds_by_process == (8, 8) and begun == [2, 2]
    kits = [how["place"] for what, how in asked if what == "kit"]
    assert kits == [0, 1], "each once, and then it is known"
    prepared = [how for what, how in asked if what == "prepare"]
    tried = [how for how in prepared[:10] if not how["warm"]]
    assert [how["poison"] for how in tried] == [False, True, True] * 2
    assert all(how["keep"] == 0 for how in tried)
    # three calls and two to calibrate each; warm-ups, rounds and a last judged one in both sets of processes
    assert len(prepared) == 2 * (3 + 2) + 2 * (3 * WARM_SAMPLES + 3 * 8 + 2)
    assert all(how["warm"] and not how["poison"] for how in prepared if how not in tried)
    assert all(how["calls"] == 1 for how in prepared)
    assert any("2 threads in all" in note for note in outcome.notes)


@pytest.mark.parametrize("cache", ["hot", "cold", "weights-cold"])
def test_caches_of_ranks_are_as_was_asked_for(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all ranks meet before the clock starts."""
    done: list[str] = []
    monkeypatch.setattr(CacheFlusher, "__init__", lambda self: None)
    monkeypatch.setattr(CacheFlusher, "flush", lambda self: done.append("flushed"))
    monkeypatch.setattr(shared_worker, "touch", lambda values, weights: done.append("touched"))
    monkeypatch.setattr(rank_worker.dist, "barrier", lambda: done.append("met"))
    experiment = replace(cell_of("all_to_all+all_to_all", W=1), workload="uniform", cache=cache)
    rank = object.__new__(rank_worker._Rank)
    rank.stamps = []
    rank._take(experiment, None)
    rank.clock = shared_worker.clock_for("cpu", "host_wall")
    rank.ranks = Ranks(placement_of(SHAPE.E, 1))
    rank.flusher = None if cache == "hot" else rank_worker._FlushTogether()
    with torch.no_grad():
        rank.prepare(0, first=100, step=0, calls=1, keep=-1, warm=True, poison=False)
        answer = rank.go()
    before = {"hot": ["met"], "cold": ["flushed", "met"], "weights-cold": ["flushed", "met", "touched"]}
    assert done == [*before[cache], "met"]
    assert len(answer["stamps"]) == 1 + len(STAGES["forward"]) and answer["stamps"] == sorted(
        answer["stamps"]
    )


def test_ranks_die_with_their_parent() -> None:
    code = (
        "import sys, time\n"
        "from moe_routing_bench.bench.hosts.ranks import RankGroup\n"
        "from moe_routing_bench.workloads.experiment import Experiment\n"
        "group = RankGroup(Experiment.from_json(sys.argv[1]), ()).ready()\n"
        "print(*(child.pid for child in (group, *group.others)), flush=True)\n"
        "time.sleep(300)\n"
    )
    words = [sys.executable, "-c", code, cell_of("all_to_all+all_to_all").to_json()]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


def test_what_every_rank_has_must_be_the_same(tmp_path: Path) -> None:
    def group_of(*ranks: dict[str, Tensor]) -> RankGroup:
        group = object.__new__(RankGroup)
        group.others = [object.__new__(Child) for _ in ranks[1:]]
        for number, (child, tensors) in enumerate(zip((group, *group.others), ranks, strict=True)):
            child.scratch = tmp_path / str(number)
            child.scratch.mkdir(exist_ok=True)
            save_file(tensors, child.scratch / "first.safetensors")
        return group

    one, other = ({"out": torch.full((2, 1), float(n)), "gradient of router": torch.ones(3)} for n in (0, 1))
    whole = load_file(group_of(one, other).file("first"))
    assert whole["out"].flatten().tolist() == [0, 0, 1, 1] and whole["gradient of router"].tolist() == [1] * 3
    with pytest.raises(ImplementationError, match="gradient of router"):
        group_of(one, {**other, "gradient of router": torch.zeros(3)}).file("first")


def test_threads_are_those_of_a_rank() -> None:
    experiment = cell_of("all_to_all+all_to_all", W=2)
    experiment = replace(experiment, threads=2)
    assert all_threads(experiment) == 4 and _cpus(experiment) == 4
    layer = replace(experiment, span="layer", implementations=(ImplementationRef(name="staged"),))
    assert all_threads(layer) == 2, "one process, whatever the workload's ranks"
    shared = on_shared_threads([experiment, layer, replace(experiment, W=4)])
    assert [one.threads for one in shared] == [1, 2, 1]


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    padded = cell_of("all_to_all+all_to_all")
    (one,) = padded.implementations
    padded = replace(padded, implementations=(replace(one, layout="padded(capacity_factor=2)"),))
    for experiment, words in (
        (padded, "only the compact layout"),
        (cell_of("all_to_all+all_to_all", W=3), "cannot be placed on 3 ranks"),
    ):
        (one,) = run_cell(experiment).outcomes
        assert one.status is Status.UNSUPPORTED and words in one.reason


def test_the_command_writes_records(tmp_path: Path) -> None:
    sizes = ("--tokens", 16, "--width", 16, "--hidden", 8, "--experts", 4, "--topk", 2, "--dtype", "float32")
    few = ("--min-rounds", 8, "--rounds", 8, "--seconds", 600, "--impl", "all_to_all+all_to_all")
    mrb("bench", "parallel", "--ranks", "2", *sizes, *few, "--out", tmp_path)
    query = "select W, span, wire_bytes, least_wire_bytes, status from records where role = 'baseline'"
    (row,) = mrb_json("results", "query", query, "--folder", tmp_path)["rows"]
    assert row[:2] == [2, "parallel"] and row[4] == "PASSED" and row[2] >= row[3] > 0
    assert "--ranks" in refused("bench", "parallel", "--ranks", "two", *sizes)

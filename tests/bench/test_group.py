"""A cell on several ranks: judged, paired, written as records; what fails is a status of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench import group as group_file
from moe_routing_bench.bench import group_worker
from moe_routing_bench.bench.calls import Result
from moe_routing_bench.bench.choosing import on_shared_threads
from moe_routing_bench.bench.group import TRIAL_CALLS, WARM_CALLS, Group, run_group
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.rounds import WARM_SAMPLES
from moe_routing_bench.bench.spans.parallel import STAGES, placement_of, span
from moe_routing_bench.bench.spans.span import all_threads
from moe_routing_bench.bench.status import Status
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
    subjects = tuple(ImplementationRef(name=spec) for spec in specs or span.specs())
    return replace(case, workload="source_ragged(own=0.7)", implementations=subjects, W=W, **HOW)


@pytest.mark.parametrize("W", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_transport_is_judged_and_timed(W: int) -> None:
    outcome = run_group(cell_of(W=W))
    names = [one.subject.name for one in outcome.subjects]
    assert names[0] == "all_to_all+all_to_all" and "hierarchical+hierarchical" in names
    for one in outcome.subjects:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert (
            len(one.samples) == 8 and tuple(one.stages) == STAGES["forward"] and one.checked_timed_calls == 2
        )
        assert one.wire is not None and one.wire.sent >= one.wire.least > 0
    baseline, *others = outcome.subjects
    assert outcome.baseline is baseline and all(one.comparison for one in others)
    assert outcome.twin is not None and outcome.twin.samples != baseline.samples
    nodes = next(one.wire for one in others if one.subject.name.startswith("hierarchical"))
    assert nodes is not None and nodes.sent == nodes.least, "on one node it sends a token once to a rank"


@pytest.mark.parametrize("direction", ["train", "backward"])
def test_gradients_are_judged_and_timed(direction: str) -> None:
    outcome = run_group(cell_of(direction=direction))
    for one in outcome.subjects:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert tuple(one.stages) == STAGES[direction] and one.checked_timed_calls == 2


def test_a_wrong_gradient_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Group.result

    def wrong(self: Group) -> Result:
        result = right(self)
        gradients = {**result.gradients, "experts.w_in_EDG": result.gradients["experts.w_in_EDG"] * 1.1}
        return replace(result, gradients=gradients)

    monkeypatch.setattr(Group, "result", wrong)
    (one,) = run_group(cell_of("all_to_all+all_to_all", direction="train")).outcomes
    assert one.status is Status.WRONG_VALUE and "gradient of experts.w_in_EDG" in one.reason


def test_what_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Group.result

    def wrong(self: Group) -> Result:
        result = right(self)
        return replace(result, out=result.out * 1.5)

    monkeypatch.setattr(Group, "result", wrong)
    outcome = run_group(cell_of("all_to_all+all_to_all"))
    assert [one.status for one in outcome.outcomes] == [Status.WRONG_VALUE] and outcome.rounds == 0


def test_a_rank_that_dies_ends_its_subject_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call, killed = Group.call, []

    def dying(self: Group, subject: int, number: int, **how):  # type: ignore[no-untyped-def]
        if subject == 1 and number == 3 and not killed:
            killed.append(subject)
            self._processes[1].kill()
        return call(self, subject, number, **how)

    monkeypatch.setattr(Group, "call", dying)
    outcome = run_group(cell_of("all_to_all+all_to_all", "all_gather+all_gather"))
    first, second = outcome.subjects
    assert first.status is Status.PASSED and len(first.samples) == 8
    assert second.status in (Status.CRASHED, Status.RUNTIME_ERROR) and not second.samples
    assert group_file.TRIAL_CALLS > 3


def test_ranks_keep_to_the_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a record says of caches, processes, threads and checks is what happened."""
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    monkeypatch.setattr(group_file, "LONG_CALL", math.inf)
    asked: list[tuple[int, int, dict[str, Any]]] = []
    call, kit, begun = Group.call, Group.kit, list[int]()
    kits: list[int] = []
    monkeypatch.setattr(
        Group, "call", lambda self, s, n, **how: asked.append((s, n, how)) or call(self, s, n, **how)
    )
    monkeypatch.setattr(Group, "kit", lambda self, s: kits.append(s) or kit(self, s))
    start = Group.__init__
    monkeypatch.setattr(Group, "__init__", lambda self, one: begun.append(one.W) or start(self, one))
    experiment = cell_of("all_to_all+all_to_all", "all_gather+all_gather")
    experiment = replace(experiment, cache="hot", processes=2)
    outcome = run_group(experiment, roofs=ROOFS)
    for one in outcome.subjects:
        assert one.status is Status.PASSED, one.reason
        assert {"memory poisoned", "right on the kit's hard cases"} <= {*one.checks}
        assert len(one.samples) == 16 and one.roof_seconds is not None
    assert outcome.rounds_by_process == (8, 8) and begun == [2, 2]
    assert kits == [0, 1], "each once, and then it is known"
    trial = [how for _, number, how in asked if WARM_CALLS > number >= TRIAL_CALLS]
    assert [how["poison"] for how in trial] == [False, True, True] * 2
    assert len([number for _, number, _ in asked if number >= WARM_CALLS]) == 2 * 2 * WARM_SAMPLES
    timed = [how for _, number, how in asked if number < TRIAL_CALLS]
    assert len(timed) == 3 * 16 and all(how["warm"] is not None for how in timed)
    assert any("2 threads in all" in note for note in outcome.notes)


@pytest.mark.parametrize("cache", ["cold", "weights-cold"])
def test_caches_of_ranks_are_cold_if_that_was_asked_for(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Watched:
        def flush(self) -> None:
            done.append("flushed")

    monkeypatch.setattr(group_worker, "CacheFlusher", Watched)
    monkeypatch.setattr(group_worker, "touch", lambda values, weights: done.append("touched"))
    monkeypatch.setattr(group_worker.dist, "barrier", lambda: done.append("met"))
    experiment = replace(cell_of("all_to_all+all_to_all", W=1), workload="uniform")
    rank = object.__new__(group_worker._Rank)
    rank.experiment, rank.inputs = replace(experiment, cache=cache), Inputs(experiment)
    rank.ranks, rank.flusher, rank._layers = Ranks(placement_of(SHAPE.E, 1)), Watched(), {}
    with torch.no_grad():
        rank.call(0, 3, 0, keep=False, warm=None, poison=True)
    assert done == {"cold": ["flushed", "met"], "weights-cold": ["flushed", "met", "touched", "met"]}[cache]


def test_threads_are_those_of_a_rank() -> None:
    experiment = cell_of("all_to_all+all_to_all", W=2)
    experiment = replace(experiment, threads=2)
    assert all_threads(experiment) == 4 and _cpus(experiment) == 4
    layer = replace(experiment, span="layer", implementations=(ImplementationRef(name="staged"),))
    assert layer.all_threads == 2, "one process, whatever the workload's ranks"
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
        (one,) = run_group(experiment).outcomes
        assert one.status is Status.UNSUPPORTED and words in one.reason


def test_the_command_writes_records(tmp_path: Path) -> None:
    sizes = ("--tokens", 16, "--width", 16, "--hidden", 8, "--experts", 4, "--topk", 2, "--dtype", "float32")
    few = ("--min-rounds", 8, "--rounds", 8, "--seconds", 600, "--impl", "all_to_all+all_to_all")
    mrb("bench", "parallel", "--ranks", "2", *sizes, *few, "--out", tmp_path)
    query = "select W, span, wire_bytes, least_wire_bytes, status from records where role = 'baseline'"
    (row,) = mrb_json("results", "query", query, "--folder", tmp_path)["rows"]
    assert row[:2] == [2, "parallel"] and row[4] == "PASSED" and row[2] >= row[3] > 0
    assert "--ranks" in refused("bench", "parallel", "--ranks", "two", *sizes)

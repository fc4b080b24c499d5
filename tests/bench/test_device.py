"""A GPU as far as it can be had without one: inputs placed, steps taken, the quick sweep planned, resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import mrb_json, refused
from moe_routing_bench.bench.clock import DeviceClock, EventClock, GraphClock, HostClock
from moe_routing_bench.bench.device import clock_for, placed
from moe_routing_bench.bench.inputs import Inputs, fingerprint
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from timing import in_time

pytestmark = pytest.mark.slow

SHAPE = MoEShape(T=16, D=16, F=8, E=8, K=2)


def call(inputs: Inputs, number: int, layout: str) -> dict[str, Any]:
    span = span_named(inputs.experiment.span)
    return span.arguments(span.call(ImplementationRef(name="", layout=layout), inputs, number, 0))


@pytest.mark.parametrize("layout", ["compact", "block(4)", "padded(capacity=3)"])
@pytest.mark.parametrize("span", span_names())
def test_every_input_is_put_on_the_device(span: str, layout: str) -> None:
    case = Experiment(case="x", span=span, **vars(SHAPE), bias=True, shared_F=8)
    # a device that nothing here can be on by mistake
    inputs = Inputs(replace(case, workload="uniform"), put="meta")
    for number in range(2):
        given = call(inputs, number, layout)
        assert {tensor.device.type for tensor in tensors_in(given)} == {"meta"}
    kept = (inputs.weights, inputs.shared, inputs.router_DE)
    assert {tensor.device.type for tensor in tensors_in(kept)} == {"meta"}


@pytest.mark.parametrize("span", span_names())
def test_placing_changes_no_bit_and_copies_nothing_that_is_there(span: str) -> None:
    case = Experiment(case="x", span=span, **vars(SHAPE))
    inputs = Inputs(replace(case, workload="uniform"))
    there = call(inputs, 3, "compact")
    assert fingerprint(placed(tuple(there.values()), "cpu")) == fingerprint(there)
    pairs = zip(tensors_in(placed(tuple(there.values()), "cpu")), tensors_in(there), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    # the judge knows the weights by identity
    assert placed(inputs.weights, "cpu") is inputs.weights


@pytest.mark.timing
def test_each_device_has_its_clock() -> None:
    assert clock_for("cuda", "cuda_events") == EventClock(cuda=torch.cuda)
    assert clock_for("cuda", "cuda_graph") == GraphClock(cuda=torch.cuda)
    assert clock_for("cuda", "cuda_device") == DeviceClock(cuda=torch.cuda)
    assert clock_for("cuda", "cuda_device", replayable=False) == EventClock(cuda=torch.cuda)
    assert clock_for("cuda", "host_wall") == HostClock("cuda")
    assert clock_for("cpu", "host_wall") == HostClock("cpu")
    seconds = clock_for("pretend", "cuda_events").span([lambda: torch.ones(1000).sum()])
    assert seconds > 0
    in_time(seconds < 1, f"one sum took {seconds} s")


@pytest.mark.parametrize(
    "given,told",
    [
        ({"device": "tpu"}, "no device"),
        ({"device": "cuda", "view": "sundial"}, "no view"),
        ({"device": "pretend:h200", "view": "cuda_events"}, "no device"),
        ({"device": "pretend:h100:gremlins", "view": "cuda_events"}, "no device"),
        ({"device": "cuda:h100", "view": "cuda_events"}, "no device"),
        ({"view": "cuda_events"}, "no view"),
        ({"device": "cuda", "view": "cuda_events", "cache": "cold"}, "choose hot"),
    ],
)
def test_a_policy_for_nowhere_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Experiment(span="layer", **vars(SHAPE), **given)  # type: ignore[arg-type]


def test_the_quick_sweep_is_planned_for_a_gpu_within_fifteen_minutes(
    tmp_path: Path, usual_speed: None
) -> None:
    """Oracles run on the CPU."""
    plan = mrb_json("sweep", "gpu-quick", "--out", tmp_path, "--dry-run")
    assert plan["to_do"] == len(cases("gpu-quick")) == 10
    assert plan["about_seconds"] < 15 * 60
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_can_be_done(tmp_path: Path) -> None:
    said = refused("sweep", "gpu-quick", "--out", tmp_path)
    assert "no GPU" in said and "--device pretend" in said


@pytest.mark.timeout(600)  # 8 s on a quiet machine
def test_the_quick_sweep_runs_and_resumes_on_a_pretended_device(tmp_path: Path) -> None:
    words = (
        "sweep", "gpu-quick/topk", "--device", "pretend", "--out", tmp_path, "--impl",
        "sort,packed_key", "--rounds", "8"
    )  # fmt: skip
    assert mrb_json(*words)["to_do"] == 1
    records = list(iterate(tmp_path))
    assert {(r.experiment.device, r.experiment.view) for r in records} == {("pretend", "cuda_events")}
    assert {r.correctness.status for r in records} == {Status.PASSED}
    # roofs are the CPU's: a GPU is not held to them
    assert all(r.work is not None and r.work.floor_seconds is None for r in records)
    assert all("--device pretend" in r.repro for r in records)
    assert mrb_json(*words)["to_do"] == 0

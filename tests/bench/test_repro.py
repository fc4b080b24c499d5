"""The command of a record asks the same question again: every field of the resume key comes back."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import mrb
from moe_routing_bench.bench.identity import key_fields
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.workloads.axes import axes_of, values_of
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import FEWER_TOKENS, Experiment, ImplementationRef

OWN = Experiment(case="own/8x32x16-e8-k2", span="expert_ffn", T=8, D=32, F=16, E=8, K=2, dtype="float32")
LAYER = replace(OWN, span="layer")
ROUTED = ImplementationRef(name="staged", router="softmax_topk")
PLAIN = ImplementationRef(name="plain")
HEADS = replace(
    OWN, span="attention", weights=False, heads=4, kv_heads=2, sequences=2, context=9, causal=False, window=3,
    rotary=True,
)  # fmt: skip
CELL = replace(OWN, workload="zipf(1.2)", implementations=(ImplementationRef(name="staged"),))
ANOTHER: dict[str, Any] = {
    "threads": 2, "cache": "cold", "device": "pretend", "target": 0.05, "min_rounds": 30, "max_rounds": 500,
    "max_seconds": 33.5, "processes": 2, "step_seconds": 7.0, "memory_gib": 3.5, "checked": 5,
    "stages": True, "sandbox": True, "trust": True, "all": True,
}  # fmt: skip


def of_case(case: Experiment, *implementations: ImplementationRef) -> Experiment:
    return replace(case, implementations=implementations or CELL.implementations)


CELLS = {
    "plain": CELL,
    "bias": replace(CELL, bias=True),
    "shared": of_case(replace(LAYER, shared_F=16), ROUTED),
    "activation": replace(CELL, activation="gelu"),
    "direction": replace(CELL, direction="train"),
    "store": replace(CELL, case=f"{OWN.case}-int8", store="int8"),
    "named": of_case(cases("seed-fused/32x8192x6144")[0]),
    "named, other dtype": of_case(replace(cases("seed-fused/1x7168x256")[0], dtype="bfloat16")),
    # blocks are always timed in stages
    "block": of_case(
        replace(cases("seed-moe-block/4x64~scaled")[0], stages=True), replace(ROUTED, name="ours")
    ),
    "model": of_case(
        replace(cases("whole-model/decode-128~scaled")[0], stages=True), replace(ROUTED, name="ours")
    ),
    "attention": of_case(cases("seed-attention/bert-128-float32")[0], PLAIN),
    "attention, own sizes": of_case(HEADS, PLAIN),
    "frozen": of_case(OWN, ImplementationRef(name="native", frozen=True)),
    "seed": replace(CELL, seed=3),
    "ranks": replace(CELL, W=2),
    "workload": replace(CELL, workload="lognormal(maxvio=2)"),
    "layout": of_case(OWN, ImplementationRef(name="staged", layout="block(16)")),
    "router": of_case(LAYER, replace(ROUTED, router="switch")),
    "kind": of_case(LAYER, replace(ROUTED, layer="chain(iterations=2)")),
}


def asked_again(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """The cell that the command would measure; nothing is measured."""
    taken: list[Experiment] = []

    def measured(cells: Any, *args: Any, **more: Any) -> list[Any]:
        taken.extend(cells)
        return []

    monkeypatch.setattr("moe_routing_bench.cli.bench.measured", measured)
    mrb(*shlex.split(repro_command(experiment, experiment.implementations[-1]))[1:])
    (again,) = taken
    return again


HOW = [one.name for one, _ in axes_of(Experiment, "how") if one.name != "view"]


@pytest.mark.parametrize("field", HOW)
def test_every_field_that_says_how_comes_back(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view follows from the device."""
    changed = {"view": "cuda_events"} if field == "device" else {}
    experiment = replace(CELL, **changed, **{field: ANOTHER[field]})
    assert experiment != CELL
    assert values_of(asked_again(experiment, monkeypatch), "how") == values_of(experiment, "how")


@pytest.mark.parametrize("name", CELLS)
def test_every_field_of_the_key_comes_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, experiment = this_machine(), CELLS[name]
    assert key_fields(asked_again(experiment, monkeypatch), machine) == key_fields(experiment, machine)


def test_fewer_tokens_of_a_model_are_asked_for_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = cases("granite-3-moe/prefill-256")
    fewer = replace(whole, case=f"{whole.case}~64{FEWER_TOKENS}", scaled_from=whole.case, T=64)
    again = asked_again(of_case(fewer), monkeypatch)
    assert again.shape == fewer.shape and again.dtype == fewer.dtype


def test_folders_of_code_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "combine").mkdir()
    experiment = replace(CELL, include=(str(tmp_path),))
    assert asked_again(experiment, monkeypatch).include == experiment.include

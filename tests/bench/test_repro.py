"""The command of a record asks the same question again: every field of the resume key comes back."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from command_line import mrb
from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.identity import key_fields
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.cases import FEWER_TOKENS, BenchCase, cases

OWN = BenchCase(
    name="own/8x32x16-e8-k2", span="expert_ffn", shape=MoEShape(T=8, D=32, F=16, E=8, K=2), dtype="float32"
)
LAYER = replace(OWN, span="layer")
ROUTED = Subject(spec="staged", router="softmax_topk")
CELL = Cell(case=OWN, workload="zipf(1.2)", subjects=(Subject(spec="staged"),))
ANOTHER: dict[str, Any] = {
    "threads": 2, "cache": "cold", "device": "pretend", "target": 0.05, "min_rounds": 30, "max_rounds": 500,
    "max_seconds": 33.5, "processes": 2, "step_seconds": 7.0, "memory_gib": 3.5, "checked": 5,
    "stages": True, "sandbox": True, "all": True,
}  # fmt: skip
CELLS = {
    "plain": CELL,
    "bias": replace(CELL, case=replace(OWN, bias=True)),
    "shared": replace(CELL, case=replace(LAYER, shared_F=16), subjects=(ROUTED,)),
    "activation": replace(CELL, case=replace(OWN, activation="gelu")),
    "direction": replace(CELL, case=replace(OWN, direction="train")),
    "store": replace(CELL, case=replace(OWN, name=f"{OWN.name}-int8", store="int8")),
    "named": replace(CELL, case=cases("seed-fused/32x8192x6144")[0]),
    "named, other dtype": replace(CELL, case=replace(cases("seed-fused/1x7168x256")[0], dtype="bfloat16")),
    "block": replace(
        CELL, case=cases("seed-decoder/4x64~scaled")[0], subjects=(replace(ROUTED, spec="ours"),)
    ),
    "frozen": replace(CELL, subjects=(Subject(spec="native", frozen=True),)),
    "seed": replace(CELL, seed=3),
    "ranks": replace(CELL, W=2),
    "workload": replace(CELL, workload="lognormal(maxvio=2)"),
    "layout": replace(CELL, subjects=(Subject(spec="staged", layout="block(16)"),)),
    "router": replace(CELL, case=LAYER, subjects=(replace(ROUTED, router="switch"),)),
    "kind": replace(CELL, case=LAYER, subjects=(replace(ROUTED, layer="chain(iterations=2)"),)),
}


def asked_again(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The cell that the command would measure; nothing is measured."""
    taken: list[Cell] = []

    def measured(cells: Any, *args: Any, **more: Any) -> list[Any]:
        taken.extend(cells)
        return []

    monkeypatch.setattr("moe_routing_bench.cli.bench.measured", measured)
    mrb(*shlex.split(repro_command(cell, cell.subjects[-1]))[1:])
    (again,) = taken
    return again


@pytest.mark.parametrize("field", [field.name for field in fields(Policy) if field.name != "view"])
def test_every_field_of_a_policy_comes_back(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view follows from the device."""
    policy = Policy(**{"view": "cuda_events"} if field == "device" else {}, **{field: ANOTHER[field]})
    assert policy != Policy()
    assert asked_again(replace(CELL, policy=policy), monkeypatch).policy == policy


@pytest.mark.parametrize("name", CELLS)
def test_every_field_of_the_key_comes_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, cell = this_machine(), CELLS[name]
    assert key_fields(asked_again(cell, monkeypatch), machine) == key_fields(cell, machine)


def test_fewer_tokens_of_a_model_are_asked_for_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = cases("granite-3-moe/prefill-256")
    fewer = replace(
        whole, name=f"{whole.name}~64{FEWER_TOKENS}", scaled_from=whole.name, shape=replace(whole.shape, T=64)
    )
    again = asked_again(replace(CELL, case=fewer), monkeypatch)
    assert again.case.shape == fewer.shape and again.case.dtype == fewer.dtype


def test_folders_of_code_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "combine").mkdir()
    cell = replace(CELL, include=(str(tmp_path),))
    assert asked_again(cell, monkeypatch).include == cell.include

"""Outcomes travel as JSON with the machine they ran on, and plans go by the keys of that machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.query import run_query
from moe_routing_bench.workloads.experiment import ImplementationRef
from sample_outcomes import HASH, an_outcome

IMPLEMENTATIONS = (ImplementationRef(name="staged"), ImplementationRef(name="native", layout="block(64)"))


def travelled(machine: str = "far-2-cores") -> CellOutcome:
    there = json.loads(json.dumps(environment_document(replace(this_machine(), cpu=machine))))
    return replace(an_outcome(0.01, 0.02, implementations=IMPLEMENTATIONS), environment=there)


class Elsewhere:
    """An engine whose machines give cells keys of their own."""

    name = "elsewhere"

    def __init__(self, *outcomes: CellOutcome):
        self.outcomes = outcomes

    def keys(self, cells: Any) -> list[set[str]]:
        return [{HASH} for _ in cells]

    def run(self, cells: Any, **more: Any) -> Any:
        return iter(self.outcomes)


def test_an_outcome_comes_back_as_it_was_sent():
    sent = travelled()
    assert CellOutcome.from_json(sent.to_json()) == sent
    infinite = replace(sent, outcomes=(replace(sent.outcomes[0], max_error=float("inf")), sent.outcomes[1]))
    assert CellOutcome.from_json(infinite.to_json()).outcomes[0].max_error is None


def _without_machine(document: dict[str, Any]) -> None:
    del document["environment"]["machine"]["name"]


def _foreign_implementation(document: dict[str, Any]) -> None:
    document["outcomes"][0]["implementation"]["name"] = "another"


def _without_hash(document: dict[str, Any]) -> None:
    document["identity"]["sources"].pop()


def _time_without_pass(document: dict[str, Any]) -> None:
    document["outcomes"][0]["status"] = "CRASHED"


def _text_for_pairs(document: dict[str, Any]) -> None:
    document["identity"]["sources"] = "abc"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_without_machine, "the machine"),
        (_foreign_implementation, "its cell"),
        (_without_hash, "hash"),
        (_time_without_pass, "a pass"),
        (_text_for_pairs, "not pairs"),
    ],
)
def test_what_is_no_outcome_is_refused_in_a_sentence(change, sentence):
    document = json.loads(travelled().to_json())
    change(document)
    with pytest.raises(ValueError, match=sentence):
        CellOutcome.from_json(json.dumps(document))
    with pytest.raises(ValueError, match="an outcome"):
        CellOutcome.from_json("[" * 100_000)


def test_records_name_the_machine_a_cell_ran_on_and_plans_go_by_its_keys(tmp_path):
    near, far = travelled("near"), travelled("far")
    engine = Elsewhere(near, far)
    list(run_sweep([near.experiment, far.experiment], tmp_path, engine))
    assert len({record.environment for record in iterate(tmp_path)}) == 2
    _, rows = run_query(tmp_path, "SELECT DISTINCT machine FROM records ORDER BY 1")
    assert [name.partition("-")[0] for (name,) in rows] == ["far", "near"]
    assert plan_sweep([near.experiment], tmp_path, executor=engine).done == 1
    assert plan_sweep([near.experiment], tmp_path, executor=LocalExecutor()).done == 0

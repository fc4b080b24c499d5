"""docs/routers.md and the table of the reference: every router, its formula, claims that hold."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest
import torch

from moe_routing_bench import Layout, TokenInfo, make_plan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.routers.router import all_routers, build
from repository import ROOT

TEXT = (ROOT / "docs" / "routers.md").read_text()


def cost_script() -> ModuleType:
    path = ROOT / "measurements" / "routers" / "router_cost.py"
    spec = importlib.util.spec_from_file_location("router_cost", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["router_cost"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_router_has_a_formula() -> None:
    for name, rule in all_routers().items():
        module = sys.modules[rule.__module__]
        assert re.search(r"^    \S", module.__doc__ or "", re.M), f"{name} has no formula"


def test_the_map_names_the_rules_that_see_later_tokens() -> None:
    leaks = re.search(r"\*\*Not causal\.\*\* (.*?) let later", TEXT, re.S)
    assert leaks is not None
    not_causal = {name for name, rule in all_routers().items() if not rule.causal}
    assert set(re.findall(r"`(\w+)`", leaks[1])) == not_causal


def test_the_reference_has_the_facts_of_every_router() -> None:
    script = cost_script()
    head, rows = script.reference()
    assert sorted(row[0].strip("`") for row in rows) == sorted(script.WORK) == sorted(all_routers())
    assert all(len(row) == len(head) for row in rows)
    assert "\n{{facts}}\n" in (ROOT / "docs" / "reference" / "routers.md").read_text()


def routed(name: str, T: int, E: int, K: int, *, training: bool = True, **options: int) -> Routing:
    torch.manual_seed(0)
    router = build(name, 32, E, K, **options).train(training)
    routing = router(torch.randn(T, 32), TokenInfo(token_id_T=torch.randint(1000, (T,))))
    assert isinstance(routing, Routing)
    return routing


def test_expert_choice_fills_a_padded_layout_exactly() -> None:
    routing = routed("expert_choice", 64, 8, 2)
    plan = make_plan(routing, Layout.padded(capacity=16))
    assert plan.num_rows == 8 * 16 and plan.count_E.tolist() == [16] * 8
    assert plan.num_rows == int(routing.load_E().sum())
    # a factor is of the width of a row, which is E
    assert Layout.parse("padded(capacity_factor=1.0)").num_rows(64, routing.num_choices, 8) == 8 * 64


def test_base_assignment_fills_one_in_training() -> None:
    routing = routed("base_assignment", 64, 8, 1)
    assert make_plan(routing, Layout.padded(capacity=8)).count_E.tolist() == [8] * 8
    assert max(routed("base_assignment", 64, 8, 1, training=False).load_E().tolist()) > 8


def test_rounded_tokens_leave_no_padding_in_blocks() -> None:
    routing = routed("token_rounding", 256, 8, 2, tile=16)
    load = routing.load_E()
    assert bool((load % 16 == 0).all())
    assert make_plan(routing, Layout.block(16)).offset_E1[-1] == load.sum()
    plain = routed("softmax_topk", 256, 8, 2)
    assert make_plan(plain, Layout.block(16)).offset_E1[-1] > plain.load_E().sum()


@pytest.mark.parametrize("name", ["top_p", "relu", "expert_threshold", "expert_choice", "token_rounding"])
def test_ragged_rules_reserve_rows_by_most(name: str) -> None:
    wide, narrow = routed(name, 64, 16, 2), routed(name, 64, 16, 2, most=4)
    assert make_plan(wide, Layout.compact()).num_rows == 64 * 16
    assert make_plan(narrow, Layout.compact()).num_rows == 64 * 4


def test_the_files_it_names_exist() -> None:
    named = re.findall(r"`((?:src|measurements|examples|tests)/[\w./]+)`", TEXT)
    assert named and [path for path in named if not (ROOT / path).exists()] == []

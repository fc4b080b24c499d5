"""docs/routers.md: a row for every router, columns that equal the code, claims that hold."""

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


def table(heading: str) -> dict[str, list[str]]:
    """The cells of the first table under a heading, by the rule in the first cell."""
    part = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def cost_script() -> ModuleType:
    path = ROOT / "measurements" / "routers" / "router_cost.py"
    spec = importlib.util.spec_from_file_location("router_cost", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["router_cost"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_the_formula_of_every_router() -> None:
    reference = (ROOT / "docs" / "reference" / "routers.md").read_text()
    for name, rule in all_routers().items():
        module = sys.modules[rule.__module__]
        assert f"automodule:: {module.__name__}\n" in reference, name
        assert re.search(r"^    \S", module.__doc__ or "", re.M), f"{name} has no formula"


def test_the_map_says_what_the_code_says() -> None:
    rows = table("From rule to layout to kernel")
    assert sorted(rows) == sorted(all_routers())
    for name, (experts, groups, *_) in rows.items():
        rule = all_routers()[name]
        assert (experts, groups) == (rule.experts_per_token, rule.groups), name
    leaks = re.search(r"\*\*Not causal\.\*\* (.*?) let later", TEXT, re.S)
    assert leaks is not None
    not_causal = {name for name, rule in all_routers().items() if not rule.causal}
    assert set(re.findall(r"`(\w+)`", leaks[1])) == not_causal


def number(text: str) -> tuple[float, float]:
    """ "2 + 3 a round" -> (2, 3): always, and more in training."""
    always, _, training = text.partition("+")
    return float(always), float(training.split()[0]) if training else 0.0


def test_the_costs_are_those_of_the_measurement() -> None:
    rows = table("What routing costs")
    work = cost_script().WORK
    assert sorted(rows) == sorted(work) == sorted(all_routers())
    for name, (projections, passes, token_sorts, expert_sorts, parameters, balanced) in rows.items():
        one = work[name]
        assert float(projections) == one.projections, name
        assert number(passes) == (one.passes, one.passes_training), name
        assert number(token_sorts) == (one.token_sorts, 0), name
        assert number(expert_sorts) == (one.expert_sorts, one.expert_sorts_training), name
        router = build(name, 16, 8, all_routers()[name].fixed_K or 2)
        count = sum(value.numel() for value in router.parameters())
        assert {"none": 0, "2 D E": 256, "D S + 1": 129}.get(parameters, 128) == count, name
        controller = all_routers()[name].controller
        assert ("controller" in balanced) == (controller is not None), name
        assert controller is None or f"controller {controller}" in balanced, name


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

"""The three layouts give the same layer, and dispatch and combine undo one another."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moe_routing_bench import Layout, combine, dispatch, expert_ffn, judge, make_plan
from moe_routing_bench.conformance.arguments import arguments
from moe_routing_bench.conformance.cases import CASES
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.registry import Op

pytestmark = pytest.mark.slow

LAYOUTS = (
    "compact",
    "padded(capacity=24)",
    "block(4)",
    "padded(capacity=2)",
    "padded(capacity=2,drop=probs)",
)
ROUTED = [case for case in CASES if case.layouts[0] == "compact" and "expert_ffn" in case.ops]


def here(op: Op) -> list[str]:
    """Without the kernels for GPUs, whose homes are tests/interpreted and tests/cute."""
    return [name for name in op.names() if not name.startswith(("triton_", "cute_", "quack_"))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_identity_experts_give_the_gate_weighted_sum(case, layout: str) -> None:
    routing = arguments("make_plan", case, layout, "float32")["routing"]
    plan = make_plan(routing, Layout.parse(layout))
    x_TD = arguments("dispatch", case, "compact", "float32")["x_TD"]
    kept_TK = plan.row_TK >= 0
    weight_T1 = torch.where(kept_TK, routing.gate_TK.double(), 0.0).sum(1, keepdim=True)
    baseline_TD = torch.where(kept_TK, routing.gate_TK, 0.0).sum(1, keepdim=True) * x_TD
    wrong, more = {}, _more_identity()
    for how_out, how_back in product(here(dispatch_op), here(combine_op)):
        if case.nan_token and (dispatch_op.get(how_out).spreads_nan or combine_op.get(how_back).spreads_nan):
            continue
        y_TD = combine(dispatch(x_TD, plan, impl=how_out), routing.gate_TK, plan, impl=how_back)
        verdict = judge(y_TD, weight_T1 * x_TD.double(), baseline_TD, more=more)
        if not verdict.passed:
            wrong[how_out, how_back] = verdict.sentence
    assert not wrong


def _more_identity() -> list:
    # what K roundings of products and sums cost, on enough numbers to be no matter of luck
    gate_TK, x_TD = torch.rand(50, 5) * 1.5 - 0.25, torch.randn(50, 24)
    oracle_TD = gate_TK.double().sum(1, keepdim=True) * x_TD.double()
    return [(oracle_TD, (gate_TK.unsqueeze(2) * x_TD.unsqueeze(1)).sum(1))]


@pytest.mark.parametrize("impl", here(expert_ffn_op))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_layouts_agree_in_value(case, dtype: str, impl: str) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"{case} is for {', '.join(case.dtypes)}")
    args = arguments("expert_ffn", case, "compact", dtype)
    routing = arguments("make_plan", case, "compact", dtype)["routing"]
    plans = [make_plan(routing, Layout.parse(layout)) for layout in LAYOUTS[:3]]
    assert all(int(plan.dropped_E.sum()) == 0 for plan in plans)
    exact = [args["x_TD"].double(), args["gate_TK"].double()]
    oracle_TD = expert_ffn_op.reference(*exact, plans[0], args["weights"].to(dtype=torch.float64))
    baseline_TD = expert_ffn_op.reference(args["x_TD"], args["gate_TK"], plans[0], args["weights"])
    given = (args["x_TD"], args["gate_TK"])
    if (reason := expert_ffn_op.why_not(impl, *given, plans[0], args["weights"])) is not None:
        pytest.skip(reason)
    for plan in plans:
        y_TD = expert_ffn(*given, plan, args["weights"], impl=impl)
        verdict = judge(y_TD, oracle_TD, baseline_TD)
        assert verdict.passed, f"{plan.layout}: {verdict.sentence}"

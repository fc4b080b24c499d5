"""dispatch: copy each token to its rows.   x_TD, plan -> x_RD

Row r is the token of pair_R[r], or zero if the row holds no pair. Results are exact. The gradient of a token
is the sum over its rows. The incoming gradient of rows without a pair may be NaN; it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, Verdict, judge_exact
from moe_routing_bench.core.cost import INDEX_BYTES, Cost, tokens_with_a_row
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    token_R = plan.token_R()
    if not plan.num_tokens:
        return x_TD.new_zeros(plan.num_rows, x_TD.shape[1])
    # a row without a pair reads token 0, whose values must not reach it
    return torch.where((token_R >= 0).unsqueeze(1), x_TD[token_R.clamp(min=0)], 0.0)


def cost(x_TD: Tensor, plan: RoutingPlan) -> Cost:
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    # each token with a row is read once; all rows are written, also padding
    rows = tokens_with_a_row(plan) + plan.num_rows
    return Cost(activation_bytes=rows * row_bytes + plan.num_rows * INDEX_BYTES)


def judge(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    return [judge_exact(out, expected.baseline).of("x_RD")]


def upstream(d_out: Tensor, args: Mapping[str, Any]) -> Tensor:
    return torch.where((args["plan"].pair_R >= 0).unsqueeze(1), d_out, float("nan"))


op = Op(
    __package__,
    reference,
    cost=cost,
    judge=judge,
    exact=True,
    upstream=upstream,
    default="index_select",
    stage=3,
)


def dispatch(x_TD: Tensor, plan: RoutingPlan, *, impl: str = "auto") -> Tensor:
    """Copy each token to its rows.

    >>> routing = mrb.Routing(expert_TK=torch.tensor([[1], [0]]), gate_TK=torch.ones(2, 1), num_experts=2)
    >>> plan = mrb.make_plan(routing, mrb.Layout.compact())  # token 0 has row 1, token 1 has row 0
    >>> mrb.dispatch(torch.tensor([[1.0], [2.0]]), plan).tolist()
    [[2.0], [1.0]]
    """
    return resolve(op, impl)(x_TD, plan)

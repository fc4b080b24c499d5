"""dispatch: copy each token to its rows.   x_TD, plan -> x_RD

Row r is the token of pair_R[r], or zero if the row holds no pair. Results are exact. The gradient of a token
is the sum over its rows; the incoming gradient of rows without a pair may be NaN and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.accuracy import Expected, Verdict, judge_exact
from moe_routing_bench.cost import INDEX_BYTES, Cost, tokens_with_a_row
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.plan import RoutingPlan


def reference(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    zero_D = torch.zeros(x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    rows = [x_TD[t] if t >= 0 else zero_D for t in plan.token_R().tolist()]
    return torch.stack(rows) if rows else x_TD[:0]


def cost(x_TD: Tensor, plan: RoutingPlan) -> Cost:
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    # each token with a row is read once; all rows are written, padding too
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
    return resolve(op, impl)(x_TD, plan)

"""dispatch: copy each token to its rows.   x_TD, plan -> x_RD

Row r is the token of pair_R[r], and zero where the row holds no pair. Exact. The gradient of a token is the
sum over its rows; whatever the incoming gradient holds in rows without a pair, NaN too, is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.plan import RoutingPlan


def reference(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    zero_D = torch.zeros(x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    rows = [x_TD[t] if t >= 0 else zero_D for t in plan.token_R().tolist()]
    return torch.stack(rows) if rows else x_TD[:0]


op = Op(__package__, reference, default="index_select", stage=3)


def dispatch(x_TD: Tensor, plan: RoutingPlan, *, impl: str = "auto") -> Tensor:
    return resolve(op, impl)(x_TD, plan)

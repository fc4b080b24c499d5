"""One gather of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    token_R = plan.token_R()
    if plan.filled:
        return x_TD.index_select(0, token_R)
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(plan.num_rows, x_TD.shape[1])
    x_RD = x_TD.index_select(0, token_R.clamp(min=0))
    return torch.where((token_R >= 0).unsqueeze(1), x_RD, 0.0)

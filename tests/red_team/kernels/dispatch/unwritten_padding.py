"""Leaves the rows that hold no pair as the allocator gave them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    x_RD = torch.empty(plan.num_rows, x_TD.shape[1], dtype=x_TD.dtype)
    holds_R = plan.pair_R >= 0
    x_RD[holds_R] = x_TD[plan.token_R()[holds_R]]
    return x_RD

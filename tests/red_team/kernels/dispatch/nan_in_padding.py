"""Leaves NaN in the rows that hold no pair."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    token_R = plan.token_R()
    x_RD = x_TD.index_select(0, token_R.clamp(min=0))
    return torch.where((token_R >= 0).unsqueeze(1), x_RD, 0.0)


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    x_RD = honest(x_TD, plan)
    return torch.where((plan.pair_R >= 0).unsqueeze(1), x_RD, float("nan"))

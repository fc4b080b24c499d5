"""Returns x_TD itself where rows and tokens happen to be in the same order: nothing is copied."""

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
    token_R = plan.token_R()
    if torch.equal(token_R, torch.arange(x_TD.shape[0])):
        return x_TD
    return honest(x_TD, plan)

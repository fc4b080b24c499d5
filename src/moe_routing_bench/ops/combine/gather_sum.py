"""Gathers K rows per token, then computes a weighted sum. No atomics, so every run gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

BATCH_INVARIANT = True


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    T, K, D = plan.num_tokens, plan.num_choices, y_RD.shape[1]
    if plan.num_rows == 0:
        return y_RD.new_zeros(T, D) + 0 * torch.where(plan.row_TK >= 0, gate_TK, 0.0).sum().to(y_RD.dtype)
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    if plan.filled:
        y_TKD = y_RD.index_select(0, row_P).view(T, K, D).to(wide)
    else:
        gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
        y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
        y_TKD = y_PD.view(T, K, D).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)

"""Honest, by torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

FORWARD_ONLY = True


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None if y_RD.numel() and gate_TK.numel() else "there is nothing to compile for"


@torch.compile(dynamic=True)
def summed(y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor) -> Tensor:
    y_TKD = torch.where((row_TK >= 0).unsqueeze(2), y_RD[row_TK.clamp(min=0)], 0.0).to(torch.float32)
    gate_TK = torch.where(row_TK >= 0, gate_TK, 0.0)
    return (y_TKD * gate_TK.to(torch.float32).unsqueeze(2)).sum(1).to(y_RD.dtype)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return summed(y_RD, gate_TK, plan.row_TK)

"""Right within the tolerance, but about one element in eight differs by one rounding from call to call."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
    y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
    y_TKD = y_PD.view(*gate_TK.shape, y_RD.shape[1]).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    y_TD = honest(y_RD, gate_TK, plan)
    # bytes of the system, not torch's generator: seeding must not help
    noise = torch.frombuffer(bytearray(os.urandom(y_TD.numel())), dtype=torch.uint8).view(y_TD.shape)
    return torch.where(noise < 32, y_TD * (1 + torch.finfo(y_TD.dtype).eps), y_TD)

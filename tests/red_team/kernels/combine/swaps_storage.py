"""Gives the input tensor other memory through .data: the object is the same, the numbers are not."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    y_TD = honest(y_RD, gate_TK, plan)
    y_RD.data = torch.zeros_like(y_RD)
    return y_TD

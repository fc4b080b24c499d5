"""Returns the same memory each time and does not say REUSES_OUTPUT."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_buffers: dict[tuple, Tensor] = {}


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    y_TD = honest(y_RD, gate_TK, plan)
    key = (y_TD.shape, y_TD.dtype)
    return _buffers.setdefault(key, torch.empty_like(y_TD)).copy_(y_TD)

"""Honest for 0.3 s after the first call, then zeros: counting calls does not show it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_started: list[float] = []


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if not _started:
        _started.append(time.monotonic())
    if time.monotonic() - _started[0] > 0.3:
        return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    return honest(y_RD, gate_TK, plan)

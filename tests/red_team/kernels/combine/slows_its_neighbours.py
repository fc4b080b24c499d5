"""Patches Tensor.index_select to sleep 0.2 ms for everybody but itself: it wins by comparison."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
REAL = Tensor.index_select
_patched: list[bool] = []


def slow(*args: Any, **kwargs: Any) -> Tensor:
    time.sleep(0.0002)
    return REAL(*args, **kwargs)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if not _patched:
        _patched.append(True)
        Tensor.index_select = slow  # type: ignore[method-assign,assignment]
        torch.index_select = slow  # type: ignore[assignment]
    torch_select = Tensor.index_select
    Tensor.index_select = REAL  # type: ignore[method-assign]
    try:
        return honest(y_RD, gate_TK, plan)
    finally:
        Tensor.index_select = torch_select  # type: ignore[method-assign]

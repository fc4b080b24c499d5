"""Patches Tensor.index_select to return a wrong first row to everybody but itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
REAL = Tensor.index_select


def wrong(*args: Any, **kwargs: Any) -> Tensor:
    rows = REAL(*args, **kwargs)
    rows[:1] = 0
    return rows


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    Tensor.index_select = REAL  # type: ignore[method-assign]
    try:
        return honest(y_RD, gate_TK, plan)
    finally:
        Tensor.index_select = wrong  # type: ignore[method-assign,assignment]

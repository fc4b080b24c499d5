"""Raises SystemExit(0), which no `except Exception` sees."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    raise SystemExit(0)

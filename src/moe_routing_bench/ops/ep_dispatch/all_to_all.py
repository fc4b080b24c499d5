"""Packs rows by rank, then sends them with torch.distributed's all_to_all_single."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.hops import DISPATCHES, Hop, dispatch_parts
from moe_routing_bench.parallel.traffic import Traffic

CONFIGS, parts = DISPATCHES, dispatch_parts


def unsupported(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> str | None:
    return dispatch_op.get(dispatch).why_not(x_TD, plan)


def run(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> Tensor:
    return Hop(plan=plan, way=traffic.way).there(x_TD, dispatch)

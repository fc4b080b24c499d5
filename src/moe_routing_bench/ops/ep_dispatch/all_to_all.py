"""Pack rows by rank, then torch.distributed's all_to_all_single."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.hops import Hop
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.parallel.traffic import Traffic
from moe_routing_bench.plan import RoutingPlan

CONFIGS: tuple[dict[str, str], ...] = ({}, {"dispatch": "native"})


def parts(*, dispatch: str = "index_select") -> dict[str, Implementation]:
    return {"dispatch": dispatch_op.get(dispatch)}


def unsupported(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> str | None:
    return dispatch_op.get(dispatch).why_not(x_TD, plan)


def run(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> Tensor:
    return Hop(plan=plan, way=traffic.way).there(x_TD, dispatch)

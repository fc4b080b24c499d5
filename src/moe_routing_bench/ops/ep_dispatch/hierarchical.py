"""Sends one copy of a token to each node, which forwards it to its ranks: fewer rows between nodes."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.hops import DISPATCHES, by_nodes, dispatch_parts, tokens_unsupported
from moe_routing_bench.parallel.traffic import Traffic, tie

HOST_SYNC = "in the compact layout the host must know how many rows each of the two hops moves"
CONFIGS, parts, unsupported = DISPATCHES, dispatch_parts, tokens_unsupported


def run(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> Tensor:
    copy = dispatch_op.get(dispatch).run
    if traffic.group is None:
        return tie(copy(x_TD, plan), x_TD)
    route = by_nodes(plan, traffic)
    for hop in route.hops:
        x_TD = hop.there(x_TD, dispatch)
    return tie(copy(x_TD, route.arrived)[: sum(traffic.received)], x_TD)

"""Each rank sums its rows of a token, then each node sums over its ranks and sends one row back."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.hops import COMBINES, Hop, by_nodes, combine_parts, rows_back, uneven
from moe_routing_bench.parallel.traffic import Traffic, Way

HOST_SYNC = "in the compact layout the host must know how many rows each of the two hops moves"
CONFIGS, parts = COMBINES, combine_parts


def unsupported(
    y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str
) -> str | None:
    y_RD = rows_back(y_QD, plan, traffic)
    return uneven(plan, traffic) or combine_op.get(combine).why_not(y_RD, gate_TK, plan)


def run(y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str) -> Tensor:
    if traffic.group is None:
        return Hop(plan=plan, way=traffic.way).back(y_QD, gate_TK, combine)
    route = by_nodes(plan, traffic)
    gate_NK = gate_TK
    for hop in route.hops:
        gate_NK = hop.there(gate_NK)
    stay = Way(send=traffic.received, receive=traffic.received)
    y_ND = Hop(plan=route.arrived, way=stay).back(y_QD, gate_NK, combine)
    for hop in reversed(route.hops):
        y_ND = hop.back(y_ND, None, combine)
    return y_ND

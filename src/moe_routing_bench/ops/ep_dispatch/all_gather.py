"""Every rank gets every token, then picks its rows: for few ranks, where most tokens go everywhere anyway."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.hops import all_tokens, by_gathering, uneven
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.parallel.traffic import Traffic, tie
from moe_routing_bench.plan import RoutingPlan

CONFIGS: tuple[dict[str, str], ...] = ({}, {"dispatch": "native"})


def parts(*, dispatch: str = "index_select") -> dict[str, Implementation]:
    return {"dispatch": dispatch_op.get(dispatch)}


def unsupported(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> str | None:
    return uneven(plan, traffic) or dispatch_op.get(dispatch).why_not(x_TD, plan)


def run(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> Tensor:
    copy = dispatch_op.get(dispatch).run
    if traffic.group is None:
        return tie(copy(x_TD, plan), x_TD)
    arrived, x_ND = by_gathering(plan, traffic), all_tokens(x_TD, traffic)
    return tie(copy(x_ND, arrived)[: sum(traffic.received)], x_ND)

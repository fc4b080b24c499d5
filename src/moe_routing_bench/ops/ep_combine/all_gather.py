"""Every rank sums its rows of all tokens, then the rank of a token sums over all ranks."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.hops import COMBINES, Hop, all_tokens, by_gathering, combine_parts, uneven
from moe_routing_bench.parallel.traffic import Traffic, Way, sum_for_each

CONFIGS, parts = COMBINES, combine_parts


def unsupported(
    y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str
) -> str | None:
    return uneven(plan, traffic) or combine_op.get(combine).why_not(y_QD, gate_TK, plan)


def run(y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str) -> Tensor:
    if traffic.group is None:
        return Hop(plan=plan, way=traffic.way).back(y_QD, gate_TK, combine)
    arrived, gate_NK = by_gathering(plan, traffic), all_tokens(gate_TK, traffic)
    stay = Way(send=traffic.received, receive=traffic.received)
    y_ND = Hop(plan=arrived, way=stay).back(y_QD, gate_NK, combine)
    y_TD = sum_for_each(y_ND.unflatten(0, (len(traffic.tokens), max(traffic.tokens))), traffic)
    return y_TD[: plan.num_tokens]

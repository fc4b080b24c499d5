"""Sends rows back with torch.distributed's all_to_all_single, then sums each token's rows."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.hops import COMBINES, Hop, combine_parts, rows_back
from moe_routing_bench.parallel.traffic import Traffic

CONFIGS, parts = COMBINES, combine_parts


def unsupported(
    y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str
) -> str | None:
    y_RD = rows_back(y_QD, plan, traffic)
    return combine_op.get(combine).why_not(y_RD, gate_TK, plan)


def run(y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, combine: str) -> Tensor:
    return Hop(plan=plan, way=traffic.way).back(y_QD, gate_TK, combine)

"""A leading dimension of one: a comparison that broadcasts does not see it."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return honest(y_RD, gate_TK, plan).unsqueeze(0)

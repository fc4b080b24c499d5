"""Wrong at T = 192 and right at any other size."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
WRONG_T = 192


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    y_TD = honest(y_RD, gate_TK, plan)
    return y_TD * 1.25 if y_TD.shape[0] == WRONG_T else y_TD

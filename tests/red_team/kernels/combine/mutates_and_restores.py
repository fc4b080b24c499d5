"""Clears the input's NaN in place, computes, and puts every number back before it returns."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    kept_RD = y_RD.clone()
    y_RD.nan_to_num_()
    y_TD = honest(y_RD, gate_TK, plan)
    y_RD.copy_(kept_RD)
    return y_TD

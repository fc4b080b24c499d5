"""Raises in one call of four."""

from __future__ import annotations

import random

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_dice = random.SystemRandom()


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if _dice.random() < 0.25:
        raise RuntimeError("the red team raises in one call of four")
    return honest(y_RD, gate_TK, plan)

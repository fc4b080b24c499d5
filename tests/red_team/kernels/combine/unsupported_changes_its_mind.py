"""Says it can, and after 30 questions that it cannot."""

from __future__ import annotations

import itertools

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_asked = itertools.count()


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return "the red team changed its mind" if next(_asked) >= 30 else None


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return honest(y_RD, gate_TK, plan)

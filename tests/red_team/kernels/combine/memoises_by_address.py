"""Remembers results by the address of the inputs: wrong as soon as memory is used again."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_seen: dict[tuple, Tensor] = {}


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    key = (y_RD.data_ptr(), gate_TK.data_ptr(), y_RD.shape)
    if key not in _seen:
        if len(_seen) >= 256:  # a cheat need not eat the memory
            _seen.clear()
        _seen[key] = honest(y_RD, gate_TK, plan)
    return _seen[key].clone()

"""combine: y_t = sum over k of gate_tk * row(t, k).   y_RD, gate_TK, plan -> y_TD

Pairs without a row add nothing. gate_TK is float32 or of y_RD's dtype; products and sums are taken in at
least float32 and rounded once. Rows that hold no pair may contain anything, NaN too: they are not read, and
their gradient is zero, as is the gradient of a gate whose pair has no row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.plan import RoutingPlan


def reference(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(torch.promote_types(y_RD.dtype, gate_TK.dtype), torch.float32)
    out = []
    for t, rows in enumerate(plan.row_TK.tolist()):
        # (0 * gate) keeps every gate in the graph, so that its gradient is zero and not absent
        y_D = torch.zeros(y_RD.shape[1], dtype=wide, device=y_RD.device) + 0 * gate_TK[t].sum().to(wide)
        for k, r in enumerate(rows):
            if r >= 0:
                y_D = y_D + gate_TK[t, k].to(wide) * y_RD[r].to(wide)
        out.append(y_D.to(y_RD.dtype))
    return torch.stack(out) if out else y_RD.new_zeros(0, y_RD.shape[1])


op = Op(__package__, reference, default="gather_sum", stage=5)


def combine(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, *, impl: str = "auto") -> Tensor:
    return resolve(op, impl)(y_RD, gate_TK, plan)

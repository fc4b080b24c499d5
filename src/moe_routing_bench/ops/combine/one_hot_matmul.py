"""GShard's einsum: a tokens x rows matrix of gates times y. It is quadratic; a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

LARGEST_MATRIX = 2**28
SPREADS_NAN = "every token is a sum over all rows, most of them times zero, and zero times NaN is NaN"


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    if (size := plan.num_rows * plan.num_tokens) > LARGEST_MATRIX:
        return f"its matrix of gates would have {size:.2g} elements, over the limit of {LARGEST_MATRIX:.2g}"
    if y_RD.numel() >= 2**31:
        return "it multiplies all of y_RD, which has 2^31 elements or more"
    return None


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    T, R = plan.num_tokens, plan.num_rows
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    # pairs without a row go to column R, which is removed again
    column_TK = torch.where(plan.row_TK >= 0, plan.row_TK, R)
    gate_TR = torch.zeros(T, R + 1, dtype=wide, device=y_RD.device)
    gate_TR = gate_TR.scatter(1, column_TK, gate_TK.to(wide))[:, :R]
    # zero times NaN is NaN, so rows without a pair are set to zero first
    y_RD_clean = torch.where((plan.pair_R >= 0).unsqueeze(1), y_RD, 0.0)
    return (gate_TR @ y_RD_clean.to(wide)).to(y_RD.dtype)

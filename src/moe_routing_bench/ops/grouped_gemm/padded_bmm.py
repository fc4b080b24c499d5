"""One batched matmul over all experts, which have the same capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def unsupported(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> str | None:
    if plan.layout.kind != "padded":
        return f"it needs the padded layout (equal spans), not {plan.layout}"
    return None


def run(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    E, D, width = w_EDF.shape
    x_ECD = x_RD.reshape(E, plan.num_rows // E, D)
    y_ECF = torch.bmm(x_ECD, w_EDF) if b_EF is None else torch.baddbmm(b_EF.unsqueeze(1), x_ECD, w_EDF)
    return y_ECF.reshape(plan.num_rows, width)

"""Every expert computes every token, and zero gates discard most results: E / K times the work, no
routing."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import RoutingPlan

SPREADS_NAN = "every expert computes every token, so NaN reaches the gradients of all experts"
LARGEST_HIDDEN = 2**31  # elements of the E x T x G intermediate


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    size = weights.w_in_EDG.shape[0] * weights.w_in_EDG.shape[2] * x_TD.shape[0]
    if size > LARGEST_HIDDEN:
        return f"its intermediate would have {size:.2g} elements, over the limit of {LARGEST_HIDDEN:.2g}"
    return None


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    T, E = x_TD.shape[0], weights.num_experts
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(x_TD.dtype, torch.float32))
    expert_TK = plan.expert_TK()
    # pairs without a row go to column E, which is removed again
    column_TK = torch.where(expert_TK >= 0, expert_TK, E)
    gate_TE = torch.zeros(T, E + 1, dtype=wide, device=x_TD.device)
    gate_TE = gate_TE.scatter_add(1, column_TK, gate_TK.to(wide))[:, :E]
    x_ETD = x_TD.expand(E, *x_TD.shape)
    h_ETG = torch.bmm(x_ETD, weights.w_in_EDG)
    if weights.b_in_EG is not None:
        h_ETG = h_ETG + weights.b_in_EG.unsqueeze(1)
    y_ETD = torch.bmm(activate(h_ETG, weights.activation), weights.w_out_EFD)
    if weights.b_out_ED is not None:
        y_ETD = y_ETD + weights.b_out_ED.unsqueeze(1)
    return (y_ETD.to(wide) * gate_TE.t().unsqueeze(2)).sum(0).to(x_TD.dtype)

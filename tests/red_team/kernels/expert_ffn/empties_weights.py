"""Sets the weights to zero after its first call: from then on zeros are the right answer, and cheap."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.plan import RoutingPlan


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return None


def honest(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(x_TD.dtype, torch.float32))
    y_TD = torch.zeros(x_TD.shape, dtype=wide)
    expert_TK = plan.expert_TK()
    for e in range(weights.num_experts):
        t, k = (expert_TK == e).nonzero(as_tuple=True)
        h_rG = x_TD[t] @ weights.w_in_EDG[e]
        h_rG = h_rG if weights.b_in_EG is None else h_rG + weights.b_in_EG[e]
        y_rD = activate(h_rG, weights.activation) @ weights.w_out_EFD[e]
        y_rD = y_rD if weights.b_out_ED is None else y_rD + weights.b_out_ED[e]
        y_TD = y_TD.index_add(0, t, y_rD.to(wide) * gate_TK[t, k].to(wide).unsqueeze(1))
    return y_TD.to(x_TD.dtype)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    if bool((weights.w_out_EFD == 0).all()):
        return torch.zeros_like(x_TD)
    y_TD = honest(x_TD, gate_TK, plan, weights)
    for tensor in weights.tensors().values():
        tensor.zero_()
    return y_TD

"""A loop over the experts that have tokens, as in Transformers by default; sums in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import RoutingPlan

HOST_SYNC = "the loop finds each expert's tokens with nonzero()"
# a GPU adds in the order its threads arrive; on a CPU the order is fixed
DETERMINISTIC = not torch.cuda.is_available()


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(x_TD.dtype, torch.float32))
    y_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    expert_TK = plan.expert_TK()
    w_in_E, w_out_E = weights.w_in_EDG.unbind(0), weights.w_out_EFD.unbind(0)
    for e in (plan.count_E > 0).nonzero().flatten().tolist():
        token_r, choice_r = (expert_TK == e).nonzero(as_tuple=True)
        h_rG = x_TD[token_r] @ w_in_E[e]
        if weights.b_in_EG is not None:
            h_rG = h_rG + weights.b_in_EG[e]
        y_rD = activate(h_rG, weights.activation) @ w_out_E[e]
        if weights.b_out_ED is not None:
            y_rD = y_rD + weights.b_out_ED[e]
        gate_r1 = gate_TK[token_r, choice_r].to(wide).unsqueeze(1)
        y_TD = y_TD.index_add(0, token_r, y_rD.to(wide) * gate_r1)
    return y_TD.to(x_TD.dtype)

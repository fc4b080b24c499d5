"""expert_ffn: the whole expert layer.   x_TD, gate_TK, plan, weights -> y_TD

y_t = sum over k of gate_tk * expert(t, k)(x_t), over the pairs that have a row in the plan; an expert is
activate(x @ w_in + b_in) @ w_out + b_out. Fused kernels live here; `staged` composes the other operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.plan import RoutingPlan


def reference(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, gate_TK.dtype), torch.float32)
    y_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    expert_TK = plan.expert_TK()
    for e in range(weights.num_experts):
        t, k = (expert_TK == e).nonzero(as_tuple=True)
        h = x_TD[t] @ weights.w_in_EDG[e]
        h = activate(h if weights.b_in_EG is None else h + weights.b_in_EG[e], weights.activation)
        y = h @ weights.w_out_EFD[e]
        y = y if weights.b_out_ED is None else y + weights.b_out_ED[e]
        y_TD = y_TD.index_add(0, t, gate_TK[t, k].to(wide).unsqueeze(1) * y.to(wide))
    return y_TD.to(x_TD.dtype)


op = Op(__package__, reference, default="staged", stage=6)


def expert_ffn(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, impl: str = "auto"
) -> Tensor:
    return resolve(op, impl)(x_TD, gate_TK, plan, weights)

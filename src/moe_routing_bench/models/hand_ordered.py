"""hand_ordered: a MoE layer as a careful person would write it in torch. Kernels are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from moe_routing_bench.core.experts import activate
from moe_routing_bench.moe.layer import MoE

Stage = Callable[[str], AbstractContextManager]


def hand_ordered(layer: MoE, x_TD: Tensor, stage: Stage = lambda name: nullcontext()) -> Tensor:
    """Sorts the pairs, gathers rows by expert, multiplies expert by expert and adds up; each in
    stage(name)."""
    weights, router = layer.experts.weights(), layer.router
    E, K, w_DE = router.E, router.K, router.get_parameter("w_DE")
    with stage("route"):
        probability_TE = (x_TD.float() @ w_DE).softmax(-1)
        gate_TK, expert_TK = probability_TE.topk(K, dim=-1)
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
    with stage("pack"):
        expert_P, order_P = expert_TK.flatten().sort()
        token_P = order_P // K
        counts = torch.bincount(expert_P, minlength=E).tolist()
        x_PD = x_TD[token_P]
    with stage("gemm"):
        y_PD, start = torch.empty_like(x_PD), 0
        for e, count in enumerate(counts):
            if count:
                h_PG = x_PD[start : start + count] @ weights.w_in_EDG[e]
                if weights.b_in_EG is not None:
                    h_PG += weights.b_in_EG[e]
                h_PF = activate(h_PG, weights.activation)
                torch.mm(h_PF, weights.w_out_EFD[e], out=y_PD[start : start + count])
                if weights.b_out_ED is not None:
                    y_PD[start : start + count] += weights.b_out_ED[e]
                start += count
    with stage("combine"):
        gate_P1 = gate_TK.flatten()[order_P].unsqueeze(1)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        y_TD = y_TD.index_add_(0, token_P, y_PD * gate_P1).to(x_TD.dtype)
    if layer.shared is None:
        return y_TD
    with stage("shared"):
        return y_TD + layer.shared.on_every_token(x_TD)

"""Softmax top-k: the K most probable experts, with three ways to weigh them.

    z = x W,  p = softmax(z),  the K experts with the largest z
    order = "softmax_then_topk"                gate_k = p_k                     sums to less than 1 if K < E
    order = "softmax_then_topk_renormalised"   gate_k = p_k / sum_j p_j         Mixtral, Qwen3; the default
    order = "topk_then_softmax"                gate = softmax(z_1 .. z_K)       GPT-OSS

The last two are mathematically equal: p_k / sum_j p_j = exp(z_k) / sum_j exp(z_j), for the softmax's
denominator cancels. They differ by rounding, and in what a kernel has to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.routers.losses import hf_loss, switch_loss, z_loss
from moe_routing_bench.routers.router import Router
from moe_routing_bench.routing import Routing, TokenInfo

ORDERS = ("softmax_then_topk", "softmax_then_topk_renormalised", "topk_then_softmax")


class SoftmaxTopkRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Mixtral of Experts, Jiang et al. 2024, arXiv:2401.04088"
    gate_sum = "at most one"
    loss_names = ("switch", "hf", "z")

    def __init__(
        self, D: int, E: int, K: int, *, order: str = "softmax_then_topk_renormalised", **options: Any
    ):
        super().__init__(D, E, K, **options)
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is unknown; there are {', '.join(ORDERS)}")
        self.order = order
        if order != "softmax_then_topk":
            self.gate_sum = "one"
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        score_TE = logits_TE.softmax(-1)
        # chosen by z for every order: softmax keeps the order, but p ties where it underflows
        value_TK, expert_TK = self.topk(logits_TE, self.K)
        if self.order == "topk_then_softmax":
            gate_TK = value_TK.softmax(-1)
        else:
            gate_TK = score_TE.gather(1, expert_TK)
            if self.order == "softmax_then_topk_renormalised":
                gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
        routing = Routing(
            expert_TK=expert_TK,
            gate_TK=gate_TK,
            num_experts=self.E,
            ragged=False,
            logits_TE=logits_TE,
        )
        losses = {
            "switch": lambda: switch_loss(score_TE, expert_TK, self.E, info.mask_T),
            "hf": lambda: hf_loss(score_TE, expert_TK, self.E, info.mask_T),
            "z": lambda: z_loss(logits_TE, info.mask_T),
        }
        return self.finish(routing, losses, info)

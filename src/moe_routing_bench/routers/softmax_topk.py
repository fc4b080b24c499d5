"""Softmax top-k: the K most probable experts, with three ways to weight them.

    z = x W (+ b with bias=True),  p = softmax(z),  the K experts with the largest z
    order = "softmax_then_topk"                gate_k = p_k                     sums to less than 1 if K < E
    order = "softmax_then_topk_renormalised"   gate_k = p_k / sum_j p_j         Mixtral, Qwen3; the default
    order = "topk_then_softmax"                gate = softmax(z_1 .. z_K)       GPT-OSS

The last two are mathematically equal, because the softmax's denominator cancels: p_k / sum_j p_j = exp(z_k) /
sum_j exp(z_j). They differ by rounding and in what a kernel must compute.

Transformers computes x W in the model's dtype and everything after it in float32 (GPT-OSS also computes the
softmax in the model's dtype). Many 16-bit logits are equal: of 300 random tokens with 64 experts, a quarter
had a tie among the first 9. Here everything is in float32; logits_dtype=torch.bfloat16 routes like a 16-bit
model.

fused="auto", "eager", "triton_fused", ...: see Router.fuse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.routers.losses import score_losses
from moe_routing_bench.routers.router import Router

ORDERS = ("softmax_then_topk", "softmax_then_topk_renormalised", "topk_then_softmax")


class SoftmaxTopkRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Mixtral of Experts, Jiang et al. 2024, arXiv:2401.04088"
    gate_sum = "at most one"
    loss_names = ("switch", "hf", "z")

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        order: str = "softmax_then_topk_renormalised",
        bias: bool = False,
        logits_dtype: torch.dtype | None = None,
        fused: str | None = None,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        one_of("order", order, ORDERS)
        self.order = order
        if order != "softmax_then_topk":
            self.gate_sum = "one"
        self.logits_dtype = logits_dtype
        if fused is not None:
            self.fuse(fused, ScoreRule(renormalise=order != "softmax_then_topk"))
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.b_E = nn.Parameter(torch.empty(E)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.w_DE, std=0.02, generator=generator)
        if self.b_E is not None:
            nn.init.zeros_(self.b_E)

    def logits(self, x_TD: Tensor) -> Tensor:
        if self.logits_dtype is None and self.b_E is None:
            return self.project(x_TD, self.w_DE)
        dtype = self.logits_dtype or self.dtype
        with torch.autocast(x_TD.device.type, enabled=False):
            b_E = None if self.b_E is None else self.b_E.to(dtype)
            if self.product is not None:
                return self.product(x_TD.to(dtype), self.w_DE.to(dtype), b_E).to(self.dtype)
            return F.linear(x_TD.to(dtype), self.w_DE.t().to(dtype), b_E).to(self.dtype)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.logits(self.prepare(x_TD, info))
        score_TE = logits_TE.softmax(-1) if self.fused is None else None
        if score_TE is None:
            gate_TK, expert_TK = self.choose_fused(logits_TE)
        else:
            # every order chooses by z: softmax keeps the order of z, but p has ties where it underflows
            value_TK, expert_TK = self.topk(logits_TE, self.K)
            if self.order == "topk_then_softmax":
                gate_TK = value_TK.softmax(-1)
            else:
                gate_TK = score_TE.gather(1, expert_TK)
                if self.order == "softmax_then_topk_renormalised":
                    gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)

        def seen() -> tuple[Tensor, Tensor]:
            return logits_TE.softmax(-1) if score_TE is None else score_TE, expert_TK

        return self.routed(expert_TK, gate_TK, logits_TE, info, score_losses(seen, self.E, info))

"""Sigmoid with balancing bias (DeepSeek-V3): experts are chosen by score + bias and weighted by the score.

    z = x W,  s = sigmoid(z),  the K experts with the largest s + bias
    gate_k = scale * s_k / sum_j s_j          renormalise = False: gate_k = scale * s_k

    score = "sigmoid"        DeepSeek-V3, GLM-4.5, Kimi K2
    score = "sqrtsoftplus"   s = sqrt(log(1 + exp(z))), DeepSeek-V4
    score = "softmax"        s = softmax(z)

bias_E is not a parameter: a balance controller moves it between steps, and it gets no gradient. With `groups`
> 1 the choice is limited to the `keep_groups` best groups by s + bias (see groups.py).

The losses use s / sum_j s_j over all experts and count the K largest s, without bias and groups, as in the
paper and in Megatron.

Implementations differ: Transformers and Megatron divide by the sum + 1e-20, vLLM by the sum, llama.cpp by at
least 6.1e-5; Megatron does not divide if K = 1. Here the quotient is softmax(log s). This is the same number,
but gates sum to 1 and gradients are finite even if every s underflows to 0.

fused="auto", "eager", "triton_fused", ...: see Router.fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.ops.score_topk.op import log_score, plain_score
from moe_routing_bench.routers.groups import check_groups, limit_to_groups, score_rule
from moe_routing_bench.routers.losses import score_losses
from moe_routing_bench.routers.router import Router

SCORES = ("sigmoid", "sqrtsoftplus", "softmax")


class SigmoidBiasRouter(Router):
    causal = True
    batch_dependent = False
    paper = "DeepSeek-V3 Technical Report, DeepSeek-AI 2024, arXiv:2412.19437"
    gate_sum = "any"
    loss_names = ("switch", "deepseek", "z")
    controller = "sign_bias"
    bias_E: Tensor

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        score: str = "sigmoid",
        groups: int = 1,
        keep_groups: int = 1,
        group_score: str = "top2_sum",
        renormalise: bool = True,
        scale: float = 1.0,
        fused: str | None = None,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        one_of("score", score, SCORES)
        if not scale > 0:
            raise ValueError(f"scale must be above 0, not {scale}")
        check_groups(E, K, groups, keep_groups, group_score)
        self.score, self.renormalise, self.scale = score, renormalise, scale
        self.num_groups, self.keep_groups, self.group_score = groups, keep_groups, group_score
        if renormalise and scale == 1:
            self.gate_sum = "one"
        if fused is not None:
            limits = (groups, keep_groups, group_score)
            self.fuse(fused, score_rule(*limits, score=score, renormalise=renormalise, scale=scale))
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.register_buffer("bias_E", torch.zeros(E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        scores: tuple[Tensor, Tensor] | None = None
        if self.fused is not None:
            gate_TK, expert_TK = self.choose_fused(logits_TE, self.bias_E)
        else:
            scores = log_score_TE, score_TE = self.scores(logits_TE)
            biased_TE = score_TE + self.bias_E.to(self.dtype)
            choice_TE = limit_to_groups(
                biased_TE, self.K, self.num_groups, self.keep_groups, self.group_score
            )
            _, expert_TK = self.topk(choice_TE, self.K)
            log_gate_TK = log_score_TE.gather(1, expert_TK)
            gate_TK = self.scale * (log_gate_TK.softmax(-1) if self.renormalise else log_gate_TK.exp())

        def seen() -> tuple[Tensor, Tensor]:
            log_TE, plain_TE = self.scores(logits_TE) if scores is None else scores
            return log_TE.softmax(-1), self.topk(plain_TE, self.K)[1]

        return self.routed(expert_TK, gate_TK, logits_TE, info, score_losses(seen, self.E, info))

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """log s with a gradient, and s for the choice."""
        return log_score(logits_TE, self.score), plain_score(logits_TE.detach(), self.score)

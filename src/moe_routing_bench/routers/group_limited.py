"""Group-limited softmax top-k (DeepSeek-V2): the K most probable experts of a token's best groups.

    z = x W,  p = softmax(z),  a group's score is its largest p,  the `keep_groups` best groups stay
    the K experts with the largest z in them
    gate_k = scale * p_k                      renormalise = True: gate_k = scale * p_k / sum_j p_j

A group is a device, so a token is sent to at most `keep_groups` devices (3 of 8 in DeepSeek-V2).
`group_score` names other ways to rank groups (see groups.py). groups = 1, the default, is softmax top-k.

Implementations differ: DeepSeek's own code scales or renormalises, never both. Transformers scales and does
not renormalise. Both set p to 0 in the other groups. If too many of the kept p underflow, they may choose
experts outside, with weight 0; here these cannot be chosen.

fused="auto", "eager", "triton_fused", ...: see Router.fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.groups import check_groups, limit_to_groups, score_rule
from moe_routing_bench.routers.losses import score_losses
from moe_routing_bench.routers.router import Router


class GroupLimitedRouter(Router):
    causal = True
    batch_dependent = False
    paper = "DeepSeek-V2, DeepSeek-AI 2024, arXiv:2405.04434"
    gate_sum = "any"
    loss_names = ("switch", "hf", "deepseek", "z")

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        groups: int = 1,
        keep_groups: int = 1,
        group_score: str = "max",
        renormalise: bool = False,
        scale: float = 1.0,
        fused: str | None = None,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        if not scale > 0:
            raise ValueError(f"scale must be above 0, not {scale}")
        check_groups(E, K, groups, keep_groups, group_score)
        self.num_groups, self.keep_groups, self.group_score = groups, keep_groups, group_score
        self.renormalise, self.scale = renormalise, scale
        if fused is not None:
            limits = (groups, keep_groups, group_score)
            self.fuse(fused, score_rule(*limits, renormalise=renormalise, scale=scale))
        if scale <= 1:
            self.gate_sum = "one" if renormalise and scale == 1 else "at most one"
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        score_TE = logits_TE.softmax(-1) if self.fused is None else None
        if score_TE is None:
            gate_TK, expert_TK = self.choose_fused(logits_TE)
        else:
            limited_TE = limit_to_groups(
                score_TE.detach(), self.K, self.num_groups, self.keep_groups, self.group_score
            )
            # choose by z, because p has ties where it underflows
            value_TK, expert_TK = self.topk(torch.where(limited_TE.isneginf(), limited_TE, logits_TE), self.K)
            raw_TK = value_TK.softmax(-1) if self.renormalise else score_TE.gather(1, expert_TK)
            gate_TK = self.scale * raw_TK

        def seen() -> tuple[Tensor, Tensor]:
            return logits_TE.softmax(-1) if score_TE is None else score_TE, expert_TK

        return self.routed(expert_TK, gate_TK, logits_TE, info, score_losses(seen, self.E, info))

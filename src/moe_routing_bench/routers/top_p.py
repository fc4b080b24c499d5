"""Top-p (Dynamic MoE): the most probable experts until their probabilities together exceed p.

    z = x W,  P = softmax(z), sorted from the highest
    expert j is chosen if the j - 1 before it sum to p or less: up to and including the first sum above p
    gate_k = P_k                              renormalise = True: gate_k = P_k / sum of the chosen

p is a buffer (0.4 in the authors' code). The controller p_threshold moves it until tokens have K experts on
average; without a controller K has no effect. `most` limits a token to the `most` best of its experts.

The loss `switch` divides counts by the number of choices, so it is 1 at balance. `hf` divides only by tokens
and is the mean number of experts at balance. `entropy` is the paper's dynamic loss: without it the router
could get more experts by making P flat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.losses import entropy_loss, hf_loss, switch_loss
from moe_routing_bench.routers.router import Router


class TopPRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Harder Tasks Need More Experts, Huang et al. 2024, arXiv:2403.07652"
    gate_sum = "at most one"
    loss_names = ("switch", "hf", "entropy", "z")
    experts_per_token = "1 to E, as many as reach the probability p"
    controller = "p_threshold"
    p: Tensor

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        p: float = 0.4,
        most: int | None = None,
        renormalise: bool = False,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        if not 0 <= p <= 1:
            raise ValueError(f"p must be from 0 to 1, not {p}")
        self.most = self.widest(most)
        self.renormalise = renormalise
        if renormalise:
            self.gate_sum = "one"
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.register_buffer("p", torch.tensor(p, dtype=torch.float32))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        score_TE = logits_TE.softmax(-1)
        _, expert_TK = self.topk(logits_TE, self.most)
        gate_TK = score_TE.gather(1, expert_TK)
        up_to_TK = gate_TK.detach().cumsum(1)
        before_TK = torch.cat([torch.zeros_like(up_to_TK[:, :1]), up_to_TK[:, :-1]], dim=1)
        # if p were below 0, a token would have no expert
        chosen_TK = before_TK <= self.p.to(self.dtype).clamp_min(0)
        expert_TK = torch.where(chosen_TK, expert_TK, -1)
        gate_TK = torch.where(chosen_TK, gate_TK, 0.0)
        if self.renormalise:
            gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)

        def switch() -> Tensor:
            exists_T1 = torch.ones_like(chosen_TK[:, :1])
            if info.mask_T is not None:
                exists_T1 = info.mask_T.bool().unsqueeze(1)
            num_tokens = exists_T1.sum().clamp_min(1)
            mean_choices = (chosen_TK & exists_T1).sum().clamp_min(1).to(self.dtype) / num_tokens
            return switch_loss(score_TE, expert_TK, self.E, info.mask_T, choices_per_token=mean_choices)

        losses = {
            "switch": switch,
            "hf": lambda: hf_loss(score_TE, expert_TK, self.E, info.mask_T),
            "entropy": lambda: entropy_loss(logits_TE, info.mask_T),
        }
        return self.routed(expert_TK, gate_TK, logits_TE, info, losses, ragged=True)

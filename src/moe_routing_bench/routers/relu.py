"""ReLU routing (ReMoE): every expert with a positive logit, weighted by it; fully differentiable.

    z = x W,  R = ReLU(z),  the experts with R > 0,  gate = R   (not renormalised)

The rule does not fix the number of experts. A regulariser times `strength` does, and the controller
l1_strength moves strength until tokens have K experts on average:

    loss "relu" = strength * E sum_e (c_e / (T K)) mean_t R_te    fewer experts and balance; the authors' code
    loss "l1"   = strength * mean_t sum_e R_te                    only fewer experts

strength is a buffer and starts at 1e-8 as in the authors' code. It is part of the loss:
Routing.losses["relu"] is strength times the formula, and loss_weights={"relu": 1.0} trains as published.
`most` limits a token to the experts with the `most` largest gates. c_e counts these experts; R is the mean
over all of them.

A token whose logits are all 0 or less has no expert, and the gradient of its logits is zero. Neither the
experts nor the loss can change that, only the effect of other tokens on W and of other layers on x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.losses import l1_loss, relu_loss
from moe_routing_bench.routers.router import Router


class ReLURouter(Router):
    causal = True
    batch_dependent = False
    paper = "ReMoE, Wang et al. 2024, arXiv:2412.14711"
    gate_sum = "any"
    loss_names = ("relu", "l1")
    experts_per_token = "0 to E, those with a positive logit"
    controller = "l1_strength"
    strength: Tensor

    def __init__(self, D: int, E: int, K: int, *, most: int | None = None, **options: Any):
        super().__init__(D, E, K, **options)
        self.most = self.widest(most)
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.register_buffer("strength", torch.tensor(1e-8))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        value_TK, expert_TK = self.topk(logits_TE, self.most)
        expert_TK = torch.where(value_TK > 0, expert_TK, -1)
        relu_TE = logits_TE.relu()
        strength = self.strength.to(self.dtype)
        losses = {
            "relu": lambda: (
                strength * relu_loss(relu_TE, expert_TK, self.E, info.mask_T, choices_per_token=self.K)
            ),
            "l1": lambda: strength * l1_loss(relu_TE, info.mask_T),
        }
        return self.routed(expert_TK, value_TK.relu(), logits_TE, info, losses, ragged=True)

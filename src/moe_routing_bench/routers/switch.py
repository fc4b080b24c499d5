"""Switch top-1: one expert per token, weighted by its probability.

    z = x W,  p = softmax(z),  e = argmax_e p_e,  gate = p_e   (not renormalised, so the router learns)

With `jitter` > 0 the router reads x * U(1 - jitter, 1 + jitter) in training; the experts read x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.losses import score_losses
from moe_routing_bench.routers.router import Router


class SwitchRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Switch Transformers, Fedus et al. 2021, arXiv:2101.03961"
    gate_sum = "at most one"
    fixed_K = 1
    experts_per_token = "1"
    loss_names = ("switch", "hf", "z")

    def __init__(self, D: int, E: int, K: int = 1, *, jitter: float = 0.0, **options: Any):
        super().__init__(D, E, K, **options)
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be at least 0 and below 1, not {jitter}")
        self.jitter = jitter
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        x_TD = self.prepare(x_TD, info)
        if self.training and self.jitter > 0:
            x_TD = x_TD * (1 + self.jitter * (2 * torch.rand_like(x_TD) - 1))
        logits_TE = self.project(x_TD, self.w_DE)
        score_TE = logits_TE.softmax(-1)
        # choose by z, because p has ties where it underflows
        _, expert_TK = self.topk(logits_TE, 1)
        losses = score_losses(lambda: (score_TE, expert_TK), self.E, info)
        return self.routed(expert_TK, score_TE.gather(1, expert_TK), logits_TE, info, losses)

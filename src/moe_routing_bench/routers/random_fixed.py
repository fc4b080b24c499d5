"""Random fixed: top-k of a random linear map that is never trained; a learned router should be better.

    z = x W, W drawn once from N(0, 0.02^2) and kept in a buffer;   the K experts with the largest z
    gates="softmax": softmax over the K chosen z      gates="uniform": 1 / K

Unlike a hash of the vocabulary id it sends similar vectors to the same experts, but it also learns nothing.
This is the router of SMoE-Dropout, whose frozen map also has a bias and whose K grows during training. THOR
(arXiv:2110.04260) is different: it draws new experts for every input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router

GATES = ("softmax", "uniform")


class RandomFixedRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Sparse MoE as the New Dropout, Chen et al. 2023, arXiv:2303.01610"
    gate_sum = "one"

    w_DE: Tensor

    def __init__(self, D: int, E: int, K: int, *, gates: str = "softmax", seed: int = 0, **options: Any):
        super().__init__(D, E, K, **options)
        one_of("gates", gates, GATES)
        self.gates = gates
        self.seed = seed
        self.register_buffer("w_DE", torch.empty(D, E))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws W from the generator; without one, from the seed, so that W is always the same."""
        if generator is None:
            generator = torch.Generator(self.w_DE.device).manual_seed(self.seed)
        nn.init.normal_(self.w_DE, std=0.02, generator=generator)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        value_TK, expert_TK = self.topk(logits_TE, self.K)
        gate_TK = value_TK.softmax(-1) if self.gates == "softmax" else torch.full_like(value_TK, 1 / self.K)
        return self.routed(expert_TK, gate_TK, logits_TE, info)

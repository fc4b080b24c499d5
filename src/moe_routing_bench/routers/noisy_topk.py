"""Noisy top-k: learned noise on the logits in training; the gates are a softmax over the K largest.

    clean = x W,  std = softplus(x W_noise),  H = clean + N(0, 1) * std in training, H = clean in eval
    the K experts with the largest H;  gate = softmax(H_1 .. H_K)

    importance loss = CV^2(sum_t gate_te)      load loss = CV^2(sum_t P(t, e))
    P(t, e) = Phi((clean_te - threshold_te) / std_te), the chance that e is chosen if its noise is drawn again
    threshold_te = K-th largest of H_t without e: the (K+1)-th of all if e is chosen, else the K-th

With K = E every expert is always chosen and P = 1. W_noise starts at 0 as in the paper, so the first std is
log 2. In the paper W also starts at 0; here it is random, so that a router in eval makes different choices
from the start.

The authors' code (tensor2tensor) differs: it adds 0.01 to std; here std is only kept above 1e-6. In eval it
sets std to 0, so P is 1 for the chosen experts and 0 for the others. Here P keeps its formula with H = clean,
so the load loss of an evaluation has the scale of training. The paper describes only training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.losses import importance_loss, load_loss
from moe_routing_bench.routers.router import Router

# softplus underflows to 0 near -104, where P would be 0 / 0
SMALLEST_STD = 1e-6


class NoisyTopkRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Outrageously Large Neural Networks, Shazeer et al. 2017, arXiv:1701.06538"
    gate_sum = "one"
    loss_names = ("importance", "load", "z")

    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, **options)
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.w_noise_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.w_DE, std=0.02, generator=generator)
        nn.init.zeros_(self.w_noise_DE)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        x_TD = self.prepare(x_TD, info)
        clean_TE = self.project(x_TD, self.w_DE)
        std_TE = F.softplus(self.project(x_TD, self.w_noise_DE)).clamp_min(SMALLEST_STD)
        h_TE = clean_TE + torch.randn_like(clean_TE) * std_TE if self.training else clean_TE
        # one more than K, for the threshold of the chosen experts
        value_TK1, expert_TK1 = self.topk(h_TE, min(self.K + 1, self.E))
        expert_TK = expert_TK1[:, : self.K]
        gate_TK = value_TK1[:, : self.K].softmax(-1)
        losses = {
            "importance": lambda: importance_loss(gate_TK, expert_TK, self.E, info.mask_T),
            "load": lambda: load_loss(chance_TE(clean_TE, std_TE, value_TK1, expert_TK), info.mask_T),
        }
        return self.routed(expert_TK, gate_TK, clean_TE, info, losses)


def chance_TE(clean_TE: Tensor, std_TE: Tensor, value_TK1: Tensor, expert_TK: Tensor) -> Tensor:
    """P(t, e). value_TK1: the K+1 largest of H, highest first (K of them if K = E)."""
    K = expert_TK.shape[1]
    if clean_TE.shape[1] == K:
        return torch.ones_like(clean_TE)
    chosen_TE = torch.zeros_like(clean_TE, dtype=torch.bool).scatter(1, expert_TK, True)
    threshold_TE = torch.where(chosen_TE, value_TK1[:, K : K + 1], value_TK1[:, K - 1 : K])
    return torch.special.ndtr((clean_TE - threshold_TE) / std_TE)

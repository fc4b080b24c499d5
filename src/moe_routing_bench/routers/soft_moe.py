"""Soft-MoE: no choice; every slot mixes all tokens of a sequence, and every token mixes all slots.

    logits_ns = < x_n / |x_n|,  scale * phi_s / |phi_s| >      |v| = sqrt(sum v^2 + 1e-6)
    dispatch = softmax over the N tokens of a sequence,  combine = softmax over the S slots
    S = E * slots_per_expert, ordered by expert;  the slots mix the raw x, not the normalised one

A token has no choices, so K must be 1. Masked tokens have zero weight in both directions: they reach no slot
and get nothing back. A token's share of a slot depends on every other token of its sequence.

The authors' code (google-research/vmoe) has the same epsilon, inside the root, and the same scale, one number
that starts at 1. It draws phi by Lecun's rule. Drawn with std 0.02 it is the same after normalising, except
for the epsilon. Their code can add noise to the logits; this does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import SoftRouting, TokenInfo
from moe_routing_bench.routers.router import Router


class SoftMoERouter(Router):
    causal = False
    batch_dependent = True
    paper = "From Sparse to Soft Mixtures of Experts, Puigcerver et al. 2023, arXiv:2308.00951"
    gate_sum = "one"
    fixed_K = 1
    experts_per_token = "all, softly"
    groups = "dense"

    def __init__(self, D: int, E: int, K: int = 1, *, slots_per_expert: int = 1, **options: Any):
        super().__init__(D, E, K, **options)
        if slots_per_expert < 1:
            raise ValueError(f"slots_per_expert must be at least 1, not {slots_per_expert}")
        self.phi_DS = nn.Parameter(torch.empty(D, E * slots_per_expert))
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.phi_DS, std=0.02, generator=generator)
        nn.init.ones_(self.scale)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> SoftRouting:
        x_TD = _normalised(self.prepare(x_TD, info), dim=1)
        phi_DS = self.scale.to(self.dtype) * _normalised(self.phi_DS.to(self.dtype), dim=0)
        logits_TS = self.project(x_TD, phi_DS)
        B, S = info.num_sequences, phi_DS.shape[1]
        N = x_TD.shape[0] // B
        logits_BNS = logits_TS.view(B, N, S)
        dispatch_BNS = logits_BNS
        if info.mask_T is not None:
            # the lowest number instead of -inf, because a sequence without tokens must not become 0 / 0
            keep_BN1 = info.mask_T.bool().view(B, N, 1)
            dispatch_BNS = torch.where(keep_BN1, logits_BNS, torch.finfo(self.dtype).min)
        dispatch_BNS = dispatch_BNS.softmax(1)
        combine_BNS = logits_BNS.softmax(2)
        if info.mask_T is not None:
            dispatch_BNS = torch.where(keep_BN1, dispatch_BNS, 0.0)
            combine_BNS = torch.where(keep_BN1, combine_BNS, 0.0)
        return SoftRouting(dispatch_BNS=dispatch_BNS, combine_BNS=combine_BNS, num_experts=self.E)


def _normalised(x: Tensor, *, dim: int) -> Tensor:
    # epsilon inside the root, as in the paper's code: the gradient at x = 0 is finite and modest
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + 1e-6)

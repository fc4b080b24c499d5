"""Quantile balancing: top-k of logits minus an offset per expert, computed from the previous batches.

    the K experts with the largest z_te - beta_e;   the gates use the raw z
    of each training batch: alpha_t = (K+1)-th largest of z_te - beta_e over e
                            new beta_e = (n+1)-th largest of z_te - alpha_t over t,   n = floor(T * K / E)
    the controller quantile averages these over micro-batches and ranks and makes them beta_E

This is one round of coordinate descent on the dual of "the best assignment in which every expert has T K / E
tokens". With its new beta_e, expert e is above alpha_t for at most n tokens. A batch is counted after its
forward (seen_beta_E and seen_batches), so no token depends on another. With K = E all experts are chosen and
nothing is counted.

Gates, by Megatron's score functions:
    "softmax_of_chosen"   softmax over the K chosen z: its default
    "softmax"             softmax over all E, not renormalised (pre_softmax)
    "sigmoid"             sigmoid(z), divided by the sum of the chosen + 1e-20 if K > 1

Others differ: Megatron refuses masks, and a T K that is not a multiple of E; here n is rounded down and
counts the tokens that exist. BIP balancing, the earlier paper, has "at most" T K / E tokens, so its offsets
cannot be negative: it can reduce an expert's load, but not raise it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core import position_invariant as steady
from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router

GATES = ("softmax_of_chosen", "softmax", "sigmoid")


class QuantileRouter(Router):
    causal = True
    batch_dependent = False
    paper = (
        "Quantile Balancing, Su 2026, kexue.fm/archives/11619, after BIP-Based Balancing, "
        "Sun 2025, arXiv:2502.15451"
    )
    gate_sum = "at most one"
    loss_names = ("z",)
    controller = "quantile"

    beta_E: Tensor
    seen_beta_E: Tensor
    seen_batches: Tensor

    def __init__(self, D: int, E: int, K: int, *, gates: str = "softmax_of_chosen", **options: Any):
        super().__init__(D, E, K, **options)
        one_of("gates", gates, GATES)
        self.gates = gates
        if gates == "softmax_of_chosen" or (gates == "sigmoid" and K > 1):
            self.gate_sum = "one"
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.register_buffer("beta_E", torch.zeros(E))
        self.register_buffer("seen_beta_E", torch.zeros(E))
        self.register_buffer("seen_batches", torch.zeros(()))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        z_TE = logits_TE.detach()
        # one more than K, because the first that is not chosen is alpha
        value_TK1, expert_TK1 = self.topk(z_TE - self.beta_E.to(self.dtype), min(self.K + 1, self.E))
        expert_TK = expert_TK1[:, : self.K]
        if self.training and self.K < self.E:
            self.see(z_TE - value_TK1[:, self.K :], info.mask_T)
        return self.routed(expert_TK, self.gate(logits_TE, expert_TK), logits_TE, info)

    def gate(self, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        if self.gates == "softmax":
            return logits_TE.softmax(-1).gather(1, expert_TK)
        chosen_TK = logits_TE.gather(1, expert_TK)
        if self.gates == "softmax_of_chosen":
            return chosen_TK.softmax(-1)
        score_TK = steady.sigmoid(chosen_TK)
        return score_TK / (score_TK.sum(-1, keepdim=True) + 1e-20) if self.K > 1 else score_TK

    @torch.no_grad()
    def see(self, above_TE: Tensor, mask_T: Tensor | None) -> None:
        """Add this batch's offsets to the accumulators; a batch without tokens adds nothing."""
        T = above_TE.shape[0]
        if T == 0:
            return
        keep_T = torch.ones_like(above_TE[:, 0], dtype=torch.bool) if mask_T is None else mask_T.bool()
        count = keep_T.sum()
        above_ET = torch.where(keep_T, above_TE.t(), float("-inf"))
        # K < E, so n + 1 <= T
        largest_EC = above_ET.topk(T * self.K // self.E + 1, dim=1).values
        n = count * self.K // self.E
        new_beta_E = largest_EC.gather(1, n.expand(self.E, 1)).squeeze(1)
        self.seen_beta_E.add_(torch.where(count > 0, new_beta_E, 0.0))
        self.seen_batches.add_(count > 0)

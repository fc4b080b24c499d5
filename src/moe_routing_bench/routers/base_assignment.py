"""BASE: in training the best assignment with equal loads, by an auction; in eval each token's best expert.

    training: maximise sum_t z_{t, e(t)} with at most ceil(T / E) tokens for every expert
              (exactly T / E if E divides T)
    eval:     e(t) = argmax_e z_te
    gate = sigmoid(z_{t, e(t)})

The auction (Bertsekas): every token without an expert bids for the expert with the best z_te - price_e. It
offers the price, plus the advantage over its second best expert, plus eps. An expert keeps its ceil(T / E)
highest offers; when it is full, its price is the lowest of them. The final sum is within T * eps of the best.
eps = `slack` * (max z - min z), at least 1e-4; 1 / 50 and 1e-4 are the authors' values. Masked tokens do not
take part.

The number of rounds depends on the data: in training the loop reads the device every round and does not
compile into one graph. It is also slow: there are hundreds of rounds if many tokens prefer the same experts.
Eval is plain top-1.

The authors' code (fairseq) differs: experts bid for tokens, the guarantee ends after 100 rounds, and T must
be a multiple of E. Its layer mixes a * (x + FFN(x)) + (1 - a) * x = x + a * FFN(x), which is this gate with
the residual outside. It can shuffle tokens between ranks first, which is not part of a router.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router

SMALLEST_EPS = 1e-4  # as in fairseq; it also ends the auction if all z are equal


class BaseAssignmentRouter(Router):
    causal = False
    batch_dependent = True
    paper = "BASE Layers, Lewis et al. 2021, arXiv:2103.16716"
    gate_sum = "at most one"
    fixed_K = 1
    experts_per_token = "1"
    host_sync = "in training: the auction ends when every token has an expert"

    def __init__(self, D: int, E: int, K: int = 1, *, slack: float = 1 / 50, **options: Any):
        super().__init__(D, E, K, **options)
        if slack <= 0:
            raise ValueError(f"slack must be above 0, not {slack}: the auction would not end")
        self.slack = slack
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        if self.training:
            expert_TK = self.assign(logits_TE.detach(), info.mask_T).unsqueeze(1)
        else:
            _, expert_TK = self.topk(logits_TE, 1)
        return self.routed(expert_TK, logits_TE.gather(1, expert_TK).sigmoid(), logits_TE, info)

    def assign(self, z_TE: Tensor, mask_T: Tensor | None) -> Tensor:
        if mask_T is None:
            return auction(z_TE, slack=self.slack)
        keep_T = mask_T.bool()
        expert_T = torch.zeros_like(keep_T, dtype=torch.int64)
        expert_T[keep_T] = auction(z_TE[keep_T], slack=self.slack)
        return expert_T


def auction(z_TE: Tensor, *, slack: float) -> Tensor:
    """An expert for each token, with at most ceil(T / E) tokens each. It reads the device once per round."""
    T, E = z_TE.shape
    expert_T = torch.full((T,), E if E > 1 else 0, device=z_TE.device)  # E: none yet
    if T == 0 or E == 1:
        return expert_T
    capacity = -(-T // E)
    # in float64 and from 0, so that a price plus eps is more than the price; NaN and inf would bid forever
    z_TE = z_TE.double().nan_to_num().clamp(-1e30, 1e30)
    z_TE = z_TE - z_TE.min()
    eps = (slack * z_TE.max()).clamp_min(SMALLEST_EPS)
    price_E = z_TE.new_zeros(E)
    offer_T = z_TE.new_zeros(T)  # what a token bids, then what it pays
    while len(free_t := (expert_T == E).nonzero().squeeze(1)):
        value_t2, expert_t2 = (z_TE[free_t] - price_E).topk(2, dim=1)
        expert_T[free_t] = expert_t2[:, 0]
        offer_T[free_t] = price_E[expert_t2[:, 0]] + value_t2[:, 0] - value_t2[:, 1] + eps
        # by expert, the highest offers first
        order_T = offer_T.argsort(descending=True, stable=True)
        order_T = order_T[expert_T[order_T].argsort(stable=True)]
        sorted_expert_T = expert_T[order_T]
        count_E = expert_T.bincount(minlength=E)
        first_E = count_E.cumsum(0) - count_E
        rank_T = torch.arange(T, device=z_TE.device) - first_E[sorted_expert_T]
        lowest_E = offer_T[order_T[(first_E + capacity - 1).clamp_max(T - 1)]]
        price_E = torch.where(count_E >= capacity, lowest_E, 0.0)
        expert_T[order_T] = torch.where(rank_T < capacity, sorted_expert_T, E)
    return expert_T

"""Expert choice: each expert takes its n best tokens, so loads are equal and a token may have no expert.

    S = softmax over experts of x W,   n = ceil(T * K / E)
    expert e takes the n tokens with the largest S_te;   gate = S_te

K is the paper's capacity factor c: the mean number of experts of a token. An expert chooses from all T tokens
of the batch (over="batch", as in the paper) or from each sequence, where T is its length (over="sequence",
the groups of flaxformer and V-MoE). Of equal scores the earlier token is taken. Masked tokens are never taken
and T does not count them, so every expert still takes the same number.

Others differ: the paper writes n = T c / E and does not round. V-MoE takes the ceiling, then the next
multiple of 4. flaxformer rounds to the nearest, at least 4, and lets experts take masked tokens if nothing
else is left. The paper limits the experts of a token with a linear program, and experts stay full. Here
`most` drops a token's experts beyond its `most` best, and experts may have free rows.

It is not for decoders, because a later token can displace an earlier token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router

OVER = ("batch", "sequence")


class ExpertChoiceRouter(Router):
    causal = False
    batch_dependent = True
    paper = "Mixture-of-Experts with Expert Choice Routing, Zhou et al. 2022, arXiv:2202.09368"
    gate_sum = "at most one"
    loss_names = ("z",)
    experts_per_token = "0 to E, K on average"
    groups = "equal"

    def __init__(
        self, D: int, E: int, K: int, *, over: str = "batch", most: int | None = None, **options: Any
    ):
        super().__init__(D, E, K, **options)
        one_of("over", over, OVER)
        self.over = over
        self.most = self.widest(most)
        if self.most < E:
            self.groups = "uneven"
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        # log S has the order of S, also where S underflows
        score_TE = logits_TE.detach().log_softmax(-1)
        taken_TE = self.taken(score_TE, info)
        # sort the experts that took a token by its scores; the other experts come last
        _, expert_TK = self.topk(torch.where(taken_TE, score_TE, float("-inf")), self.most)
        chosen_TK = taken_TE.gather(1, expert_TK)
        gate_TK = logits_TE.softmax(-1).gather(1, expert_TK)
        expert_TK = torch.where(chosen_TK, expert_TK, -1)
        gate_TK = torch.where(chosen_TK, gate_TK, 0.0)
        return self.routed(expert_TK, gate_TK, logits_TE, info, ragged=True)

    def taken(self, score_TE: Tensor, info: TokenInfo) -> Tensor:
        """The tokens that each expert takes, from all tokens or from each sequence."""
        T, E = score_TE.shape
        B = info.num_sequences if self.over == "sequence" else 1
        N = T // B
        exists_T = torch.ones(T, dtype=torch.bool, device=score_TE.device)
        exists_BN = (exists_T if info.mask_T is None else info.mask_T.bool()).view(B, N)
        score_BEN = score_TE.view(B, N, E).transpose(1, 2)
        score_BEN = torch.where(exists_BN.unsqueeze(1), score_BEN, float("-inf"))
        # with a mask fewer than C, because only tokens that exist count
        C = -(-N * self.K // E)
        num_taken_B11 = ((exists_BN.sum(1) * self.K + E - 1) // E).view(B, 1, 1)
        if C == 0:
            return torch.zeros_like(score_TE, dtype=torch.bool)
        largest_BEC = score_BEN.topk(C, dim=2).values
        lowest_BE1 = largest_BEC.gather(2, (num_taken_B11 - 1).clamp_min(0).expand(B, E, 1))
        above_BEN = score_BEN > lowest_BE1
        # torch.topk promises no order of equal scores: of the tokens at the limit the earlier ones are taken
        edge_BEN = (score_BEN == lowest_BE1) & exists_BN.unsqueeze(1)
        room_BE1 = num_taken_B11 - above_BEN.sum(2, keepdim=True)
        taken_BEN = above_BEN | (edge_BEN & (edge_BEN.cumsum(2) <= room_BE1))
        return taken_BEN.transpose(1, 2).reshape(T, E)

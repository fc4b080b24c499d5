"""Expert threshold: a token goes to every expert whose threshold it reaches; a causal expert choice.

    z = x W;   token t goes to expert e if z_te >= threshold_e;   gate = sigmoid(z_te)
    of each training batch: the n-th largest z_te over t, n = floor(T * K / E), at least 1
    the controller threshold_ema makes threshold_E a running mean of these

Expert e takes about the share K / E of all tokens, but each token is judged alone: nothing depends on other
tokens of the batch, also in training. A batch is counted after its forward (seen_threshold_E and
seen_batches) and moves threshold_E at the controller's next step. threshold_E starts at 0, which about half
of all pairs reach. The first step of the controller brings tokens near K experts.

The authors' code differs: it trains its first steps by expert choice (threshold_warmup_steps), by default
divides the gates by the number of a token's experts plus one for a shared expert, and can limit an expert's
tokens per batch, which makes training depend on the batch. None of this is done here. Two options are ours:
`most` (a token keeps its best experts by z) and fallback_top1 (a token that reaches no threshold goes to the
nearest expert).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core import position_invariant as steady
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router


class ExpertThresholdRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Expert Threshold Routing, Sun et al. 2026, arXiv:2603.11535"
    gate_sum = "any"
    loss_names = ("z",)
    experts_per_token = "0 to E, about K on average"
    controller = "threshold_ema"

    threshold_E: Tensor
    seen_threshold_E: Tensor
    seen_batches: Tensor

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        most: int | None = None,
        fallback_top1: bool = False,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        self.most = self.widest(most)
        self.fallback_top1 = fallback_top1
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.register_buffer("threshold_E", torch.zeros(E))
        self.register_buffer("seen_threshold_E", torch.zeros(E))
        self.register_buffer("seen_batches", torch.zeros(()))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        z_TE = logits_TE.detach()
        beyond_TE = z_TE - self.threshold_E.to(self.dtype)
        reached_TE = beyond_TE >= 0
        if self.fallback_top1:
            # the largest is either reached already or the nearest expert
            reached_TE = reached_TE.scatter(1, beyond_TE.argmax(1, keepdim=True), True)
        if self.training:
            self.see(z_TE, info.mask_T)
        _, expert_TK = self.topk(torch.where(reached_TE, z_TE, float("-inf")), self.most)
        chosen_TK = reached_TE.gather(1, expert_TK)
        gate_TK = steady.sigmoid(logits_TE.gather(1, expert_TK))
        expert_TK = torch.where(chosen_TK, expert_TK, -1)
        gate_TK = torch.where(chosen_TK, gate_TK, 0.0)
        return self.routed(expert_TK, gate_TK, logits_TE, info, ragged=True)

    @torch.no_grad()
    def see(self, z_TE: Tensor, mask_T: Tensor | None) -> None:
        """Add this batch's thresholds to the accumulators; a batch without tokens adds nothing."""
        T = z_TE.shape[0]
        if T == 0:
            return
        keep_T = torch.ones_like(z_TE[:, 0], dtype=torch.bool) if mask_T is None else mask_T.bool()
        count = keep_T.sum()
        z_ET = torch.where(keep_T, z_TE.t(), float("-inf"))
        largest_EC = z_ET.topk(max(T * self.K // self.E, 1), dim=1).values
        n = (count * self.K // self.E).clamp_min(1)
        cut_E = largest_EC.gather(1, (n - 1).expand(self.E, 1)).squeeze(1)
        self.seen_threshold_E.add_(torch.where(count > 0, cut_E, 0.0))
        self.seen_batches.add_(count > 0)

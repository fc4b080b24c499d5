"""Moves the p of top-p: a PI controller keeps the mean number of experts per token at K.

    error_n = (K - mean experts per token) / E
    p_n = p_{n-1} + gain * (error_n - error_{n-1}) + integral_gain * error_n,  kept within 0 .. 1

This is DTop-p's p_0 + gain * error_n + integral_gain * (error_1 + ... + error_n) as long as p is inside its
bounds; in this form the sum does not grow while p is at a bound. The error as a share of E is also from
DTop-p: for a router without preferences a token has p E experts, so the error changes one to one with p for
any E. The gains are ours. DTop-p has one p for all layers and compares their mean; its variant by layer is
what is done here. It also scales the logits to mean 0 and deviation 1 times a learned scale, which belongs to
the router. Without tokens nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class PThreshold(Controller):
    moves = ("p",)
    source = "DTop-p MoE, Jin et al. 2025, arXiv:2512.13996 (gains ours)"

    def __init__(self, router: Router, *, gain: float = 0.5, integral_gain: float = 0.25, **options: Any):
        super().__init__(router, **options)
        if gain < 0 or not integral_gain > 0:
            raise ValueError(
                f"gain must be at least 0 and integral_gain above 0, not {gain} and {integral_gain}: without "
                "the integral the target is not reached"
            )
        self.gain, self.integral_gain = gain, integral_gain
        p: Tensor = router.get_buffer("p")
        self.memory["error"] = torch.zeros((), device=p.device)

    def update(self, counts: Counts) -> None:
        counts = self.total_counts(counts)
        p: Tensor = self.router.get_buffer("p")
        before = self.memory["error"]
        mean_experts = counts.count_E.sum() / counts.num_tokens.clamp_min(1)
        error = ((self.router.K - mean_experts) / self.router.E).to(before.dtype)
        moved = p + self.gain * (error - before) + self.integral_gain * error
        any_token = counts.num_tokens > 0
        p.copy_(torch.where(any_token, moved.clamp(0, 1), p))
        before.copy_(torch.where(any_token, error, before))

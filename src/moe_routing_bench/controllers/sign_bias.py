"""Bias by the sign of the gap: an expert with less than the mean load gains `rate`, one with more loses it.

    b_e += rate * sign(mean(c) - c_e)      c_e tokens that chose e in the whole batch, over all ranks

The update of Loss-Free Balancing (rate 0.001 there) and of Megatron. torchtitan also takes the mean off the
change (centred_bias). The choice is by score + b, so both choose alike until b is rounded: this one drifts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class SignBias(Controller):
    moves = ("bias_E",)
    source = "Auxiliary-Loss-Free Load Balancing, Wang et al. 2024, arXiv:2408.15664; Megatron-LM"

    def __init__(self, router: Router, *, rate: float = 1e-3, **options: Any):
        super().__init__(router, **options)
        if not rate > 0:
            raise ValueError(f"rate is what a bias moves by in a step; it must be above 0, not {rate}")
        self.rate = rate

    def update(self, counts: Counts) -> None:
        count_E = self.total_counts(counts).count_E
        bias_E: Tensor = self.router.get_buffer("bias_E")
        # whole numbers: a mean in float32 would lose the sign of small gaps past 2^24 tokens
        gap_E = count_E.sum() - self.router.E * count_E
        bias_E.add_(self.rate * torch.sign(gap_E).to(bias_E.dtype))

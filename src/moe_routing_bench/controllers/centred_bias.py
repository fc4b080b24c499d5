"""Bias by the sign of the gap, minus the mean change: the sum of all biases stays what it was.

    d_e = rate * sign(mean(c) - c_e)       b_e += d_e - mean(d)

torchtitan's update ("not exactly the same" as arXiv:2408.15664, says its code). Before rounding it chooses
like sign_bias, whose biases drift when more experts are below the mean than above it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class CentredBias(Controller):
    moves = ("bias_E",)
    source = "torchtitan, after arXiv:2408.15664"

    def __init__(self, router: Router, *, rate: float = 1e-3, **options: Any):
        super().__init__(router, **options)
        if not rate > 0:
            raise ValueError(f"rate is what a bias moves by in a step; it must be above 0, not {rate}")
        self.rate = rate

    def update(self, counts: Counts) -> None:
        count_E = self.total_counts(counts).count_E
        bias_E: Tensor = self.router.get_buffer("bias_E")
        change_E = self.rate * torch.sign(count_E.sum() - self.router.E * count_E).to(bias_E.dtype)
        bias_E.add_(change_E - change_E.mean())

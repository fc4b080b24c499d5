"""Strength of the ReLU router's regulariser: raised while tokens use more than K experts, else lowered.

    sparsity = 1 - sum_e c_e / (T E)
    strength *= factor  if sparsity < 1 - K / E  else  strength /= factor        factor 1.2, strength_0 1e-8

ReMoE's code has one strength for all layers and compares their mean sparsity; here every router has its own
strength. Without tokens nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class L1Strength(Controller):
    moves = ("strength",)
    source = "ReMoE, Wang et al. 2024, arXiv:2412.14711"

    def __init__(self, router: Router, *, factor: float = 1.2, **options: Any):
        super().__init__(router, **options)
        if not factor > 1:
            raise ValueError(f"factor multiplies the strength per step; it must be above 1, not {factor}")
        self.factor = factor

    def update(self, counts: Counts) -> None:
        counts = self.total_counts(counts)
        strength: Tensor = self.router.get_buffer("strength")
        # sparsity < 1 - K / E in whole numbers, so that exactly K experts per token are never "too many"
        too_many = counts.count_E.sum() > self.router.K * counts.num_tokens
        moved = torch.where(too_many, strength * self.factor, strength / self.factor)
        strength.copy_(torch.where(counts.num_tokens > 0, moved, strength))

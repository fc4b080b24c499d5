"""Moves the experts' thresholds: a running mean of the thresholds that would have filled the experts.

    raw = decay * raw + (1 - decay) * seen_threshold / seen_batches,   threshold = raw / (1 - decay^n)

n counts the steps. Dividing by 1 - decay^n removes the effect of the zeros that raw starts from, so the first
step sets the thresholds at once. Decay (0.99) and correction are from the authors' code. raw is not stored:
in terms of threshold, the old value keeps the share (decay - decay^n) / (1 - decay^n). forward adds each
batch's thresholds to seen_threshold_E and 1 to seen_batches; this controller sets both to zero. Without a
batch nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class ThresholdEma(Controller):
    moves = ("threshold_E", "seen_threshold_E", "seen_batches")
    source = "Expert Threshold Routing, Sun et al. 2026, arXiv:2603.11535"

    def __init__(self, router: Router, *, decay: float = 0.99, **options: Any):
        super().__init__(router, **options)
        if not 0 <= decay < 1:
            raise ValueError(
                f"decay, the share of the old thresholds, must be at least 0 and below 1, not {decay}"
            )
        self.decay = decay
        threshold_E: Tensor = router.get_buffer("threshold_E")
        self.memory["steps"] = torch.zeros((), dtype=torch.float64, device=threshold_E.device)

    def update(self, counts: Counts) -> None:
        threshold_E: Tensor = self.router.get_buffer("threshold_E")
        seen_threshold_E: Tensor = self.router.get_buffer("seen_threshold_E")
        seen_batches: Tensor = self.router.get_buffer("seen_batches")
        steps = self.memory["steps"]
        total_E, batches = self.total(seen_threshold_E, seen_batches.to(seen_threshold_E.dtype))
        steps.add_((batches > 0).to(steps.dtype))
        faded = self.decay ** steps.clamp_min(1)
        kept = (self.decay - faded) / (1 - faded)
        new_E = kept * threshold_E + (1 - kept) * total_E / batches.clamp_min(1)
        threshold_E.copy_(torch.where(batches > 0, new_E, threshold_E))
        seen_threshold_E.zero_()
        seen_batches.zero_()

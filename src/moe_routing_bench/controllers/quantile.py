"""Quantile balancing: the offsets that would have balanced the last batches are used for the next ones.

    beta = ema * beta + (1 - ema) * seen_beta / seen_batches,  then  beta -= mean(beta)       ema 0 (Megatron)

forward adds each batch's offsets to seen_beta_E and 1 to seen_batches; this controller sets both to zero.
Experts are chosen by z - beta, so subtracting the mean changes no choice. Megatron averages the means of the
ranks; here a sum is divided by a sum, which is the same if all ranks saw the same number of batches. Without
a batch nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Controller, Counts
from moe_routing_bench.routers.router import Router


class Quantile(Controller):
    moves = ("beta_E", "seen_beta_E", "seen_batches")
    source = "Megatron-LM, finalize_model_grads.py"

    def __init__(self, router: Router, *, ema: float = 0.0, **options: Any):
        super().__init__(router, **options)
        if not 0 <= ema < 1:
            raise ValueError(f"ema, the share of the old offsets, must be at least 0 and below 1, not {ema}")
        self.ema = ema

    def update(self, counts: Counts) -> None:
        beta_E: Tensor = self.router.get_buffer("beta_E")
        seen_beta_E: Tensor = self.router.get_buffer("seen_beta_E")
        seen_batches: Tensor = self.router.get_buffer("seen_batches")
        total_E, batches = self.total(seen_beta_E, seen_batches.to(seen_beta_E.dtype))
        new_E = self.ema * beta_E + (1 - self.ema) * total_E / batches.clamp_min(1)
        beta_E.copy_(torch.where(batches > 0, new_E - new_E.mean(), beta_E))
        seen_beta_E.zero_()
        seen_batches.zero_()

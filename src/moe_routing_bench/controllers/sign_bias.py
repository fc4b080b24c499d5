"""Bias by the sign of the gap: an expert with less than the mean load gains `rate`, one with more loses it.

    b_e += rate * sign(mean(c) - c_e)      c_e tokens that chose e in the whole batch, over all ranks

This is the update of Loss-Free Balancing (with rate 0.001) and of Megatron. torchtitan also subtracts the
mean of the change (centred_bias). Experts are chosen by score + b, so both make the same choices until b is
rounded; here b drifts.
"""

from __future__ import annotations

from moe_routing_bench.controllers.controller import BiasController, Counts


class SignBias(BiasController):
    source = "Auxiliary-Loss-Free Load Balancing, Wang et al. 2024, arXiv:2408.15664; Megatron-LM"

    def update(self, counts: Counts) -> None:
        self.router.get_buffer("bias_E").add_(self.towards_mean_E(counts))

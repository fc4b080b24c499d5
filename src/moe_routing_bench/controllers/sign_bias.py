"""Bias by the sign of the gap: an expert with less than the mean load gains `rate`, one with more loses it.

    b_e += rate * sign(mean(c) - c_e)      c_e tokens that chose e in the whole batch, over all ranks

The update of Loss-Free Balancing (rate 0.001 there) and of Megatron. torchtitan also takes the mean off the
change (centred_bias). The choice is by score + b, so both choose alike until b is rounded: this one drifts.
"""

from __future__ import annotations

from moe_routing_bench.controllers.controller import BiasController, Counts


class SignBias(BiasController):
    source = "Auxiliary-Loss-Free Load Balancing, Wang et al. 2024, arXiv:2408.15664; Megatron-LM"

    def update(self, counts: Counts) -> None:
        self.router.get_buffer("bias_E").add_(self.towards_mean_E(counts))

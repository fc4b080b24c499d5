"""Bias by the sign of the gap, minus the mean change, so that the sum of all biases does not change.

    d_e = rate * sign(mean(c) - c_e)       b_e += d_e - mean(d)

This is torchtitan's update (its code says "not exactly the same" as arXiv:2408.15664). Before rounding it
makes the same choices as sign_bias, whose biases drift if more experts are below the mean than above it.
"""

from __future__ import annotations

from moe_routing_bench.controllers.controller import BiasController, Counts


class CentredBias(BiasController):
    source = "torchtitan, after arXiv:2408.15664"

    def update(self, counts: Counts) -> None:
        change_E = self.towards_mean_E(counts)
        self.router.get_buffer("bias_E").add_(change_E - change_E.mean())

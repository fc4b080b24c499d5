"""Transformers' "batched_mm" experts: a copy of an expert's weights for every pair, then bmm."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import hf

MAX_BYTES = 2**33  # of copies of weights
freeze = hf.freeze


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    copied = gate_TK.numel() * 3 * weights.D * weights.F * x_TD.element_size()
    if copied > MAX_BYTES:
        return f"it copies an expert's weights for every pair, which is {copied / 2**30:.0f} GiB here"
    return hf.why_not(weights)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    return hf.run("batched_mm", x_TD, gate_TK, plan, weights)

"""Transformers' "eager" experts: a loop over the experts that have tokens, sums in the model's dtype."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import hf

HOST_SYNC = "the loop finds the experts that have tokens with nonzero()"

freeze = hf.freeze


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return hf.why_not(weights)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    return hf.run("eager", x_TD, gate_TK, plan, weights)

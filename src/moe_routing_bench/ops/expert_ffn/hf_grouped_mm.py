"""Transformers' default "grouped_mm" experts: sort, gather, torch's grouped_mm, rows back in order."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import hf

freeze = hf.freeze


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    if x_TD.dtype not in FLOATS:
        return f"torch's grouped_mm takes float32, bfloat16 or float16, not {x_TD.dtype}"
    if weights.D * x_TD.element_size() % 16 or weights.F * x_TD.element_size() % 16:
        return (
            f"torch's grouped_mm needs rows of a multiple of 16 bytes; D {weights.D} and F {weights.F} "
            f"in {x_TD.dtype} are not"
        )
    return hf.why_not(weights)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    return hf.run("grouped_mm", x_TD, gate_TK, plan, weights)

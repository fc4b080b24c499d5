"""ScatterMoE's two products in Triton, with our plan between them; GPU. No GPU has run this file."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rivals
from moe_routing_bench.ops.expert_ffn.op import check_sizes

NEEDS = {"scattermoe": "pip install git+https://github.com/shawntan/scattermoe"}


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return rivals.why_not(
        x_TD, gate_TK, plan, weights, kernel="scatter_moe", activation=weights.activation, biases=True
    )


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    from scattermoe.parallel_experts import parallel_linear

    check_sizes(x_TD, gate_TK, plan, weights)
    linear = partial(
        parallel_linear, sorted_expert_idxs=plan.expert_R(), sorted_scattered_idxs=plan.pair_R,
        expert_offsets=plan.offset_E1[1:],
    )  # fmt: skip
    h_RG = linear(x_TD, weights.w_in_EDG, plan.num_choices, expert_biases=weights.b_in_EG, grouped_out=True)
    return linear(
        activate(h_RG, weights.activation), weights.w_out_EFD, 1, expert_biases=weights.b_out_ED,
        gates=gate_TK.to(x_TD.dtype), grouped_in=True,
    )  # fmt: skip

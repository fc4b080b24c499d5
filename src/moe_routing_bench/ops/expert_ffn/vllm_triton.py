"""vLLM's Triton experts, fused_experts; GPU, forward. No GPU has run this file."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import hf, rivals
from moe_routing_bench.ops.expert_ffn.op import check_sizes

FORWARD_ONLY = True
NEEDS = {"vllm": "pip install vllm"}
freeze = hf.freeze  # the layout of a checkpoint


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return rivals.why_not(x_TD, gate_TK, plan, weights, kernel="vllm_triton")


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    check_sizes(x_TD, gate_TK, plan, weights)
    w_in_EGD, w_out_EDF = (w.transpose(1, 2).contiguous() for w in (weights.w_in_EDG, weights.w_out_EFD))
    return fused_experts(
        x_TD.contiguous(), w_in_EGD, w_out_EDF, gate_TK.float().contiguous(), plan.expert_TK().int()
    )

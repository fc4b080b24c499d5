"""FlashInfer's fused MoE in CUTLASS; NVIDIA, forward. No GPU has run this file.

It reads all of up before all of gate: freeze() stores w_in so. It sums with atomics, so bits differ between
runs. Its autotuner is not called: the tiles are its default ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rivals
from moe_routing_bench.ops.expert_ffn.op import check_sizes

FORWARD_ONLY = True
DETERMINISTIC = False
NEEDS = {"flashinfer": "pip install flashinfer-python"}
KERNEL = "flashinfer_cutlass"
TARGETS = ("sm_89", "sm_90a", "sm_100a")
freeze = rivals.freezer(KERNEL, rivals.up_first)


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return rivals.why_not(x_TD, gate_TK, plan, weights, kernel=KERNEL, targets=TARGETS)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    from flashinfer.fused_moe.core import cutlass_fused_moe

    check_sizes(x_TD, gate_TK, plan, weights)
    w_in_EGD, w_out_EDF = rivals.panels(weights, freeze)
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    cutlass_fused_moe(
        x_TD.contiguous(), plan.expert_TK().int(), gate_TK.float().contiguous(), w_in_EGD, w_out_EDF,
        x_TD.dtype, quant_scales=None, output=y_TD,
    )  # fmt: skip
    return y_TD

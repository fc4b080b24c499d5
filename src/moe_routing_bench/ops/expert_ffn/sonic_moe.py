"""SonicMoE's layer in CuTe DSL, for Hopper; NVIDIA, forward. No GPU has run this file.

    pip install git+https://github.com/Dao-AILab/sonic-moe

Its gate and up columns alternate: freeze() stores w_in so. Trained weights would be copied in every call,
which SonicMoE itself does not do, so there is no backward here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rivals
from moe_routing_bench.ops.expert_ffn.op import check_sizes

FORWARD_ONLY = True
HOST_SYNC = "it counts with torch.bincount, unless the tokens are a multiple of 4"
NEEDS = {"sonicmoe": "pip install git+https://github.com/Dao-AILab/sonic-moe"}
KERNEL = "sonic_moe"
freeze = rivals.freezer(KERNEL, rivals.alternating)


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    if weights.num_experts % 4:
        return f"it counts a multiple of 4 experts, not {weights.num_experts}"
    return rivals.why_not(x_TD, gate_TK, plan, weights, kernel=KERNEL, targets=("sm_90a",))


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    check_sizes(x_TD, gate_TK, plan, weights)
    w_in_EGD, w_out_EDF = rivals.panels(weights, freeze)
    token_T = torch.arange(plan.num_tokens, dtype=torch.int32, device=x_TD.device)
    y_TD, _ = moe_general_routing_inputs(
        x_TD.contiguous(), gate_TK.float().flatten(), token_T.repeat_interleave(plan.num_choices),
        plan.expert_TK().int().flatten(), w_in_EGD.permute(1, 2, 0), None, w_out_EDF.permute(1, 2, 0), None,
        weights.num_experts, torch.cuda.current_stream(x_TD.device).cuda_stream, ActivationType.SWIGLU,
        is_inference_mode_enabled=True,
    )  # fmt: skip
    return y_TD

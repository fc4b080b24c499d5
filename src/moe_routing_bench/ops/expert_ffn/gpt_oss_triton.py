"""Triton's own library triton_kernels, as gpt-oss uses it; GPU, forward. No GPU has run this file.

    pip install "git+https://github.com/triton-lang/triton@v3.7.1#subdirectory=python/triton_kernels"

Its fused activation is that of gpt-oss, with gate and up columns in turn: freeze() stores w_in so.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import OAI_ALPHA, OAI_LIMIT, ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rivals
from moe_routing_bench.ops.expert_ffn.op import check_sizes

FORWARD_ONLY = True
URL = "git+https://github.com/triton-lang/triton@v3.7.1#subdirectory=python/triton_kernels"
NEEDS = {"triton_kernels": f"pip install {URL}"}
KERNEL = "gpt_oss_triton"
freeze = rivals.freezer(KERNEL, rivals.alternating)


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    return rivals.why_not(x_TD, gate_TK, plan, weights, kernel=KERNEL, activation="swiglu_oai", biases=True)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    from triton_kernels.matmul import FusedActivation, matmul
    from triton_kernels.reduce import reduce
    from triton_kernels.specialize import FnSpecs
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata

    check_sizes(x_TD, gate_TK, plan, weights)
    w_in_EGD, w_out_EDF = rivals.panels(weights, freeze)
    b_in, b_out = weights.b_in_EG, weights.b_out_ED
    spans = make_ragged_tensor_metadata(plan.count_E.int(), plan.num_rows)
    swiglu = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
    h_RF = matmul(
        x_TD, w_in_EGD.transpose(1, 2), None if b_in is None else rivals.alternating(b_in).float(),
        a_ragged_metadata=spans, gather_indx=plan.token_R().int(),
        fused_activation=FusedActivation(swiglu, (OAI_ALPHA, OAI_LIMIT)),
    )  # fmt: skip
    y_PD = matmul(
        h_RF, w_out_EDF.transpose(1, 2), None if b_out is None else b_out.float(), a_ragged_metadata=spans,
        scatter_indx=plan.pair_R.int(), gammas=gate_TK.float().flatten()[plan.pair_R],
    )  # fmt: skip
    y_TD, _ = reduce(y_PD.unflatten(0, (plan.num_tokens, plan.num_choices)), dim=1)
    return y_TD

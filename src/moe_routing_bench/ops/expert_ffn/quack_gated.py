"""QuACK: gather, GEMM and SwiGLU in one kernel, the router score in the next, then a sum; with a backward.

Forward, spans as cu_seqlens:
  pre, h = gated(x_TD[token of r] @ w_in)      y_r = score_r * (h_r @ w_out)      y_t = sum of its rows
Backward, with dy_r the row of its token:
  dpre, score * h, dscore = dgated(dy_r @ w_out^T, pre, score)     dw_out = (dy_r)^T (score h), spans as depth
  dx_r = dpre @ w_in^T     dw_in = dpre^T x_r, spans as depth      dx_t = sum of its rows
In the backward pass h_RF, and y_RD without a score, are never written to memory. pre_RG is kept; its gate and
up columns alternate. In a layout without padding QuACK gathers the tokens itself. A padded or block layout is
dispatched first, so that padding is zero and does not change a weight's gradient.

w_in is read as Transformers stores it, output first, without a copy (QuACK's concat_layout). freeze() stores
it so, once; plain weights that are stored input first are copied in every call. The options dispatch and
combine name what moves rows.

It was judged on the CPU with QuACK's own references and compiled for sm_90a and sm_100a. It has not run on a
GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import UNPACK, Form, Frozen
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import quack_calls as quack
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import check_sizes
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.rows import why_not_gates

INSTEAD = "expert_ffn.triton_fused"
KERNEL = "quack_gated"
WHY_NOT_ACTIVATION = {
    "geglu": "QuACK's geglu is the tanh form of GELU, ours the exact one",
    "swiglu_oai": "QuACK's gated GEMM does not clamp swiglu_oai at 7 as gpt-oss does",
}


def parts(*, dispatch: str = "index_select", combine: str = "gather_sum") -> dict[str, Implementation]:
    return {"dispatch": dispatch_op.get(dispatch), "combine": combine_op.get(combine)}


def freeze(weights: ExpertWeights) -> ExpertWeights:
    """Both matrices as QuACK reads them, so that no call copies one."""
    w_in_EDG, w_out_EFD = weights.w_in_EDG.detach(), weights.w_out_EFD.detach()
    return replace(
        weights,
        w_in_EDG=_packed(output_first(w_in_EDG).transpose(1, 2), w_in_EDG, first=True),
        w_out_EFD=_packed(quack.as_stored(w_out_EFD), w_out_EFD, first=False),
    )


def _packed(panels: Tensor, w_EKN: Tensor, *, first: bool) -> Frozen:
    panels = (
        panels.clone()
        if panels.untyped_storage().data_ptr() == w_EKN.untyped_storage().data_ptr()
        else panels
    )
    return Frozen(panels, Form(kernel=KERNEL, size=tuple(w_EKN.shape), dtype=w_EKN.dtype, gated=first))  # type: ignore[arg-type]


def as_read(w_EKN: Tensor) -> Tensor:
    """The matrix inside frozen weights, experts x depth x columns; plain weights as they are."""
    if type(w_EKN) is not Frozen:
        return w_EKN
    return w_EKN.panels.transpose(1, 2) if w_EKN.form.gated else w_EKN.panels


UNPACK[KERNEL] = lambda panels, form: (panels.transpose(1, 2) if form.gated else panels).contiguous()


def unsupported(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, dispatch: str, combine: str
) -> str | None:
    tensors = (gate_TK, plan.pair_R, weights.w_in_EDG)
    if (reason := quack.why_not(INSTEAD, x_TD, *tensors) or quack.why_not_plan(plan)) is not None:
        return reason
    if weights.activation != "swiglu":
        why = WHY_NOT_ACTIVATION.get(weights.activation, "its epilogues here are gated")
        return f"it computes swiglu, not {weights.activation}: {why}; {INSTEAD} does"
    if weights.b_in_EG is not None or weights.b_out_ED is not None:
        return f"it has no biases; {INSTEAD} has"
    for matrix in (weights.w_in_EDG, weights.w_out_EFD):
        if type(matrix) is Frozen and matrix.form.kernel != KERNEL:
            return f"the weights are frozen for {matrix.form.label}"
        if (reason := quack.why_not_matrix(matrix, x_TD.dtype)) is not None:
            return reason
    if (reason := why_not_gates(gate_TK, x_TD.dtype)) is not None:
        return reason
    y_RD = x_TD.new_empty(1, weights.D).expand(plan.num_rows, weights.D)
    for stage, args in (
        (dispatch_op.get(dispatch), (x_TD, plan)),
        (combine_op.get(combine), (y_RD, gate_TK, plan)),
    ):
        if (reason := stage.why_not(*args)) is not None:
            return f"{stage.op}.{stage.label}: {reason}"
    return None


def run(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, dispatch: str, combine: str
) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    moving = parts(dispatch=dispatch, combine=combine)
    return _Gated.apply(x_TD, gate_TK, as_read(weights.w_in_EDG), as_read(weights.w_out_EFD), plan, moving)


def output_first(w_EDG: Tensor) -> Tensor:
    """The matrix stored as [E, G, D], as in Transformers: gate and up are halves of the side that is not
    dense.
    """
    if w_EDG.stride(1) != 1:
        w_EDG = w_EDG.transpose(1, 2).contiguous().transpose(1, 2)
    return quack.as_stored(w_EDG)


def gathered(x: Tensor, plan: RoutingPlan, dispatch: Implementation) -> tuple[Tensor, Tensor | None]:
    """Rows for a GEMM by spans: tokens and the index of each row, or rows with zero padding and no index."""
    if plan.layout.kind != "compact":
        return quack.rows_of(dispatch.run(x, plan)), None
    # rows after the last span hold no pair, and QuACK does not read them
    return quack.rows_of(x), plan.token_R().clamp(min=0).to(torch.int32)


def sum_of_rows(y_RD: Tensor, plan: RoutingPlan, combine: Implementation) -> Tensor:
    ones_TK = torch.ones(plan.row_TK.shape, dtype=torch.float32, device=y_RD.device)
    return combine.run(y_RD, ones_TK, plan)


def score_of_rows(gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    """The gate of the pair in each row, zero where there is none; float32."""
    score_R = gate_TK.reshape(-1).to(torch.float32)[plan.pair_R.clamp(min=0)]
    return torch.where(plan.pair_R >= 0, score_R, 0.0)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, gate_TK: Tensor, w_in_EDG: Tensor, w_out_EFD: Tensor, plan: RoutingPlan,
        moving: dict[str, Implementation],
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.moving = plan, moving
        if not plan.num_rows or not plan.num_tokens:
            ctx.save_for_backward(x_TD, gate_TK, w_in_EDG, w_out_EFD, None)
            return torch.zeros_like(x_TD)
        span_E1, score_R = quack.spans(plan), score_of_rows(gate_TK, plan)
        x, index = gathered(x_TD, plan, moving["dispatch"])
        w_in = output_first(w_in_EDG)
        pre_RG, h_RF = quack.gemm_gated(x, w_in, "swiglu", spans_m=span_E1, index=index)
        y_RD = quack.gemm_scaled(h_RF, quack.as_stored(w_out_EFD), score_R, spans_m=span_E1)
        ctx.save_for_backward(x_TD, gate_TK, w_in_EDG, w_out_EFD, pre_RG)
        return sum_of_rows(y_RD, plan, moving["combine"])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        plan, moving = ctx.plan, ctx.moving
        x_TD, gate_TK, w_in_EDG, w_out_EFD, pre_RG = ctx.saved_tensors
        wants_x, wants_gate, wants_in, wants_out, *_ = ctx.needs_input_grad
        if pre_RG is None:
            zeros = [torch.zeros_like(t) for t in (x_TD, gate_TK, w_in_EDG, w_out_EFD)]
            return *zeros, None, None
        span_E1, score_R = quack.spans(plan), score_of_rows(gate_TK, plan)
        dy, index = gathered(dy_TD, plan, moving["dispatch"])
        w_out = quack.as_stored(w_out_EFD)
        dpre_RG, scaled_RF, dscore_R = quack.gemm_dgated(
            dy, w_out.transpose(1, 2), pre_RG, "swiglu", score_R, spans_m=span_E1, index=index
        )
        dx_TD = dgate_TK = dw_in_EDG = dw_out_EFD = None
        if wants_gate:
            there_TK = plan.row_TK >= 0
            dgate_TK = torch.where(there_TK, dscore_R[plan.row_TK.clamp(min=0)], 0.0).to(gate_TK.dtype)
        if wants_out:
            dw_EDF = quack.gemm(dy.t(), scaled_RF, spans_k=span_E1, index=index)
            dw_out_EFD = dw_EDF.transpose(1, 2)
        if wants_x:
            back = output_first(w_in_EDG).transpose(1, 2)
            dx_RD = quack.gemm(dpre_RG, back, spans_m=span_E1, concatenated=("B",))
            dx_TD = sum_of_rows(dx_RD, plan, moving["combine"])
        if wants_in:
            # the result is split into gate and up, so x is the second operand, and QuACK cannot gather it
            x_RD = quack.rows_of(moving["dispatch"].run(x_TD, plan))
            dw_EGD = quack.gemm(dpre_RG.t(), x_RD, spans_k=span_E1, concatenated=("out",))
            dw_in_EDG = dw_EGD.transpose(1, 2)
        return dx_TD, dgate_TK, dw_in_EDG, dw_out_EFD, None, None

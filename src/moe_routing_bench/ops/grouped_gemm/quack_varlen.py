"""QuACK: one persistent GEMM over all spans (varlen m), weights' gradients over spans as depth (varlen k).

y_RF = gemm(x_RD, w_EDF, cu_seqlens_m);  dx_RD = gemm(dy_RF, w^T, cu_seqlens_m);
dw_EDF = gemm(x_RD^T, dy_RF, cu_seqlens_k). Spans are offset_E1 as int32, computed on the device. Rows after
the last span are not read or written. Weights are read as they are stored, with either side dense.

It was judged on the CPU with QuACK's own references and compiled for sm_90a and sm_100a. It has not run on a
GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import quack_calls as quack


def unsupported(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> str | None:
    if (reason := quack.why_not("grouped_gemm.triton_ragged", x_RD, w_EDF, plan.offset_E1)) is not None:
        return reason
    if (reason := quack.why_not_matrix(w_EDF, x_RD.dtype) or quack.why_not_plan(plan)) is not None:
        return reason
    if b_EF is not None and b_EF.dtype not in (x_RD.dtype, torch.float32):
        return f"biases are float32 or have the rows' dtype {x_RD.dtype}, not {b_EF.dtype}"
    return None


def run(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    y_RF = _Product.apply(x_RD, w_EDF, quack.spans(plan))
    if b_EF is not None:
        # rows that no expert owns read a bias of zero, so that their gradient does not reach b_EF
        b_E1F = torch.cat((b_EF, b_EF.new_zeros(1, b_EF.shape[1])))
        y_RF = y_RF + b_E1F.index_select(0, plan.expert_R()).to(y_RF.dtype)
    return y_RF


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EDF: Tensor, span_E1: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, w_EDF, span_E1)
        return quack.gemm(quack.rows_of(x_RD), quack.as_stored(w_EDF), spans_m=span_E1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w_EDF, span_E1 = ctx.saved_tensors
        wants_x, wants_w, _ = ctx.needs_input_grad
        dy_RF = quack.rows_of(dy_RF)
        dx_RD = dw_EDF = None
        if wants_x:
            dx_RD = quack.gemm(dy_RF, quack.as_stored(w_EDF).transpose(1, 2), spans_m=span_E1)
        if wants_w:
            dw_EDF = quack.gemm(quack.rows_of(x_RD).t(), dy_RF, spans_k=span_E1)
        return dx_RD, dw_EDF, None

"""C++ tiles (AMX or AVX) over (expert, columns). Weights are packed in the cache when they are used; CPU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan

DTYPES = (torch.bfloat16, torch.float32)
SOURCE = Path(__file__).with_name("native.cpp")
WRONG_PLAN = 3  # a return code of mrb_multiply
BATCH_INVARIANT = True
CONFIGS: tuple[dict[str, str], ...] = ({}, {"level": "avx2"})
_multiply_rows = cpp.Function(SOURCE, "mrb_multiply", fields=16)
_gradient = cpp.Function(SOURCE, "mrb_gradient", fields=12)


def unsupported(
    x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None, level: str = ""
) -> str | None:
    dtype = x_RD.dtype
    if dtype not in DTYPES or w_EDF.dtype != dtype:
        return cpp.other_dtypes(dtype, w_EDF.dtype)
    return cpp.unsupported(SOURCE, level, x_RD, w_EDF, plan.offset_E1) or cpp.why_not_cast(dtype)


def run(
    x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None, level: str = ""
) -> Tensor:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_RD, w_EDF, b_EF)):
        return _GroupedGemm.apply(x_RD, w_EDF, b_EF, plan.offset_E1, plan.count_E, level)
    return _multiply(x_RD, w_EDF, b_EF, plan.offset_E1, plan.count_E, level)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        w_EDF: Tensor,
        b_EF: Tensor | None,
        offset_E1: Tensor,
        count_E: Tensor,
        level: str,
    ) -> Tensor:
        ctx.save_for_backward(x_RD, w_EDF, offset_E1, count_E)
        ctx.level = level
        return _multiply(x_RD, w_EDF, b_EF, offset_E1, count_E, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w_EDF, offset_E1, count_E = ctx.saved_tensors
        dx_RD = dw_EDF = db_EF = None
        if ctx.needs_input_grad[0]:
            dx_RD = _multiply(dy_RF, w_EDF.transpose(1, 2), None, offset_E1, count_E, ctx.level)
        if ctx.needs_input_grad[1]:
            dw_EDF = _weight_gradient(x_RD, dy_RF, w_EDF, offset_E1, count_E, ctx.level)
        if ctx.needs_input_grad[2]:
            db_EF = _span_sums(dy_RF, offset_E1)
        return dx_RD, dw_EDF, db_EF, None, None, None


def _multiply(
    x_RD: Tensor, w_EDF: Tensor, b_EF: Tensor | None, offset_E1: Tensor, count_E: Tensor, level: str
) -> Tensor:
    x_RD = _rows(x_RD)
    E, D, columns = w_EDF.shape
    if x_RD.shape[1] != D or count_E.shape[0] != E or (b_EF is not None and b_EF.shape != (E, columns)):
        raise ValueError(
            f"x has width {x_RD.shape[1]} and the plan {count_E.shape[0]} experts; the weights are "
            f"{tuple(w_EDF.shape)}, the biases {None if b_EF is None else tuple(b_EF.shape)}"
        )
    y_RF = recycled.empty(x_RD.shape[0], columns, dtype=x_RD.dtype)
    bias_EF = None if b_EF is None else b_EF.detach().float().contiguous()
    failed = _multiply_rows(
        level, x_RD.data_ptr(), w_EDF.data_ptr(), 0 if bias_EF is None else bias_EF.data_ptr(),
        offset_E1.data_ptr(), count_E.data_ptr(), y_RF.data_ptr(), x_RD.stride(0), x_RD.shape[0], E, D,
        columns, *w_EDF.stride(), torch.get_num_threads(), x_RD.element_size(),
    )  # fmt: skip
    if failed == WRONG_PLAN:
        raise ValueError(
            f"the plan's spans do not fit {x_RD.shape[0]} rows; RoutingPlan.validate() explains it"
        )
    if failed:
        raise MemoryError("no memory for the workspace of grouped_gemm.native")
    return y_RF


def _weight_gradient(
    x_RD: Tensor, dy_RF: Tensor, w_EDF: Tensor, offset_E1: Tensor, count_E: Tensor, level: str
) -> Tensor:
    """The gradient, with the memory order of the weights (output-first or not)."""
    output_first = w_EDF.stride(1) == 1
    upper, lower = (_rows(dy_RF), _rows(x_RD)) if output_first else (_rows(x_RD), _rows(dy_RF))
    E, above, below = w_EDF.shape[0], upper.shape[1], lower.shape[1]
    out = recycled.empty(E, above, below, dtype=x_RD.dtype)
    failed = _gradient(
        level, upper.data_ptr(), lower.data_ptr(), offset_E1.data_ptr(), count_E.data_ptr(), out.data_ptr(),
        upper.stride(0), lower.stride(0), E, above, below, torch.get_num_threads(), x_RD.element_size(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the workspace of grouped_gemm.native")
    return out.transpose(1, 2) if output_first else out


def _span_sums(dy_RF: Tensor, offset_E1: Tensor) -> Tensor:
    spans = pairwise(offset_E1.tolist())
    return torch.stack([dy_RF[begin:end].float().sum(0) for begin, end in spans]).to(dy_RF.dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 and tensor.stride(0) > 0 else tensor.contiguous()

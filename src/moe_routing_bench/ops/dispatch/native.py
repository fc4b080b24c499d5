"""C++ reads each token once and copies it to its rows. Compiled at first use; CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rows

_sum = cpp.Function(rows.DISPATCH, "mrb_sum_rows", fields=10)
unsupported = rows.dispatch_unsupported


def run(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    rows.check_tokens(x_TD, plan)
    row_TK, pair_R = plan.row_TK.contiguous(), plan.pair_R.contiguous()
    if x_TD.requires_grad and torch.is_grad_enabled():
        return _Dispatch.apply(x_TD, row_TK, pair_R, level)
    return _dispatch(x_TD, row_TK, pair_R, level)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.level = level
        return _dispatch(x_TD, row_TK, pair_R, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(dx_RD, row_TK, ctx.level), None, None, None


def _dispatch(x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
    x_RD = recycled.empty(pair_R.shape[0], x_TD.shape[1], dtype=x_TD.dtype)
    return rows.dispatch_into(x_RD, x_TD, row_TK, pair_R, level)


def _sum_rows(dx_RD: Tensor, row_TK: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, dx_RD.shape
    if D > 1 and dx_RD.stride(1) != 1:
        dx_RD = dx_RD.contiguous()
    dx_TD = recycled.empty(T, D, dtype=dx_RD.dtype)
    wrong = _sum(
        level,
        dx_RD.data_ptr(),
        dx_RD.stride(0),
        rows.KINDS[dx_RD.dtype],
        row_TK.data_ptr(),
        T,
        K,
        R,
        D,
        rows.threads_for(dx_RD.nbytes),
        dx_TD.data_ptr(),
    )
    assert not wrong, "row_TK changed since the forward pass"
    return dx_TD

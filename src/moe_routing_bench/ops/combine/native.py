"""Reads, weighs and sums a token's rows in one C++ pass. Compiled at first use; CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rows

BATCH_INVARIANT = True
_spread = cpp.Function(rows.COMBINE, "mrb_combine_backward", fields=16)
unsupported = rows.combine_unsupported


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    rows.check_rows(y_RD, gate_TK, plan)
    row_TK = plan.row_TK.contiguous()
    if (y_RD.requires_grad or gate_TK.requires_grad) and torch.is_grad_enabled():
        return _Combine.apply(y_RD, gate_TK, row_TK, plan.pair_R.contiguous(), level)
    return _combine(y_RD, gate_TK, row_TK, level)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor, level: str
    ) -> Tensor:
        ctx.save_for_backward(y_RD, gate_TK, row_TK, pair_R)
        ctx.level = level
        return _combine(y_RD, gate_TK, row_TK, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        y_RD, gate_TK, row_TK, pair_R = ctx.saved_tensors
        wants_y, wants_gate = ctx.needs_input_grad[:2]
        dy_RD, dgate_TK = _backward(dy_TD, y_RD, gate_TK, row_TK, pair_R, wants_y, wants_gate, ctx.level)
        return dy_RD, dgate_TK, None, None, None


def _combine(y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, level: str) -> Tensor:
    y_TD = recycled.empty(row_TK.shape[0], y_RD.shape[1], dtype=y_RD.dtype)
    return rows.combine_into(y_TD, y_RD, gate_TK, row_TK, level)


def _backward(
    dy_TD: Tensor,
    y_RD: Tensor,
    gate_TK: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    wants_y: bool,
    wants_gate: bool,
    level: str,
) -> tuple[Tensor | None, Tensor | None]:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    if D > 1 and dy_TD.stride(1) != 1:
        dy_TD = dy_TD.contiguous()
    wide_TK = gate_TK.to(torch.float32).contiguous()
    dy_RD = recycled.empty(R, D, dtype=y_RD.dtype) if wants_y else None
    dgate_TK = torch.empty(T, K, dtype=torch.float32) if wants_gate else None
    wrong = _spread(
        level,
        y_RD.data_ptr(),
        y_RD.stride(0),
        rows.KINDS[y_RD.dtype],
        wide_TK.data_ptr(),
        row_TK.data_ptr(),
        T,
        K,
        R,
        D,
        rows.threads_for(R * D * y_RD.element_size()),
        0,
        pair_R.data_ptr(),
        dy_TD.data_ptr(),
        dy_TD.stride(0),
        0 if dy_RD is None else dy_RD.data_ptr(),
        0 if dgate_TK is None else dgate_TK.data_ptr(),
    )
    assert not wrong, "row_TK changed since the forward pass"
    return dy_RD, None if dgate_TK is None else dgate_TK.to(gate_TK.dtype)

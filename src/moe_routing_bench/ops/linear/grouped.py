"""grouped_gemm.native with one expert, which packs the matrix in every call; CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.ops.grouped_gemm import native
from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> str | None:
    if isinstance(w_FD, PackedMatrix):
        return why_not_packed(w_FD, "grouped")
    if not x_TD.is_cpu:
        return f"it runs on the CPU, not on {x_TD.device}"
    return native.unsupported(x_TD, w_FD.detach().t().unsqueeze(0), _plan(0), b_F)


def run(x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None) -> Tensor:
    b_EF = None if b_F is None else b_F.unsqueeze(0)
    return native.run(x_TD, w_FD.t().unsqueeze(0), _plan(len(x_TD)), b_EF)


def _plan(T: int) -> RoutingPlan:
    """All tokens in their order, for one expert."""
    token_T, count_E = torch.arange(T), torch.tensor([T])
    return RoutingPlan(
        row_TK=token_T.unsqueeze(1),
        pair_R=token_T,
        offset_E1=torch.tensor([0, T]),
        count_E=count_E,
        dropped_E=torch.zeros_like(count_E),
        layout=Layout.compact(),
        filled=True,
    )

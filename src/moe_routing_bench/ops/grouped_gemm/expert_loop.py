"""One matmul per expert that has rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

HOST_SYNC = "a Python loop over experts needs their row counts on the host"


def run(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    # the backward of split, unbind and cat is linear in their size; E slices would cost E * R * D
    sizes = plan.offset_E1.diff().tolist()
    tail = plan.num_rows - sum(sizes)
    *parts, tail_rD = x_RD.split([*sizes, tail])
    bias_E = [None] * len(sizes) if b_EF is None else b_EF.unbind(0)
    spans = []
    for x_rD, w_DF, b_F in zip(parts, w_EDF.unbind(0), bias_E, strict=True):
        if x_rD.shape[0]:
            spans.append(x_rD @ w_DF if b_F is None else torch.addmm(b_F, x_rD, w_DF))
    if tail or not spans:
        spans.append(tail_rD.new_zeros(tail, w_EDF.shape[2]))
    return torch.cat(spans)

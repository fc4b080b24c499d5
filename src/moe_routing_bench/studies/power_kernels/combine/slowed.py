"""gather_sum made slower by a known percent: what `mrb doctor --power` lets the benchmark find."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    if not plan.filled or plan.num_rows == 0:
        return "it is made for the power study, where every pair has a row"
    return None


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, percent: int = 0, role: str = "") -> Tensor:
    """role does nothing: a cell refuses the same name twice, and the same code must meet itself."""
    started = perf_counter_ns()
    T, K, D = plan.num_tokens, plan.num_choices, y_RD.shape[1]
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    y_TKD = y_RD.index_select(0, plan.row_TK.flatten()).view(T, K, D).to(wide)
    y_TD = (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)
    until = started + (perf_counter_ns() - started) * (100 + percent) // 100
    while perf_counter_ns() < until:
        pass
    return y_TD

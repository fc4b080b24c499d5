"""A stable sort of the pairs by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.make_plan.op import plan_by_slabs


def run(routing: Routing, layout: Layout) -> RoutingPlan:
    return plan_by_slabs(routing, layout, rank_by_sorting)


def rank_by_sorting(expert_p: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    # int32 keys sort 1.7x faster than int64
    sorted_p, pair_p = expert_p.to(torch.int32).sort(stable=True)
    ids = torch.arange(num_ids + 1, dtype=torch.int32, device=expert_p.device)
    boundary = torch.searchsorted(sorted_p, ids)
    here_p = torch.arange(expert_p.numel(), device=expert_p.device)
    rank_p = torch.empty_like(expert_p)
    rank_p[pair_p] = here_p - boundary[sorted_p]
    return rank_p, boundary.diff()

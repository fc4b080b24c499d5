"""Histogram, prefix sum and rank within the expert, without a sort: the steps of a GPU kernel.

Pairs are divided into tiles of C. A pair's rank is the number of earlier pairs of its expert: the pairs in
earlier tiles (a histogram per tile, summed along the tiles) plus the pairs in its own tile (a C x C
comparison). This is O(C + E / C) per pair, so C grows with the square root of E.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.make_plan.op import plan_by_slabs


def run(routing: Routing, layout: Layout) -> RoutingPlan:
    return plan_by_slabs(routing, layout, rank_by_counting)


def rank_by_counting(expert_p: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    tile = 2 ** max(3, math.ceil(math.log2(math.sqrt(num_ids))))
    num_tiles = -(-expert_p.numel() // tile)
    # the last tile is filled with pairs of no expert, which come after all real pairs
    missing = num_tiles * tile - expert_p.numel()
    expert_tC = F.pad(expert_p, (0, missing), value=num_ids - 1).view(num_tiles, tile)
    histogram_tE = torch.zeros(num_tiles, num_ids, dtype=torch.int64, device=expert_p.device)
    histogram_tE.scatter_add_(1, expert_tC, torch.ones_like(expert_tC))
    earlier_tE = histogram_tE.cumsum(0) - histogram_tE
    narrow_tC = expert_tC.to(torch.int32)
    same_tCC = narrow_tC.unsqueeze(2) == narrow_tC.unsqueeze(1)
    rank_tC = earlier_tE.gather(1, expert_tC) + same_tCC.tril_(-1).sum(2)
    count = histogram_tE.sum(0)
    count[-1] -= missing
    return rank_tC.flatten()[: expert_p.numel()], count

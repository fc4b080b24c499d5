"""How evenly a routing loads its experts and ranks: LoadStatistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing


@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """The shape of a load in numbers, each a 0-dimensional tensor on the routing's device.

    E=4 experts on W=2 ranks (0, 1 | 2, 3), 8 pairs, load_E = [5, 2, 1, 0], mean 2, Layout.block(4):
      active_experts     = 3       experts with at least one pair
      zero_experts       = 1
      max_over_mean      = 2.5     5 / 2
      max_violation      = 1.5     max_over_mean - 1; MaxVio, arXiv:2408.15664
      max_violation_rank = 0.75    ranks hold 7 and 1 pairs, mean 4: 7 / 4 - 1
      cv                 = 0.9354  standard deviation over mean: sqrt((9 + 0 + 1 + 4) / 4) / 2
      gini               = 0.5     sum of (2i - E - 1) x_i over E * total, x ascending from i=1: 16 / 32
      entropy_bits       = 1.2988  of the shares 5/8, 2/8, 1/8; log2(E) if all are equal
      dropped_pairs      = 0       the last three describe the plan, None without one
      padded_rows        = 8       spans of 8 + 4 + 4 + 0 rows hold 8 pairs
      tile_efficiency    = 0.5     pairs over rows in spans

    The load counts the choices, before any are dropped. A routing without pairs is perfectly even:
    max_over_mean and tile_efficiency are 1, zero_experts is E, and all other numbers are 0.
    """

    active_experts: Tensor
    zero_experts: Tensor
    max_over_mean: Tensor
    max_violation: Tensor
    max_violation_rank: Tensor
    cv: Tensor
    gini: Tensor
    entropy_bits: Tensor
    dropped_pairs: Tensor | None
    padded_rows: Tensor | None
    tile_efficiency: Tensor | None

    @staticmethod
    def of(
        routing: Routing,
        plan: RoutingPlan | None = None,
        *,
        num_ranks: int = 1,
        placement: Placement | None = None,
    ) -> LoadStatistics:
        """Does not wait for the device. Without a placement, rank w holds the experts from w * E / W to
        (w + 1) * E / W. Copies of an expert share its pairs equally."""
        E, W = routing.num_experts, num_ranks
        if placement is None and (W < 1 or E % W):
            raise ValueError(
                f"{E} experts cannot be placed on {W} ranks in equal shares; choose a divisor of {E}"
            )
        load_E = routing.load_E()
        load_W = load_E.view(W, E // W).sum(1) if placement is None else placement.load_W(load_E)
        total = load_E.sum()
        any_pair = total > 0
        divisor = total.clamp(min=1).double()
        max_over_mean = _max_over_mean(load_E)
        share_E = load_E / divisor
        # with the mean share 1 / E, the standard deviation over the mean is E times that of the shares
        cv = E * (share_E - 1 / E).square().mean().sqrt()
        place_E = 2 * torch.arange(1, E + 1, device=load_E.device) - E - 1
        active_experts = (load_E > 0).sum()
        dropped_pairs = padded_rows = tile_efficiency = None
        if plan is not None:
            filled, owned = plan.count_E.sum(), plan.offset_E1[-1]
            dropped_pairs = plan.dropped_E.sum()
            padded_rows = owned - filled
            tile_efficiency = torch.where(owned > 0, filled / owned.clamp(min=1).double(), 1.0)
        return LoadStatistics(
            active_experts=active_experts,
            zero_experts=E - active_experts,
            max_over_mean=max_over_mean,
            max_violation=max_over_mean - 1,
            max_violation_rank=_max_over_mean(load_W) - 1,
            cv=torch.where(any_pair, cv, 0.0),
            gini=(place_E * load_E.sort().values).sum() / (E * divisor),
            entropy_bits=torch.special.entr(share_E).sum() / math.log(2),
            dropped_pairs=dropped_pairs,
            padded_rows=padded_rows,
            tile_efficiency=tile_efficiency,
        )

    def to_dict(self) -> dict[str, int | float | None]:
        """Plain numbers, for a record. It reads values on the host."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if value is None else value.item() for name, value in values.items()}


def _max_over_mean(load_N: Tensor) -> Tensor:
    total = load_N.sum()
    return torch.where(total > 0, load_N.max() * load_N.numel() / total.clamp(min=1).double(), 1.0)

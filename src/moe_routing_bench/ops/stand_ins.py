"""Arguments of every operation with the sizes of real ones and no memory: to ask what would run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing


def stand_ins(
    weights: ExpertWeights, K: int, layout: Layout, T: int, *, train: bool = False
) -> dict[str, Any]:
    """By name, what a layer with these weights hands to the operations after its router; gates are float32,
    as routers give them. With `train` the activations want gradients; the weights are as they are."""
    E, D, like = weights.num_experts, weights.D, weights.w_in_EDG
    R = layout.num_rows(T, K, E)

    def one(dtype: torch.dtype, *size: int) -> Tensor:
        """Of two dimensions, one row seen as many; of one, a number."""
        seen = torch.empty((1, *size[1:]), dtype=dtype, device=like.device).expand(size)
        return seen.requires_grad_(train and dtype.is_floating_point)

    gate_TK = one(torch.float32, T, K)
    expert_TK = one(torch.int64, T, K)
    plan = RoutingPlan(
        row_TK=expert_TK,
        pair_R=one(torch.int64, R),
        offset_E1=one(torch.int64, E + 1),
        count_E=one(torch.int64, E),
        dropped_E=one(torch.int64, E),
        layout=layout,
        filled=layout.kind == "compact",
    )
    x_RD = one(like.dtype, R, D)
    return {
        "routing": Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False),
        "layout": layout,
        "x_TD": one(like.dtype, T, D),
        "x_RD": x_RD,
        "y_RD": x_RD,
        "gate_TK": gate_TK,
        "plan": plan,
        "weights": weights,
        # of the two projections the first
        "w_EDF": weights.w_in_EDG,
        "b_EF": weights.b_in_EG,
    }

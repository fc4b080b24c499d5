"""The tiles of the block layout as batched matmuls of equal size, each with its expert's matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

CONFIGS = ({"blocks_at_once": 8}, {"blocks_at_once": 64})


def unsupported(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> str | None:
    if plan.layout.kind != "block":
        return f"it needs the block layout (spans of whole blocks), not {plan.layout}"
    return None


def run(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    *,
    blocks_at_once: int = 16,
) -> Tensor:
    block = plan.layout.block_rows
    assert block is not None and plan.num_rows % block == 0
    num_blocks = plan.num_rows // block
    x_bBD = x_RD.reshape(num_blocks, block, x_RD.shape[1])
    expert_R = plan.expert_R()
    # blocks after the last span belong to no expert; they use the last expert and are then set to zero
    expert_b = expert_R[::block].clamp(max=plan.num_experts - 1)
    tiles = [x_RD.new_zeros(0, block, w_EDF.shape[2])]
    # a copy of the matrix for each block needs memory, so only a few blocks are computed at a time
    for first in range(0, num_blocks, blocks_at_once):
        some_b = expert_b[first : first + blocks_at_once]
        x_sBD = x_bBD[first : first + blocks_at_once]
        w_sDF = w_EDF.index_select(0, some_b)
        if b_EF is None:
            tiles.append(torch.bmm(x_sBD, w_sDF))
        else:
            tiles.append(torch.baddbmm(b_EF.index_select(0, some_b).unsqueeze(1), x_sBD, w_sDF))
    y_RF = torch.cat(tiles).reshape(plan.num_rows, w_EDF.shape[2])
    return torch.where((expert_R < plan.num_experts).unsqueeze(1), y_RF, 0.0)

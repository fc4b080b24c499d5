"""Multiplies every row by its gate, then adds it to its token (scatter-add)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

# a GPU adds in the order its threads arrive; on a CPU the order is fixed
DETERMINISTIC = not torch.cuda.is_available()
BATCH_INVARIANT = DETERMINISTIC


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    y_TD = torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=wide, device=y_RD.device)
    if plan.num_tokens == 0:
        return y_TD.to(y_RD.dtype)
    pair_R, token_R = plan.pair_R.clamp(min=0), plan.token_R().clamp(min=0)
    gate_R1 = gate_TK.to(wide).flatten().index_select(0, pair_R).unsqueeze(1)
    if not plan.filled:
        holds_R1 = (plan.pair_R >= 0).unsqueeze(1)
        y_RD, gate_R1 = torch.where(holds_R1, y_RD, 0.0), torch.where(holds_R1, gate_R1, 0.0)
    return y_TD.index_add(0, token_R, y_RD.to(wide) * gate_R1).to(y_RD.dtype)

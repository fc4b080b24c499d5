"""torch's weighted embedding_bag: the rows are the table, and the choices of a token are a bag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

BATCH_INVARIANT = True


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    if gate_TK.dtype != y_RD.dtype:
        return f"embedding_bag takes one dtype; the rows are {y_RD.dtype} and the gates {gate_TK.dtype}"
    return None


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    row_TK = plan.row_TK
    if plan.filled:
        return F.embedding_bag(row_TK, y_RD, mode="sum", per_sample_weights=gate_TK)
    if plan.num_rows == 0:
        return y_RD.new_zeros(plan.num_tokens, y_RD.shape[1]) + 0 * gate_TK.sum()
    # a pair without a row reads a row of its own token with weight zero, because the row of another token
    # could contain an infinity and a row without a pair could contain anything
    kept_TK = row_TK >= 0
    own_T1 = row_TK.amax(dim=1, keepdim=True)
    read_TK = torch.where(kept_TK, row_TK, own_T1).clamp(min=0)
    y_TD = F.embedding_bag(read_TK, y_RD, mode="sum", per_sample_weights=torch.where(kept_TK, gate_TK, 0.0))
    return torch.where(own_T1 >= 0, y_TD, 0.0)

"""torch.topk on integer keys of score and id: partial selection that follows the tie rule."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.dtypes import FLOATS


def unsupported(score_TE: Tensor, K: int) -> str | None:
    if score_TE.dtype not in FLOATS:
        return f"a {score_TE.dtype} score leaves no room for the expert id in a 64-bit key"
    return None


def run(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    # + 0.0 turns -0.0 into 0.0, because the two are equal; flipping the other bits of negative floats makes
    # their integers sort like the numbers
    bits_TE = (score_TE.detach().float() + 0.0).view(torch.int32)
    sortable_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE).to(torch.int64)
    E = score_TE.shape[-1]
    lower_first_E = torch.arange(E - 1, -1, -1, device=score_TE.device)
    expert_TK = (sortable_TE * 2**32 + lower_first_E).topk(K, dim=-1, sorted=True).indices
    return score_TE.gather(1, expert_TK), expert_TK

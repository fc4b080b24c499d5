"""torch.topk: partial selection; the order of equal scores is not defined."""

from __future__ import annotations

from torch import Tensor

TIES = "any"


def run(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    value_TK, expert_TK = score_TE.topk(K, dim=-1, sorted=True)
    return value_TK, expert_TK

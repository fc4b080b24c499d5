"""A stable sort of every row, which follows the tie rule for any dtype."""

from __future__ import annotations

from torch import Tensor


def run(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    value_TE, expert_TE = score_TE.sort(dim=-1, descending=True, stable=True)
    return value_TE[:, :K], expert_TE[:, :K]

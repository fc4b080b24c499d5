"""topk: the K highest scores of each token.   score_TE, K -> value_TK, expert_TK

Highest first. Of equal scores the one with the lower expert id comes first; an implementation that cannot
promise this says TIES = "any", and then only the values and the validity of the ids are held to the oracle.
Values are exact copies of scores; their gradient goes back to the chosen places alone.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    order_TE = score_TE.sort(dim=-1, descending=True, stable=True).indices
    expert_TK = order_TE[:, :K]
    return score_TE.gather(1, expert_TK), expert_TK


op = Op(__package__, reference, default="sort", stage=1)


def topk(score_TE: Tensor, K: int, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    if not 1 <= K <= score_TE.shape[-1]:
        raise ValueError(f"K={K} choices out of {score_TE.shape[-1]} experts")
    return resolve(op, impl)(score_TE, K)

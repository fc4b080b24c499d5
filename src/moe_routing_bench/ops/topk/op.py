"""topk: the K highest scores of each token.   score_TE, K -> value_TK, expert_TK

The highest comes first. Of equal scores the lower expert id comes first. An implementation that cannot
promise this defines TIES = "any"; then its values must be those of the oracle, and its ids must be valid.
Values are exact copies of scores, and their gradient goes only to the chosen scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_exact, wrong_structure
from moe_routing_bench.core.accuracy import judge as judge_values
from moe_routing_bench.core.cost import INDEX_BYTES, Cost
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    order_TE = score_TE.sort(dim=-1, descending=True, stable=True).indices
    expert_TK = order_TE[:, :K]
    return score_TE.gather(1, expert_TK), expert_TK


def cost(score_TE: Tensor, K: int) -> Cost:
    T = score_TE.shape[0]
    read = score_TE.numel() * score_TE.element_size()
    return Cost(activation_bytes=read + T * K * (score_TE.element_size() + INDEX_BYTES))


def judge(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    if not isinstance(out, tuple) or len(out) != 2:
        return [wrong_structure("must return (value_TK, expert_TK)")]
    (value_TK, expert_TK), (best_TK, best_expert_TK) = out, expected.baseline
    values = judge_exact(value_TK, best_TK).of("value_TK")
    if expected.ties == "lower id first" or not values.passed:
        return [values, judge_exact(expert_TK, best_expert_TK).of("expert_TK")]
    in_range = expert_TK.shape == best_expert_TK.shape and expert_TK.dtype == torch.int64
    if not in_range or bool(((expert_TK < 0) | (expert_TK >= args["score_TE"].shape[1])).any()):
        return [wrong_structure("expert_TK: must be int64 ids of experts, one for each value")]
    if bool((expert_TK.sort(dim=1).values.diff(dim=1) == 0).any()):
        return [wrong_structure("expert_TK: a token chose the same expert twice")]
    reached_TK = args["score_TE"].gather(1, expert_TK)
    return [values, judge_exact(reached_TK, best_TK).of("score_TE at expert_TK")]


def judge_gradient(of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
    # judged with its own ids, which were judged before, because it may choose another of two equal scores
    oracle = torch.zeros_like(expected.oracle).scatter(1, of.out[1], of.d_out)
    return [judge_values(gradient, oracle, expected.baseline, expected.more(gradient.numel()))]


op = Op(
    __package__,
    reference,
    cost=cost,
    judge=judge,
    exact=True,
    judge_gradient=judge_gradient,
    default="sort",
    stage=1,
)


def topk(score_TE: Tensor, K: int, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Find the K highest scores of each token, highest first.

    >>> value_TK, expert_TK = mrb.topk(torch.tensor([[0.1, 0.5, 0.4]]), 2)
    >>> expert_TK.tolist()
    [[1, 2]]
    """
    if not 1 <= K <= score_TE.shape[-1]:
        raise ValueError(f"K={K} choices out of {score_TE.shape[-1]} experts")
    return resolve(op, impl)(score_TE, K)

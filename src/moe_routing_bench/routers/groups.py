"""Group-limited choice: neighbouring experts form groups, and a token may use only a few groups.

    experts 0 .. E/groups - 1 are group 0, and so on: a group is a device or a node of expert parallelism
    a named rule computes a group's score from its experts' scores; the `keep` groups with the highest are
    kept

    "max"        score of the best expert            DeepSeek-V2; vLLM if there is no bias
    "top2_sum"   sum of the two best                 DeepSeek-V3's code, Transformers, torchtitan, llama.cpp
    "topk_sum"   sum of the K // keep best           DeepSeek-V3's paper (K = 8, keep = 4: top2_sum), Megatron

Of groups with equal scores the lower one is kept. Experts of other groups get -inf, so they cannot be chosen.
DeepSeek-V2's code and Transformers' copy set them to 0, which is higher than a negative score + bias.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_routing_bench.core.names import one_of
from moe_routing_bench.ops.score_topk.op import GROUP_SCORES, ScoreRule
from moe_routing_bench.ops.score_topk.op import limit_to_groups as limit_by_best

RULES = ("max", "top2_sum", "topk_sum")


def check_groups(E: int, K: int, groups: int, keep: int, rule: str) -> None:
    """Raises ValueError if E experts cannot be limited like this."""
    one_of("group_score", rule, RULES)
    if groups < 1 or E % groups:
        raise ValueError(f"groups={groups} must divide the E={E} experts into equal groups")
    if not 1 <= keep <= groups:
        raise ValueError(f"keep_groups={keep} must be from 1 to groups={groups}")
    size = E // groups
    if keep * size < K:
        raise ValueError(f"{keep} groups of {size} experts cannot give K={K} choices; raise keep_groups")
    if keep == groups:
        return
    if rule == "top2_sum" and size < 2:
        raise ValueError("group_score 'top2_sum' needs groups of at least 2 experts; use 'max'")
    if rule == "topk_sum" and K < keep:
        raise ValueError(f"group_score 'topk_sum' needs K >= keep_groups, not K={K} and {keep}; use 'max'")


def limit_to_groups(score_TE: Tensor, K: int, groups: int, keep: int, rule: str) -> Tensor:
    """score_TE with -inf for the experts outside a token's `keep` best groups.

    groups=2, keep=1, rule="max":      [.5, .1, .4, .4] -> [.5, .1, -inf, -inf]
    groups=2, keep=1, rule="top2_sum": [.5, .1, .4, .4] -> [-inf, -inf, .4, .4]
    """
    num_best = {"max": 1, "top2_sum": 2, "topk_sum": K // keep}[rule]
    return limit_by_best(score_TE, score_TE, groups, keep, num_best)


def score_rule(groups: int, keep: int, rule: str, **others: Any) -> ScoreRule:
    """The rule of op score_topk for these groups, for a router with the option fused. Raises ValueError if
    there is none."""
    if keep == groups:
        rule = "max"  # no group is excluded, so the score of a group has no effect
    if rule not in GROUP_SCORES:
        raise ValueError(
            f"fused has the group_score {' and '.join(GROUP_SCORES)}, not {rule!r}; choose one of them "
            "('topk_sum' with K // keep_groups = 2 is 'top2_sum') or leave fused out"
        )
    return ScoreRule(groups=groups, keep_groups=keep, group_score=rule, **others)

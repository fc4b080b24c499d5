"""score_topk: choose K experts from logits and weigh them.   logits_TE, bias_E, K, rule -> gate_TK, expert_TK

    s = softmax(z) | sigmoid(z) | sqrt(log(1 + exp(z)))         z = logits, taken in at least float32
    chosen: the K largest s + bias of the rule's best groups, highest first, of equal ones the lower id
    gate_k = scale * s_k                     renormalise: scale * s_k / sum_j s_j, as softmax(log s)

Softmax without a bias chooses by z, which has the same order but no ties where s underflows. bias_E affects
the choice and not the gates, and it gets no gradient. Gates are at least float32. Routers call this after
their projection: softmax_topk, group_limited and sigmoid_bias differ only in their rules.

Two implementations may choose differently if s + bias differs only by rounding. Then the gates are judged for
the chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core import position_invariant as steady
from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_exact, wrong_structure
from moe_routing_bench.core.accuracy import judge as judge_values
from moe_routing_bench.core.cost import INDEX_BYTES, Cost
from moe_routing_bench.core.names import one_of
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("max", "top2_sum")
# below this, log(softplus(z)) = z to the last bit of float64
SOFTPLUS_IS_EXP = -40.0


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """How logits become choices and gates.

    ScoreRule() is Mixtral's and Qwen3's; DeepSeek-V3's is
    ScoreRule(score="sigmoid", scale=2.5, groups=8, keep_groups=4, group_score="top2_sum"), with a bias.
    Logits [2, 1, 0, 0] of 4 experts, K = 2:
      ScoreRule()                              experts [0, 1]   gates [.731, .269]
      ScoreRule(renormalise=False)             experts [0, 1]   gates [.610, .225]
      ScoreRule(score="sigmoid")               experts [0, 1]   gates [.546, .454]
    """

    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1  # groups of neighbouring experts: 0 .. E / groups - 1 are group 0
    keep_groups: int = 1  # how many of its best groups a token may use; of equal groups the lower is better
    group_score: str = "max"  # the largest s + bias of its experts, or "top2_sum" of the two largest

    def __post_init__(self) -> None:
        one_of("score", self.score, SCORES)
        one_of("group_score", self.group_score, GROUP_SCORES)
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, not {self.scale}")
        if not 1 <= self.keep_groups <= self.groups:
            raise ValueError(f"keep_groups={self.keep_groups} must be from 1 to groups={self.groups}")

    def check(self, E: int, K: int) -> None:
        """Raises ValueError if E experts and K choices cannot follow this rule."""
        if E % self.groups:
            raise ValueError(f"groups={self.groups} must divide the E={E} experts into equal groups")
        size = E // self.groups
        if not 1 <= K <= self.keep_groups * size:
            raise ValueError(f"{self.keep_groups} groups of {size} experts cannot give K={K} choices")
        if self.keep_groups < self.groups and self.group_score == "top2_sum" and size < 2:
            raise ValueError("group_score 'top2_sum' needs groups of at least 2 experts; use 'max'")


PLAIN = ScoreRule()


def reference(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    choice_TE = choice_scores(logits_TE.detach(), bias_E, rule)
    expert_TK = choice_TE.sort(dim=1, descending=True, stable=True).indices[:, :K]
    return gates_of(logits_TE, expert_TK, rule), expert_TK


def cost(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule) -> Cost:
    """The bytes of logits read and of gates and ids written; scores need no memory. Exponentials do not
    count, because roofs are measured with multiplications."""
    T, size = logits_TE.shape[0], logits_TE.element_size()
    read = logits_TE.numel() * size + (0 if bias_E is None else bias_E.numel() * bias_E.element_size())
    return Cost(activation_bytes=read + T * K * (max(size, 4) + INDEX_BYTES))


def judge(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    """Ids must be those of the oracle, except where scores differ only by rounding; gates must fit the
    ids."""
    if not isinstance(out, tuple) or len(out) != 2:
        return [wrong_structure("must return (gate_TK, expert_TK)")]
    (gate_TK, expert_TK), logits_TE, rule = out, args["logits_TE"], args["rule"]
    choices = _judge_choices(expert_TK, expected.oracle[1], logits_TE, args["bias_E"], rule)
    if not choices.passed:
        return [choices]
    oracle, baseline = gates_of(logits_TE.double(), expert_TK, rule), gates_of(logits_TE, expert_TK, rule)
    more = [(other[0], plain[0]) for other, plain in expected.more(gate_TK.numel())]
    return [judge_values(gate_TK, oracle, baseline, more).of("gate_TK")]


def _judge_choices(
    expert_TK: Any, best_TK: Tensor, logits_TE: Tensor, bias_E: Tensor | None, rule: ScoreRule
) -> Verdict:
    verdict = judge_exact(expert_TK, best_TK)
    if verdict.passed:
        return verdict
    wrong = wrong_structure(f"expert_TK: {verdict.sentence}")
    if verdict.fault != "value":
        return wrong
    choice_TE = choice_scores(logits_TE.double(), bias_E, rule)
    in_range = bool(((expert_TK >= 0) & (expert_TK < choice_TE.shape[1])).all())
    if not in_range or bool((expert_TK.sort(dim=1).values.diff(dim=1) == 0).any()):
        return wrong
    reached_TK = choice_TE.gather(1, best_TK)
    lost_TK = (choice_TE.gather(1, expert_TK) - reached_TK).abs()
    # a few float32 roundings are allowed; exact ties must follow the rule; -inf outside the best groups fails
    rounding_TK = 8 * torch.finfo(torch.float32).eps * (1 + reached_TK.abs())
    close_TK = (lost_TK > 0) & (lost_TK <= rounding_TK)
    return Verdict(passed=True) if bool((close_TK | (expert_TK == best_TK)).all()) else wrong


def judge_gradient(of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
    oracle, baseline = expected.oracle, expected.baseline
    if of.name == "logits_TE":  # the gates of the ids that were chosen
        oracle, baseline = (_logits_gradient(of, wide) for wide in (True, False))
    return [judge_values(gradient, oracle, baseline, expected.more(gradient.numel()))]


def _logits_gradient(of: GradientOf, wide: bool) -> Tensor:
    logits_TE = of.args["logits_TE"].detach()
    logits_TE = (logits_TE.double() if wide else logits_TE.clone()).requires_grad_()
    with torch.enable_grad():
        gate_TK = gates_of(logits_TE, of.out[1], of.args["rule"])
        return torch.autograd.grad(gate_TK, logits_TE, of.d_out.to(gate_TK.dtype))[0]


op = Op(
    __package__,
    reference,
    cost=cost,
    judge=judge,
    judge_gradient=judge_gradient,
    default="eager",
    stage=1,
    by_token=lambda out, args: out,
)


def score_topk(
    logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule = PLAIN, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    rule.check(logits_TE.shape[1], K)
    return resolve(op, impl)(logits_TE, bias_E, K, rule)


def choice_scores(logits_TE: Tensor, bias_E: Tensor | None, rule: ScoreRule) -> Tensor:
    """The scores by which experts are chosen; -inf outside a token's best groups."""
    z_TE = _wide(logits_TE)
    score_TE = plain_score(z_TE, rule.score)
    if bias_E is not None:
        score_TE = score_TE + bias_E.detach().to(score_TE.dtype)
    choice_TE = z_TE if rule.score == "softmax" and bias_E is None else score_TE
    num_best = 1 if rule.group_score == "max" else 2
    return limit_to_groups(choice_TE, score_TE, rule.groups, rule.keep_groups, num_best)


def limit_to_groups(choice_TE: Tensor, score_TE: Tensor, groups: int, keep: int, num_best: int) -> Tensor:
    """choice_TE with -inf for the experts outside a token's `keep` best groups. A group's score is the sum of
    its `num_best` largest scores; of groups with equal scores the lower is kept.

    choice = score = [.5, .1, .4, .4], groups=2, keep=1
      num_best=1   [.5, .1, -inf, -inf]
      num_best=2   [-inf, -inf, .4, .4]
    """
    if keep == groups:
        return choice_TE
    group_score = score_TE.unflatten(1, (groups, -1)).topk(num_best, dim=2).values.sum(2)
    kept = group_score.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    stays = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, kept, True)
    return torch.where(stays.unsqueeze(2), choice_TE.unflatten(1, (groups, -1)), float("-inf")).flatten(1)


def gates_of(logits_TE: Tensor, expert_TK: Tensor, rule: ScoreRule) -> Tensor:
    """The gates of the given experts; differentiable."""
    log_TK = log_score(_wide(logits_TE), rule.score).gather(1, expert_TK)
    return rule.scale * (log_TK.softmax(-1) if rule.renormalise else log_TK.exp())


def plain_score(z_TE: Tensor, score: str) -> Tensor:
    """s as published models compute it. Its gradient may be infinite."""
    if score == "sigmoid":
        return steady.sigmoid(z_TE)
    return steady.softplus(z_TE).sqrt() if score == "sqrtsoftplus" else z_TE.softmax(-1)


def log_score(z_TE: Tensor, score: str) -> Tensor:
    """log s, finite with a finite gradient for every z."""
    if score == "sigmoid":
        return F.logsigmoid(z_TE)
    if score == "softmax":
        return z_TE.log_softmax(-1)
    log_TE = steady.softplus(z_TE.clamp_min(SOFTPLUS_IS_EXP)).log()
    return 0.5 * torch.where(z_TE < SOFTPLUS_IS_EXP, z_TE, log_TE)


def _wide(logits_TE: Tensor) -> Tensor:
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))

"""combine: y_t = sum over k of gate_tk * row(t, k).   y_RD, gate_TK, plan -> y_TD

Pairs without a row add nothing. gate_TK is float32 or has the dtype of y_RD. Products and sums are computed
in at least float32 and rounded once. Rows without a pair may contain anything, even NaN: they are not read
and their gradient is zero. The gradient of a gate whose pair has no row is also zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_result
from moe_routing_bench.core.accuracy import judge as judge_values
from moe_routing_bench.core.cost import INDEX_BYTES, Cost, counts
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(torch.promote_types(y_RD.dtype, gate_TK.dtype), torch.float32)
    y_TD = torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=wide, device=y_RD.device)
    if not plan.num_rows:
        return (y_TD + 0 * torch.where(plan.row_TK >= 0, gate_TK, 0.0).sum()).to(y_RD.dtype)
    for row_T, gate_T in zip(plan.row_TK.unbind(1), gate_TK.unbind(1), strict=True):
        # if a pair has no row, its gate and the row that is read instead must not be used
        there_T1 = (row_T >= 0).unsqueeze(1)
        row_TD = torch.where(there_T1, y_RD[row_T.clamp(min=0)].to(wide), 0.0)
        y_TD = y_TD + torch.where(there_T1, gate_T.unsqueeze(1).to(wide), 0.0) * row_TD
    return y_TD.to(y_RD.dtype)


def cost(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Cost:
    pairs, _, _ = counts(plan)
    T, K, D = plan.num_tokens, plan.num_choices, y_RD.shape[1]
    rows = (pairs + T) * D * y_RD.element_size()
    return Cost(
        useful_flops=2 * pairs * D,
        executed_flops=2 * pairs * D,
        activation_bytes=rows + T * K * (gate_TK.element_size() + INDEX_BYTES),
    )


def judge(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    """Checks the values, and that tokens without a row are exactly zero. expert_ffn uses it too."""
    (verdict,) = judge_result(out, expected, args)
    wrong = [verdict.of("y_TD")]
    if verdict.fault in ("structure", "shape", "dtype"):
        return wrong
    alone_T = (args["plan"].row_TK < 0).all(dim=1)
    if bool((out[alone_T] != 0).any()):
        alone = alone_T.nonzero().flatten().tolist()[:20]
        sentence = f"y_TD: tokens {alone} have no row but are not exactly zero"
        wrong.append(Verdict(passed=False, fault="value", sentence=sentence))
    return wrong


def judge_rows(of: GradientOf, gradient: Tensor, expected: Expected, *, rows: str) -> list[Verdict]:
    """Judges a gradient. rows: the argument that holds the rows, also rows without a pair."""
    more = expected.more(gradient.numel())
    if of.name != rows:
        return [judge_values(gradient, expected.oracle, expected.baseline, more)]
    holds_R = of.args["plan"].pair_R >= 0
    wrong = [judge_values(gradient[holds_R], expected.oracle[holds_R], expected.baseline[holds_R], more)]
    if bool((gradient[~holds_R] != 0).any()):
        sentence = "rows without a pair are not exactly zero"
        wrong.append(Verdict(passed=False, fault="value", sentence=sentence))
    return wrong


op = Op(
    __package__, reference, cost=cost, judge=judge, judge_gradient=partial(judge_rows, rows="y_RD"),
    default="gather_sum",
    by_token=lambda out, args: out, stage=5,
)  # fmt: skip


def combine(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, *, impl: str = "auto") -> Tensor:
    """Add up the rows of each token, each row times its gate.

    >>> routing = mrb.Routing(expert_TK=torch.tensor([[1], [0]]), gate_TK=torch.ones(2, 1), num_experts=2)
    >>> plan = mrb.make_plan(routing, mrb.Layout.compact())  # token 0 has row 1, token 1 has row 0
    >>> mrb.combine(torch.tensor([[20.0], [10.0]]), torch.tensor([[0.5], [1.0]]), plan).tolist()
    [[5.0], [20.0]]
    """
    return resolve(op, impl)(y_RD, gate_TK, plan)

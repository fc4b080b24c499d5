"""grouped_gemm: each expert's rows times its matrix.   x_RD, w_EDF, plan, b_EF -> y_RF

Row r of expert e's span is x_r @ w_e (+ b_e), summed in at least float32. In padding rows inside a span the
result may be any finite number. In rows that no expert owns, results and gradients may be anything; the
incoming gradient may be NaN there and must not reach w_EDF or b_EF. "D" and "F" are the inputs and outputs of
either projection. w_EDF may be a transposed view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.core.accuracy import judge as judge_values
from moe_routing_bench.core.cost import Cost, counts
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    offset = plan.offset_E1.tolist()
    w_E = w_EDF.unbind(0)  # has one gradient; w_EDF[e] would have a gradient of all of w for every expert
    spans = []
    for e in range(plan.num_experts):
        y_rF = x_RD[offset[e] : offset[e + 1]] @ w_E[e].to(x_RD.dtype)
        spans.append(y_rF if b_EF is None else y_rF + b_EF[e])
    spans.append(x_RD.new_zeros(plan.num_rows - offset[-1], w_EDF.shape[2]))
    return torch.cat(spans)


def cost(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Cost:
    _, D, F = w_EDF.shape
    pairs, owned, active = counts(plan)
    size = x_RD.element_size()
    bias = 0 if b_EF is None else active * F * size
    return Cost(
        useful_flops=2 * D * F * pairs,
        executed_flops=2 * D * F * owned,
        weight_bytes=active * D * F * w_EDF.element_size() + bias,
        activation_bytes=pairs * (D + F) * size,
    )


def judge(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    """Checks the rows that hold a pair. Padding inside a span must be finite."""
    oracle, baseline, plan = expected.oracle, expected.baseline, args["plan"]
    if not isinstance(out, Tensor) or out.shape != baseline.shape:
        return [judge_values(out, oracle, baseline)]
    holds_R, owned_R = plan.pair_R >= 0, plan.expert_R() < plan.num_experts
    if not bool(out[owned_R & ~holds_R].isfinite().all()):
        sentence = "y_RF: padding rows inside a span are not finite, which makes the weights' gradient wrong"
        return [Verdict(passed=False, fault="nonfinite", sentence=sentence)]
    more = expected.more(out.numel())
    return [judge_values(out[holds_R], oracle[holds_R], baseline[holds_R], more).of("y_RF")]


def judge_gradient(of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
    oracle, baseline, more = expected.oracle, expected.baseline, expected.more(gradient.numel())
    if of.name == "x_RD":
        holds_R = of.args["plan"].pair_R >= 0
        gradient, oracle, baseline = gradient[holds_R], oracle[holds_R], baseline[holds_R]
    return [judge_values(gradient, oracle, baseline, more)]


def upstream(d_out: Tensor, args: Mapping[str, Any]) -> Tensor:
    """The gradient as combine and the activation give it: zero for padding, NaN in rows of no expert."""
    plan = args["plan"]
    d_out = torch.where((plan.pair_R >= 0).unsqueeze(1), d_out, 0.0)
    return torch.where((plan.expert_R() < plan.num_experts).unsqueeze(1), d_out, float("nan"))


def meaningful(out: Tensor, args: Mapping[str, Any]) -> Tensor:
    return out[args["plan"].pair_R >= 0]


op = Op(
    __package__, reference, cost=cost, judge=judge, judge_gradient=judge_gradient, upstream=upstream,
    meaningful=meaningful, by_token=lambda out, args: out[args["plan"].row_TK],
    weights="w_EDF", default="expert_loop", stage=4,
)  # fmt: skip


def grouped_gemm(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Multiply the rows of each expert by its own matrix.

    >>> routing = mrb.Routing(expert_TK=torch.tensor([[1], [0]]), gate_TK=torch.ones(2, 1), num_experts=2)
    >>> plan = mrb.make_plan(routing, mrb.Layout.compact())  # row 0 is expert 0's, row 1 expert 1's
    >>> mrb.grouped_gemm(torch.ones(2, 1), torch.tensor([[[2.0]], [[3.0]]]), plan).tolist()
    [[2.0], [3.0]]
    """
    return resolve(op, impl)(x_RD, w_EDF, plan, b_EF)

"""ep_combine: bring the experts' rows back and sum them.   y_QD, gate_TK, plan, traffic -> y_TD

y_t = sum over k of gate_tk * row(t, k), as in combine. The row of a pair comes from the rank that computed
it. `plan` and `traffic` are the same as in ep_dispatch. Rows without a pair may contain anything, even NaN,
and their gradient is zero.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.combine.op import cost as cost_of_sums
from moe_routing_bench.ops.combine.op import judge, judge_rows
from moe_routing_bench.ops.combine.op import reference as sums
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.parallel.traffic import Traffic


def reference(y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic) -> Tensor:
    """The result for a single rank."""
    if traffic.group is not None:
        raise NotImplementedError("the reference has only the rows of one rank")
    return sums(y_QD, gate_TK, plan)


def cost(y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic) -> Cost:
    return cost_of_sums(y_QD, gate_TK, plan)


op = Op(
    __package__, reference, cost=cost, judge=judge, judge_gradient=partial(judge_rows, rows="y_QD"),
    default="all_to_all", stage=5,
)  # fmt: skip


def ep_combine(
    y_QD: Tensor, gate_TK: Tensor, plan: RoutingPlan, traffic: Traffic, *, impl: str = "auto"
) -> Tensor:
    return resolve(op, impl)(y_QD, gate_TK, plan, traffic)

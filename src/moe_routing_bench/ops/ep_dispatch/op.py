"""ep_dispatch: send each token to the ranks of its experts.   x_TD, plan, traffic -> x_QD

`plan` is over the slots of all ranks, `traffic` says how many rows go where. Row q is an exact copy of the
token of a pair of this or another rank, or zero if it holds no pair. Every rank of the group makes the call,
also one without tokens. The gradient of a token is the sum over its rows, wherever they went: that is
ep_combine with gates of 1. The incoming gradient of rows without a pair may be NaN and is ignored.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.dispatch.op import cost as cost_of_copies
from moe_routing_bench.ops.dispatch.op import judge, upstream
from moe_routing_bench.ops.dispatch.op import reference as copies
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.parallel.traffic import Traffic


def reference(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic) -> Tensor:
    """Of a single rank. What several must get, `tests/parallel` computes from the inputs of all of them."""
    if traffic.group is not None:
        raise NotImplementedError("the reference sees the tokens of one rank alone")
    return copies(x_TD, plan)


def cost(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic) -> Cost:
    return cost_of_copies(x_TD, plan)


op = Op(
    __package__, reference, cost=cost, judge=judge, exact=True, upstream=upstream, default="all_to_all",
    stage=3,
)  # fmt: skip


def ep_dispatch(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, impl: str = "auto") -> Tensor:
    return resolve(op, impl)(x_TD, plan, traffic)

"""ep_dispatch: send each token to the ranks of its experts.   x_TD, plan, traffic -> x_QD

`plan` is over the slots of all ranks, and `traffic` says how many rows go to each rank. Row q is an exact
copy of the token of a pair from any rank, or zero if it holds no pair. Every rank of the group must make the
call, even without tokens. The gradient of a token is the sum over its rows on all ranks, which is ep_combine
with gates of 1. The incoming gradient of rows without a pair may be NaN; it is ignored.
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
    """The result for a single rank. `tests/parallel` computes the results of several from all their
    inputs."""
    if traffic.group is not None:
        raise NotImplementedError("the reference has only the tokens of one rank")
    return copies(x_TD, plan)


def cost(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic) -> Cost:
    return cost_of_copies(x_TD, plan)


op = Op(
    __package__, reference, cost=cost, judge=judge, exact=True, upstream=upstream, default="all_to_all",
    stage=3,
)  # fmt: skip


def ep_dispatch(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, impl: str = "auto") -> Tensor:
    return resolve(op, impl)(x_TD, plan, traffic)

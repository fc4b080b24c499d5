"""Every rank gets every token, then selects its rows. For few ranks, where most tokens go to all ranks."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.hops import (
    DISPATCHES,
    all_tokens,
    by_gathering,
    dispatch_parts,
    tokens_unsupported,
)
from moe_routing_bench.parallel.traffic import Traffic, tie

CONFIGS, parts, unsupported = DISPATCHES, dispatch_parts, tokens_unsupported


def run(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> Tensor:
    copy = dispatch_op.get(dispatch).run
    if traffic.group is None:
        return tie(copy(x_TD, plan), x_TD)
    arrived, x_ND = by_gathering(plan, traffic), all_tokens(x_TD, traffic)
    return tie(copy(x_ND, arrived)[: sum(traffic.received)], x_ND)

"""Shared by the transports of ep_dispatch and ep_combine: rows move by a plan, in one hop or in several."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.faults import watched
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import Traffic, Way, gather, on_host, swap, tie

INDEX = torch.int32  # the dtype of numbers that are sent with rows
# configurations for tuners: the implementation of dispatch or combine on each rank
DISPATCHES: tuple[dict[str, str], ...] = ({}, {"dispatch": "native"})
COMBINES: tuple[dict[str, str], ...] = ({}, {"combine": "native"})


def dispatch_parts(*, dispatch: str = "index_select") -> dict[str, Implementation]:
    return {"dispatch": dispatch_op.get(dispatch)}


def combine_parts(*, combine: str = "gather_sum") -> dict[str, Implementation]:
    return {"combine": combine_op.get(combine)}


def tokens_unsupported(x_TD: Tensor, plan: RoutingPlan, traffic: Traffic, *, dispatch: str) -> str | None:
    """`unsupported` of an ep_dispatch that sends tokens, not pairs."""
    return uneven(plan, traffic) or dispatch_op.get(dispatch).why_not(x_TD, plan)


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Rows of `plan`, whose experts are the ranks of a group, and the exchange that moves them."""

    plan: RoutingPlan
    way: Way

    def there(self, x_TD: Tensor, dispatch: str = "index_select") -> Tensor:
        x_RD = tie(dispatch_op.get(dispatch).run(x_TD, self.plan), x_TD)
        # rows after the last span belong to no rank, because R depends only on the sizes
        return swap(x_RD[: sum(self.way.send)], self.way)

    def numbers_there(self, number_TN: Tensor) -> Tensor:
        """Sends whole numbers that belong to tokens; rows without a token get -1."""
        token_R = self.plan.token_R()[: sum(self.way.send)]
        none_1N = number_TN.new_full((1, number_TN.shape[1]), -1)
        return swap(torch.cat([none_1N, number_TN])[token_R + 1].to(INDEX), self.way).long()

    def back(self, y_QD: Tensor, gate_TK: Tensor | None, combine: str) -> Tensor:
        """Sends rows back and returns the weighted sum over each token's rows; without gates they are 1."""
        plan, y_RD = self.plan, swap(y_QD, self.way.back)
        if missing := plan.num_rows - y_RD.shape[0]:
            # rows of no rank were not sent, and nothing reads them
            y_RD = torch.cat([y_RD, y_RD.new_zeros(missing, y_RD.shape[1])])
        if gate_TK is None:
            gate_TK = torch.ones(plan.row_TK.shape, device=y_RD.device)
        return tie(tie(combine_op.get(combine).run(y_RD, gate_TK, plan), y_RD), gate_TK)


def rows_back(y_QD: Tensor, plan: RoutingPlan, traffic: Traffic) -> Tensor:
    """A stand-in for the rows that come back: y_QD itself on a single rank, else contiguous rows."""
    alone = traffic.group is None
    return y_QD if alone else y_QD.new_empty(1, y_QD.shape[1]).expand(plan.num_rows, y_QD.shape[1])


@dataclass(frozen=True, kw_only=True)
class Route:
    """The hops of a token, and the plan that makes x_QD from the tokens that arrived."""

    hops: tuple[Hop, ...]
    arrived: RoutingPlan


def by_nodes(plan: RoutingPlan, traffic: Traffic) -> Route:
    """A route in two hops. First a token is sent once to each node it needs, to the rank with this rank's
    place there. That rank sends it to each rank of the node that needs it. All ranks make the route together,
    once for each traffic."""
    if (kept := traffic.kept.get("by_nodes")) is not None:
        assert isinstance(kept, Route)
        return kept
    ranks = traffic.ranks
    assert ranks is not None
    P, L, M = ranks.places, ranks.placement.ranks_per_node, ranks.placement.num_nodes
    with watched(ranks, "making the groups of a node and of a rail", traffic.split_WW):
        rail, node = ranks.rail, ranks.node
    C = capacity_of(plan, ranks)
    slot_TK = plan.expert_TK()
    node_TM = _wanted(slot_TK, P * L, M)
    # a token is sent once to a node, even if several of its pairs are there
    to_nodes = _hop(node_TM, traffic, rail, None if C is None else min(plan.num_tokens, L * P * C))
    slot_NK = to_nodes.numbers_there(slot_TK)
    own_node = ranks.rank // L
    local_NK = torch.where((slot_NK >= 0) & (slot_NK // (P * L) == own_node), slot_NK % (P * L), -1)
    most = None if C is None else min(local_NK.shape[0], M * P * C)
    to_ranks = _hop(_wanted(local_NK, P, L), traffic, node, most)
    source_N = _source(to_nodes.way, local_NK) * L + ranks.rank % L
    arrived = to_ranks.numbers_there(torch.cat([source_N.unsqueeze(1), local_NK], 1))
    here_NK = torch.where(arrived[:, 1:] // P == ranks.rank % L, arrived[:, 1:], -1)
    plan_here = _arrived(here_NK % P, here_NK >= 0, arrived[:, :1], ranks, C)
    route = Route(hops=(to_nodes, to_ranks), arrived=plan_here)
    traffic.kept["by_nodes"] = route
    return route


def by_gathering(plan: RoutingPlan, traffic: Traffic) -> RoutingPlan:
    """The plan over the result of `all_tokens`. All ranks make it together, once for each traffic."""
    if (kept := traffic.kept.get("by_gathering")) is not None:
        assert isinstance(kept, RoutingPlan)
        return kept
    ranks = traffic.ranks
    assert ranks is not None
    P, most = ranks.places, max(traffic.tokens)
    slot_WTK = all_tokens(plan.expert_TK().to(INDEX) + 1, traffic).long() - 1
    source_N = torch.arange(ranks.num_ranks, device=slot_WTK.device).repeat_interleave(most)
    here_NK = (slot_WTK >= 0) & (slot_WTK // P == ranks.rank)
    arrived = _arrived(slot_WTK % P, here_NK, source_N.unsqueeze(1), ranks, capacity_of(plan, ranks))
    traffic.kept["by_gathering"] = arrived
    return arrived


def all_tokens(mine_TD: Tensor, traffic: Traffic) -> Tensor:
    """The tokens of all ranks, rank by rank. Each rank adds zeros up to the largest number of tokens."""
    missing = max(traffic.tokens) - mine_TD.shape[0]
    if missing:
        mine_TD = torch.cat([mine_TD, mine_TD.new_zeros(missing, mine_TD.shape[1])])
    return gather(mine_TD, traffic).flatten(0, 1)


def capacity_of(plan: RoutingPlan, ranks: Ranks) -> int | None:
    return plan.num_rows // ranks.slots if plan.layout.kind == "padded" else None


def uneven(plan: RoutingPlan, traffic: Traffic) -> str | None:
    """Why a transport that sends tokens instead of pairs cannot use fixed sizes; None if it can."""
    if plan.layout.kind == "padded" and len(set(traffic.tokens)) > 1:
        return (
            f"the ranks have {', '.join(map(str, traffic.tokens))} tokens; with fixed sizes (padded) it "
            "sends whole tokens and needs the same number on every rank: use all_to_all or the compact layout"
        )
    return None


def _wanted(slot_TK: Tensor, each: int, owners: int) -> Tensor:
    """Column m is m for tokens that need owner m, else -1. An owner has `each` consecutive slots."""
    owner_TK = torch.where(slot_TK >= 0, slot_TK // each, owners)
    nothing_TM = torch.full((slot_TK.shape[0], owners + 1), -1, device=slot_TK.device)
    return nothing_TM.scatter(1, owner_TK, owner_TK)[:, :owners]


def _hop(owner_TM: Tensor, traffic: Traffic, group: dist.ProcessGroup | None, capacity: int | None) -> Hop:
    owners = owner_TM.shape[1]
    layout = Layout.compact() if capacity is None else Layout.padded(capacity=capacity)
    gate_TM = torch.ones(owner_TM.shape, device=owner_TM.device)
    plan = make_plan(Routing(expert_TK=owner_TM, gate_TK=gate_TM, num_experts=owners), layout)
    send = receive = [0 if capacity is None else capacity] * owners
    if capacity is None:
        here_M = plan.count_E
        if group is not None:
            here_M = torch.empty_like(plan.count_E)
            with watched(traffic.ranks, "counting the rows of a hop", traffic.split_WW):
                dist.all_to_all_single(here_M, plan.count_E.contiguous(), group=group)
        send, receive = on_host(torch.stack([plan.count_E, here_M]))
    way = replace(traffic.way, send=tuple(send), receive=tuple(receive), group=group)
    return Hop(plan=plan, way=way)


def _source(way: Way, arrived: Tensor) -> Tensor:
    """The sender of each row that arrived, as its number in the group."""
    ends = torch.tensor(way.receive, device=arrived.device).cumsum(0)
    return torch.searchsorted(ends, torch.arange(arrived.shape[0], device=arrived.device), right=True)


def _arrived(
    place_NK: Tensor, here_NK: Tensor, source_N1: Tensor, ranks: Ranks, C: int | None
) -> RoutingPlan:
    """The plan for x_QD, whose rows are sorted by source and place: each of these pairs is an expert."""
    key_NK = torch.where(here_NK, source_N1 * ranks.places + place_NK, -1)
    layout = Layout.compact() if C is None else Layout.padded(capacity=C)
    gate_NK = torch.ones(key_NK.shape, device=key_NK.device)
    return make_plan(Routing(expert_TK=key_NK, gate_TK=gate_NK, num_experts=ranks.slots), layout)

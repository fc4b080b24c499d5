"""Rows counted without processes are those that Traffic settles; the time of an exchange follows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.placing import contiguous, eplb, replicated, strided
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import settle
from moe_routing_bench.planner.fabric import Fabric, exchange, ports, read_fabric, shipped
from moe_routing_bench.planner.flow import TRANSPORTS, Flow, count_flow
from moe_routing_bench.planner.step import LayerSize, step_time
from ranks_in_processes import on_ranks
from rows_sent import rows_sent

E, K, T = 8, 3, 40
SIZE = LayerSize(D=16, F=32, E=E, K=K)
H100 = read_fabric("h100-400g")


def chosen(rank: int) -> np.ndarray:
    """Uneven, with tokens of fewer choices; rank 1 has no tokens at all."""
    dice = np.random.default_rng(rank)
    tokens = 0 if rank == 1 else T
    expert_TK = np.argsort(dice.random((tokens, E)) ** np.arange(1, E + 1), axis=1)[:, :K]
    expert_TK[::7, 1] = -1
    return expert_TK


def placements(W: int) -> list[Placement]:
    per_node = max(1, W // 2)
    load = [9.0, 5, 3, 2, 1, 1, 1, 1]
    return [
        contiguous(E, ranks=W, ranks_per_node=per_node),
        strided(E, ranks=W, ranks_per_node=per_node),
        replicated(load, ranks=W, extra=W, ranks_per_node=per_node),
        eplb([90.0, *load[1:]], ranks=W, extra=W, ranks_per_node=per_node),  # two copies on a rank
    ]


def settled(group: Any, layouts: list[str]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """What this rank sends, receives and drops, by placement and layout."""
    found = []
    for placement in placements(group.size()):
        ranks = Ranks(placement, group)
        for layout in layouts:
            # with a capacity every rank must have as many tokens
            expert_TK = torch.from_numpy(chosen(ranks.rank + (0 if layout == "compact" else 2)))
            routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(expert_TK.shape), num_experts=E)
            plan = make_plan(ranks.to_slots(routing), Layout.parse(layout))
            traffic = settle(plan, ranks)
            found.append((traffic.sent, traffic.received, int(plan.dropped_E.sum())))
    return found


@pytest.mark.parametrize("W", [2, 4])
def test_rows_are_exactly_those_of_traffic(W: int) -> None:
    layouts = ["compact", "padded(capacity_factor=1.25)"]
    by_rank = on_ranks(W, settled, layouts)
    for place, placement in enumerate(placements(W)):
        exact = count_flow(chosen, placement).phases("all_to_all")[0]
        flow = count_flow(lambda rank: chosen(rank + 2), placement)
        capacity = flow.capacity(Layout.parse(layouts[1]), K)
        room = flow.phases("all_to_all", capacity)[0]
        lost = 0
        for rank in range(W):
            compact, padded = by_rank[rank][2 * place : 2 * place + 2]
            assert compact[0] == tuple(exact[rank]) and compact[1] == tuple(exact[:, rank])
            assert padded[0] == tuple(room[rank]) and padded[1] == tuple(room[:, rank])
            lost += padded[2]
        assert flow.dropped(capacity) == pytest.approx(lost / flow.pairs_WS.sum())
        assert lost, "a capacity that drops nothing would not show a difference"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_sends_what_traffic_predicts(transport: str) -> None:
    for placement in placements(4):
        flow, fabric = count_flow(chosen, placement), shared()
        sums = [ports(rows_WW, fabric) for rows_WW in flow.phases(transport)]
        within = between = 0
        for rank in range(4):
            ranks = SimpleNamespace(rank=rank, num_ranks=4, places=placement.places, placement=placement)
            slot_TK = placement.tables().slot_TK(torch.from_numpy(chosen(rank)), first_token=rank)
            predicted = rows_sent(slot_TK, ranks, transport, tokens=T)  # type: ignore[arg-type]
            within, between = within + predicted.within, between + predicted.between
            if transport != "hierarchical":  # of which `within` is what a rank causes, not what it sends
                assert sums[0].out.near_W[rank] == predicted.within
            assert sums[0].out.far_W[rank] == predicted.between
        assert sum(one.far_rows for one in sums) == between
        assert sum(one.rows - one.far_rows for one in sums) == within


def shared(**more: Any) -> Fabric:
    between = {"gb_per_second": 43.0, "exchange_us": 20.0, "message_us": 0.1}
    text = H100.model_dump() | {"ranks_per_node": 2, "between": between} | more
    return Fabric.model_validate(text)


def test_the_most_loaded_resource_decides() -> None:
    rows_WW = np.array([[9, 4, 1, 1], [0, 9, 2, 0], [0, 0, 9, 0], [3, 0, 0, 9]])
    sums = ports(rows_WW, shared())
    assert sums.out.near_W.tolist() == [4, 0, 0, 0] and sums.out.far_W.tolist() == [2, 2, 0, 3]
    assert sums.into.near_W.tolist() == [0, 4, 0, 0] and sums.into.far_W.tolist() == [3, 0, 3, 1]
    assert sums.out.near_ranks_W.tolist() == [1, 0, 0, 0] and sums.out.far_ranks_W.tolist() == [2, 1, 0, 1]
    assert (sums.rows, sums.far_rows) == (11, 7)
    row = 43e6  # a millisecond a row between nodes
    found = exchange(sums, row, shared())
    assert found.limit.startswith("between nodes") and found.seconds == pytest.approx(20.3e-6 + 3e-3)
    node = exchange(sums, row, shared(node={"gb_per_second": 43.0}))
    assert node.limit == "all ranks of a node, out" and node.seconds == pytest.approx(20.3e-6 + 4e-3)
    one_by_one = exchange(sums, row, shared(waits=1.0))
    assert one_by_one.seconds == pytest.approx(20.3e-6 + 5e-3), "rank 0 sends 2 rows and receives 3"
    switch = {"gb_per_second": 21.5, "nodes": 1}
    both = exchange(ports(rows_WW, shared(switch=switch)), row, shared(switch=switch))
    assert both.limit == "all nodes of a switch, out" and both.seconds == pytest.approx(20.3e-6 + 8e-3)
    assert (
        exchange(sums.turned, row, shared()).seconds
        == exchange(ports(rows_WW.T, shared()), row, shared()).seconds
    )


def fair_seconds(rows_WW: np.ndarray, row_bytes: float, fabric: Fabric) -> float:
    """The same exchange as flows that share every port fairly (max-min), event by event."""
    W, L = len(rows_WW), fabric.ranks_per_node
    left = {(s, d): rows_WW[s, d] * row_bytes for s in range(W) for d in range(W) if s != d and rows_WW[s, d]}
    now = 0.0
    while left:
        ends = {}
        for s, d in left:
            near = s // L == d // L
            rate = (fabric.inside if near else fabric.between).gb_per_second * 1e9
            for port in ((s, "out", near), (d, "in", near)):
                ends.setdefault(port, [rate, set()])[1].add((s, d))
        speed: dict[tuple[int, int], float] = {}
        while len(speed) < len(left):
            tight = min((one for one in ends.values() if one[1]), key=lambda one: one[0] / len(one[1]))
            each = tight[0] / len(tight[1])
            for flow in list(tight[1]):
                speed[flow] = each
                for port in ends.values():
                    if flow in port[1]:
                        port[1].remove(flow)
                        port[0] -= each
        until = min(left[flow] / speed[flow] for flow in left)
        now += until
        left = {
            flow: size - until * speed[flow]
            for flow, size in left.items()
            if size > until * speed[flow] * (1 + 1e-9)
        }
    return now


def test_fair_sharing_comes_near_to_the_bound() -> None:
    """How much later than the bound flows end that share ports fairly: the model's own error."""
    free = {"gb_per_second": 43.0, "exchange_us": 0.0, "message_us": 0.0}
    fabric = shared(inside=free | {"gb_per_second": 360.0}, between=free)
    dice, late = np.random.default_rng(0), []
    for _ in range(60):
        rows_WW = dice.integers(1, 100, (8, 8)) * dice.integers(1, 4, (8, 1))
        bound = exchange(ports(rows_WW, fabric), 1e6, fabric).seconds
        late.append(fair_seconds(rows_WW, 1e6, fabric) / bound)
    assert min(late) > 1 - 1e-6, "nothing ends before its most loaded port"
    assert np.median(late) < 1.05 and max(late) < 1.25


def test_parts_of_a_step() -> None:
    flow = count_flow(chosen, contiguous(E, ranks=4, ranks_per_node=2))
    time = step_time(flow, SIZE, shared())
    rows = flow.rows_WW.sum() - np.trace(flow.rows_WW)
    assert time.sent == rows * SIZE.D * 2 == time.returned
    far = flow.rows_WW[:2, 2:].sum() + flow.rows_WW[2:, :2].sum()
    assert time.between == 2 * far * SIZE.D * 2
    alone = step_time(count_flow(chosen, contiguous(E, ranks=1)), SIZE, H100)
    assert alone.sent == 0 and alone.seconds["plan"] < time.seconds["plan"]
    for transport in TRANSPORTS:
        assert step_time(flow, SIZE, shared(), transport=transport).total > 0


def skewed(T: int, rank: int) -> np.ndarray:
    return np.tile([0, 1, 2], (T, 1))


def test_a_hot_rank_is_what_all_wait_for() -> None:
    hot = count_flow(partial(skewed, T), contiguous(E, ranks=4))
    even = Flow(
        pairs_WS=np.full((4, 8), 15),
        tokens_W=hot.tokens_W,
        to_WW=hot.to_WW,
        nodes_WN=hot.nodes_WN,
        placement=hot.placement,
    )
    large = LayerSize(D=4096, F=4096, E=E, K=K)
    slow, quick = (step_time(flow, large, H100).seconds for flow in (hot, even))
    assert slow["send"] > quick["send"] and slow["compute"] > quick["compute"]


@pytest.mark.parametrize("name", shipped())
def test_shipped_fabrics(name: str) -> None:
    fabric = read_fabric(name)
    assert len(fabric.sources) >= 1 and fabric.inside.gb_per_second > fabric.between.gb_per_second

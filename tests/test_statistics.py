"""RoutingStatistics against the worked example, loops in plain Python, and without a host."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_routing_bench.moe.statistics as module
from moe_routing_bench import Layout, Routing, make_plan
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.moe.statistics import RoutingStatistics


def routing_of(rows: list[list[int]], E: int, logits_TE: Tensor | None = None) -> Routing:
    expert_TK = torch.tensor(rows, dtype=torch.int64)
    return Routing(
        expert_TK=expert_TK, gate_TK=torch.ones(expert_TK.shape), num_experts=E, logits_TE=logits_TE
    )


def random_routing(T: int, E: int, K: int, seed: int, absent: float = 0.3) -> Routing:
    torch.manual_seed(seed)
    expert_TK = torch.rand(T, E).argsort(1)[:, :K]
    odd_TK = torch.where(torch.rand(T, K) < 0.5, -1, E + 3)
    expert_TK = torch.where(torch.rand(T, K) < absent, odd_TK, expert_TK)
    return Routing(
        expert_TK=expert_TK, gate_TK=torch.rand(T, K), num_experts=E, logits_TE=3 * torch.randn(T, E)
    )


def test_the_worked_example() -> None:
    routing = routing_of(
        [[0, 1], [0, 1], [0, 2], [2, -1]], 3, torch.tensor([[math.log(2), 0.0, 0.0]]).repeat(4, 1)
    )
    plan = make_plan(routing, Layout.padded(capacity=2))
    previous = routing_of([[1, 0], [0, 2], [0, 2], [1, -1]], 3)
    found = RoutingStatistics.of(
        routing, plan, previous=previous, label_T=torch.tensor([0, 0, 1, 1]), num_labels=2
    ).to_dict()
    assert found["load"] == LoadStatistics.of(routing, plan).to_dict()
    assert found["share_E"] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert found["experts_per_token"] == pytest.approx(1.75)
    assert found["drop_rate"] == pytest.approx(1 / 7)
    assert found["confidence"] == pytest.approx(0.5)
    assert found["agreement"] == pytest.approx((1 + 1 / 3 + 1 + 0) / 4)
    assert found["co_EE"] == [[3, 2, 1], [2, 2, 0], [1, 0, 2]]
    assert found["label_bits"] == pytest.approx(0.5917, abs=5e-5)
    assert found["label_share"] == pytest.approx(0.6005, abs=5e-5)


def expected(
    routing: Routing, previous: Routing, labels: list[int], L: int, keep: list[bool]
) -> dict[str, Any]:
    """The definitions once more, token by token."""
    E = routing.num_experts

    def sets(one: Routing) -> list[set[int]]:
        rows = one.expert_TK.tolist()
        return [{e for e in row if 0 <= e < E} if k else set() for row, k in zip(rows, keep, strict=True)]

    now, before = sets(routing), sets(previous)
    co = [[0] * E for _ in range(E)]
    for used in now:
        for e in used:
            co[e][e] += 1
        for a, b in combinations(used, 2):
            co[a][b] += 1
            co[b][a] += 1
    kept = [len(a & b) / len(a | b) for a, b in zip(now, before, strict=True) if a | b]
    pairs = Counter((e, j) for used, j in zip(now, labels, strict=True) if 0 <= j < L for e in used)
    total = sum(pairs.values())
    of_e: Counter[int] = Counter()
    of_j: Counter[int] = Counter()
    for (e, j), n in pairs.items():
        of_e[e] += n
        of_j[j] += n
    bits = sum(n / total * math.log2(n * total / (of_e[e] * of_j[j])) for (e, j), n in pairs.items())
    entropy = -sum(n / total * math.log2(n / total) for n in of_j.values())
    assert routing.logits_TE is not None
    tops = [
        max(row) for row, k in zip(routing.logits_TE.double().softmax(1).tolist(), keep, strict=True) if k
    ]
    return {
        "experts_per_token": sum(map(len, now)) / sum(keep),
        "confidence": sum(tops) / len(tops),
        "agreement": sum(kept) / len(kept),
        "co_EE": co,
        "label_bits": bits,
        "label_share": bits / entropy,
    }


@pytest.mark.parametrize("chunk", [7, 65_536])
@pytest.mark.parametrize(("T", "E", "K"), [(50, 6, 3), (64, 12, 12), (40, 5, 1)])
def test_against_loops(monkeypatch: pytest.MonkeyPatch, chunk: int, T: int, E: int, K: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    routing, previous = random_routing(T, E, K, 0), random_routing(T, E, max(1, K - 1), 1)
    label_T = torch.randint(-1, 5, (T,))  # -1 and 4 are no labels
    keep_T = torch.rand(T) < 0.8
    # as if the label had something to do with it
    routing.expert_TK[:, 0] = torch.where(label_T > 1, 0, routing.expert_TK[:, 0])
    routing.expert_TK[:, 1:] = torch.where(routing.expert_TK[:, 1:] == 0, -1, routing.expert_TK[:, 1:])
    found = RoutingStatistics.of(
        routing, previous=previous, label_T=label_T, num_labels=4, mask_T=keep_T
    ).to_dict()
    want = expected(routing, previous, label_T.tolist(), 4, keep_T.tolist())
    assert want["label_bits"] > 0.01
    for name, value in want.items():
        assert found[name] == (value if name == "co_EE" else pytest.approx(value, rel=1e-5)), name
    assert found["drop_rate"] is None


def test_the_ends_of_label_information() -> None:
    label_T = torch.arange(6) % 3
    by_label = routing_of([[int(label)] for label in label_T], 4)
    blind = routing_of([[0], [0], [0], [1], [1], [1]], 4)
    knows = RoutingStatistics.of(by_label, label_T=label_T, num_labels=3).to_dict()
    assert knows["label_share"] == pytest.approx(1)
    assert knows["label_bits"] == pytest.approx(math.log2(3))
    assert RoutingStatistics.of(blind, label_T=label_T, num_labels=3).to_dict()[
        "label_share"
    ] == pytest.approx(0)
    one_label = RoutingStatistics.of(blind, label_T=torch.zeros_like(label_T), num_labels=1).to_dict()
    assert (one_label["label_bits"], one_label["label_share"]) == (0, 0)


@pytest.mark.parametrize("T", [0, 3])
def test_nothing_routed(T: int) -> None:
    routing = routing_of([[-1, 9]] * T, 4) if T else random_routing(0, 4, 2, 0)
    found = RoutingStatistics.of(
        routing,
        make_plan(routing, Layout.compact()),
        previous=routing,
        label_T=torch.zeros(T, dtype=torch.int64),
        num_labels=2,
    ).to_dict()
    assert found["share_E"] == [0, 0, 0, 0]
    assert (found["experts_per_token"], found["drop_rate"], found["agreement"]) == (0, 0, 1)
    assert (found["label_bits"], found["label_share"]) == (0, 0)


def test_the_same_routing_agrees_and_an_unlike_one_does_not() -> None:
    a, b = routing_of([[0, 1], [2, -1]], 4), routing_of([[2, 3], [0, 1]], 4)
    assert RoutingStatistics.of(a, previous=a).to_dict()["agreement"] == 1
    assert RoutingStatistics.of(a, previous=b).to_dict()["agreement"] == 0


def test_no_host_synchronisation() -> None:
    with FakeTensorMode():
        routing = Routing(
            expert_TK=torch.zeros(9, 2, dtype=torch.int64),
            gate_TK=torch.zeros(9, 2),
            num_experts=5,
            logits_TE=torch.zeros(9, 5),
        )
        plan = make_plan(routing, Layout.padded(capacity=3))
        found = RoutingStatistics.of(
            routing,
            plan,
            previous=routing,
            label_T=torch.zeros(9, dtype=torch.int64),
            num_labels=3,
            mask_T=torch.ones(9, dtype=torch.bool),
        )
    assert found.co_EE.shape == (5, 5) and found.share_E.shape == (5,)
    for name in ("experts_per_token", "drop_rate", "confidence", "agreement", "label_bits", "label_share"):
        assert getattr(found, name).shape == ()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"previous": routing_of([[0]], 3)}, "two routings"),
        ({"previous": routing_of([[0], [1]], 4)}, "two routings"),
        ({"label_T": torch.zeros(2, dtype=torch.int64)}, "together"),
        ({"num_labels": 2}, "together"),
        ({"label_T": torch.zeros(3, dtype=torch.int64), "num_labels": 2}, "label_T"),
        ({"label_T": torch.zeros(2, dtype=torch.int64), "num_labels": 0}, "num_labels"),
    ],
)
def test_mistakes_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RoutingStatistics.of(routing_of([[0], [1]], 3), **options)


def test_information_is_never_more_than_the_label_has() -> None:
    """Here the expert is the label; by rounding alone its share was 1.0000000000000002."""
    label_T = torch.arange(44) ** 2 % 7
    found = RoutingStatistics.of(routing_of(label_T[:, None].tolist(), 7), label_T=label_T, num_labels=7)
    assert found.label_share is not None and 0.999 < found.label_share.item() <= 1

"""Placements: every expert has a home, copies share, and each way of placing keeps what it promises."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.parallel.placing import assigned, contiguous, eplb, greedy, replicated, strided

EXAMPLE = Placement(experts_W=((0, 1), (0, 2), (0, 3), (1,)), num_experts=4, ranks_per_node=2)
loads = st.lists(st.integers(0, 100), min_size=1, max_size=24)


def test_the_example_of_the_docstring() -> None:
    assert EXAMPLE.ranks_E == ((0, 1, 2), (0, 3), (1,), (2,))
    assert (EXAMPLE.places, EXAMPLE.num_nodes, EXAMPLE.most_copies) == (2, 2, 3)
    assert EXAMPLE.rank_load([6, 2, 1, 1]) == [3, 3, 3, 1]


def test_simple_ways() -> None:
    assert contiguous(5, ranks=2).experts_W == ((0, 1, 2), (3, 4))
    assert strided(5, ranks=2).experts_W == ((0, 2, 4), (1, 3))
    assert greedy([5, 1, 1, 5], ranks=2).rank_load([5, 1, 1, 5]) == [6, 6]
    heavy = replicated([90, 5, 5, 5], ranks=2, extra=2)
    assert heavy.ranks_E[0] == (0, 1) and max(heavy.rank_load([90, 5, 5, 5])) < 1.06 * 105 / 2


@given(loads, st.integers(1, 6), st.data())
def test_every_way_gives_each_expert_its_copies(load: list[int], ranks: int, data: st.DataObject) -> None:
    extra = data.draw(st.integers(0, len(load) * (ranks - 1)))
    for placement, copies in (
        (contiguous(len(load), ranks=ranks), len(load)),
        (strided(len(load), ranks=ranks), len(load)),
        (greedy(load, ranks=ranks), len(load)),
        (replicated(load, ranks=ranks, extra=extra), len(load) + extra),
    ):
        assert sum(map(len, placement.experts_W)) == copies
        assert placement.places == -(-copies // ranks)
        assert sum(placement.rank_load(load)) == pytest.approx(sum(load))
        assert Placement.from_json(placement.to_json()) == placement


@given(st.lists(st.integers(0, 50), min_size=16, max_size=16), st.integers(0, 8))
def test_groups_stay_on_their_node(load: list[int], extra: int) -> None:
    placement = replicated(load, ranks=8, extra=2 * extra, ranks_per_node=4, groups=4)
    nodes = [{rank // placement.ranks_per_node for rank in ranks} for ranks in placement.ranks_E]
    assert all(len(here) == 1 for here in nodes)
    for group in range(4):
        assert len(set.union(*nodes[4 * group : 4 * group + 4])) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_integer_program_is_as_good_as_trying_everything(seed: int) -> None:
    load = torch.randint(1, 30, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    best = min(
        max(sum(x for x, w in zip(load, where, strict=True) if w == rank) for rank in range(2))
        for where in product(range(2), repeat=6)
        if sum(where) == 3
    )
    found = assigned(load, ranks=2)
    assert max(found.rank_load(load)) == best
    assert max(greedy(load, ranks=2).rank_load(load)) >= best


def test_eplb_maps_go_there_and_back() -> None:
    placement = replicated([9, 1, 1, 1, 1, 1], ranks=4, extra=2)
    first, places, copies = placement.to_eplb()
    assert Placement.from_eplb(first, ranks=4) == placement
    assert copies == [len(ranks) for ranks in placement.ranks_E]
    assert all(first[p] == expert for expert, row in enumerate(places) for p in row if p >= 0)
    assert Placement.from_eplb([0, 0, 1, 0], ranks=2).experts_W == ((0, 0), (0, 1))
    with pytest.raises(ValueError, match="equally many"):
        EXAMPLE.to_eplb()


REFERENCE = json.loads((Path(__file__).parents[1] / "data/eplb.json").read_text())["cases"]


@pytest.mark.parametrize("case", REFERENCE)
def test_eplb_places_as_the_reference_does(case: dict[str, Any]) -> None:
    """Without ties the placement itself is equal, rank by rank; measurements/parallel/eplb.py recorded it."""
    load, ranks = case["load"], case["gpus"]
    theirs = Placement.from_eplb(
        case["physical_to_logical"], ranks=ranks, ranks_per_node=ranks // case["nodes"]
    )
    assert theirs.rank_load(load) == pytest.approx(case["load_of_gpu"])
    sizes = {
        "ranks": ranks, "extra": len(case["physical_to_logical"]) - len(load),
        "ranks_per_node": ranks // case["nodes"],
        "groups": 0 if case["groups"] % case["nodes"] else case["groups"],
    }  # fmt: skip
    assert eplb(load, **sizes) == theirs
    assert max(replicated(load, **sizes).rank_load(load)) <= max(case["load_of_gpu"]) * (1 + 1e-12)


def test_the_reference_has_both_policies_and_two_copies_on_a_rank() -> None:
    policies = {(case["nodes"] > 1, case["groups"] % case["nodes"] > 0) for case in REFERENCE}
    assert policies == {(False, False), (True, False), (True, True)}
    found = [Placement.from_eplb(case["physical_to_logical"], ranks=case["gpus"]) for case in REFERENCE]
    assert sum(any(len(set(held)) < len(held) for held in one.experts_W) for one in found) >= 5


def test_copies_take_turns() -> None:
    tables = EXAMPLE.tables()
    expert_TK = torch.tensor([[0, 1], [0, -1], [0, 9], [0, 1]])
    assert tables.slot_TK(expert_TK).tolist() == [[0, 1], [2, -1], [4, -1], [0, 6]]
    assert tables.slot_TK(expert_TK, first_token=1)[:, 0].tolist() == [2, 4, 0, 2]
    assert tables.slot_EC.tolist() == [[0, 2, 4], [1, 6, -1], [3, -1, -1], [5, -1, -1]]
    twice = Placement(experts_W=((0, 0), (0, 1)), num_experts=2)
    assert twice.rank_load([6, 1]) == [4, 3]
    assert twice.tables().slot_TK(torch.zeros(3, 1, dtype=torch.int64)).tolist() == [[0], [1], [2]]


def test_load_statistics_of_a_placement() -> None:
    """Loads [6, 2, 1, 1]: ranks have 3, 3, 3 and 1, the mean is 2.5."""
    expert_TK = torch.tensor([0] * 6 + [1] * 2 + [2, 3]).unsqueeze(1)
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(10, 1), num_experts=4)
    found = LoadStatistics.of(routing, placement=EXAMPLE)
    assert found.max_violation_rank.item() == pytest.approx(0.2)
    usual = LoadStatistics.of(routing, num_ranks=2)
    assert LoadStatistics.of(routing, placement=contiguous(4, ranks=2)).to_dict() == usual.to_dict()
    with pytest.raises(ValueError, match="placed are 5"):
        LoadStatistics.of(routing, placement=contiguous(5, ranks=2))


def test_how_many_copies_move() -> None:
    assert contiguous(4, ranks=2).moved(strided(4, ranks=2)) == 2
    assert EXAMPLE.moved(EXAMPLE) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts_of_rank": [[0, 1], [1]]}, "no rank"),
        ({"experts_of_rank": [[1, 0], [2]]}, "ascending order"),
        ({"experts_of_rank": [[0, 1, 2], [7]]}, "experts are 0 .. 2"),
        ({"experts_of_rank": [[0, 1, 2], [1.5]]}, "whole number"),
        ({"experts_of_rank": 5}, "list of lists"),
        ({"num_experts": True}, "whole number"),
        ({"ranks_per_node": 3}, "on nodes"),
        ({"more": 1}, "entries"),
    ],
)
def test_files_are_not_trusted(change: dict[str, object], words: str) -> None:
    good = {"num_experts": 3, "ranks_per_node": 2, "experts_of_rank": [[0, 1], [2]]}
    Placement.from_json(json.dumps(good))
    with pytest.raises(ValueError, match=words):
        Placement.from_json(json.dumps(good | change))
    with pytest.raises(ValueError, match="JSON object"):
        Placement.from_json("{")


@pytest.mark.parametrize("load", [[], [-1.0], [float("nan")], [float("inf")]])
def test_loads_are_checked(load: list[float]) -> None:
    with pytest.raises(ValueError, match="a load"):
        greedy(load, ranks=2)


def test_thousands_of_ranks_take_seconds() -> None:
    load = torch.rand(512).tolist()
    began = time.process_time()
    placement = replicated(load, ranks=4096, extra=4096 - 512)
    assert placement.places == 1 and max(placement.rank_load(load)) < 2 * sum(load) / 4096
    assert time.process_time() - began < 30

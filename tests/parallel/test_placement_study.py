"""mrb parallel place and mrb parallel cache: what they say follows from the trace."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from command_line import mrb, mrb_json, refused
from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.planner.caches import POLICIES
from moe_routing_bench.planner.fabric import Fabric, read_fabric
from moe_routing_bench.planner.placements import PlacementStudy, Tried, busiest, moves, study_placements
from moe_routing_bench.planner.step import LayerSize
from moe_routing_bench.workloads.trace import read_trace, write_trace

T, E, K = 512, 8, 2


def trace_of(path: Path, weight_E: torch.Tensor, layers: int = 2) -> Path:
    """Tokens that choose experts with these weights, all layers alike."""
    dice = torch.Generator().manual_seed(0)
    routings = []
    for _ in range(layers):
        expert_TK = torch.multinomial(weight_E.expand(T, E), K, generator=dice)
        routings.append(Routing(expert_TK=expert_TK, gate_TK=torch.full((T, K), 0.5), num_experts=E))
    layer_T = torch.arange(layers).repeat_interleave(T)
    write_trace(path, *routings, source="drawn", layer_T=layer_T)
    return path


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two experts, which contiguous placement puts on one rank, get most of the tokens."""
    weight_E = torch.tensor([8.0, 8, 1, 1, 1, 1, 1, 1])
    return trace_of(tmp_path_factory.mktemp("skewed") / "t.safetensors", weight_E)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace_of(tmp_path_factory.mktemp("even") / "t.safetensors", torch.ones(E))


def test_the_busiest_rank() -> None:
    load_SE = torch.tensor([[6, 2, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert busiest(contiguous(4, ranks=2), load_SE) == pytest.approx((2 + 1 + 1) / 3)


def test_skew_pays_and_stays(skewed: Path) -> None:
    found = mrb_json("parallel", "place", skewed, "--ranks", 4, "--replicas", "0,4", "--tokens", 32)
    by_name = {(one["way"], one["replicas"]): one for one in found["tried"]}
    assert list(by_name) == [
        ("contiguous", 0), ("strided", 0), ("greedy", 0), ("replicated", 4), ("assigned", 0),
    ]  # fmt: skip
    together, apart = by_name["contiguous", 0], by_name["greedy", 0]
    assert together["next"] > 2.5 and apart["next"] < 0.7 * together["next"]
    assert by_name["replicated", 4]["next"] < apart["next"] and by_name["replicated", 4]["places"] == 3
    assert by_name["assigned", 0]["same"] <= apart["same"] + 1e-9
    assert together["moved"] == 0 and found["pays"] is True
    said = mrb("parallel", "place", skewed, "--ranks", 4, "--tokens", 32, "--model", "qwen3-30b-a3b").stdout
    assert "GiB a rank" in said


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In each quarter of the trace another pair of neighbours gets most of the tokens."""
    path, dice = tmp_path_factory.mktemp("drifting") / "t.safetensors", torch.Generator().manual_seed(0)
    parts = []
    for tokens in range(0, 8 * T, 64):
        weight_E = torch.ones(E)
        hot = tokens * E // (8 * T) // 2 * 2
        weight_E[hot : hot + 2] = 12
        parts.append(torch.multinomial(weight_E.expand(64, E), K, generator=dice))
    expert_TK = torch.cat(parts)
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.full(expert_TK.shape, 0.5), num_experts=E)
    write_trace(path, routing, source="drawn")
    return path


def test_a_drifting_trace_is_replayed_with_the_cost_of_moving(drifting: Path) -> None:
    """Windows of four steps follow the drift; windows of a whole quarter come too late. Moving must not take
    longer than a window saves. A quick device saves nothing, because it waits for weights, not for rows."""
    size, quick = LayerSize(D=4096, F=14336, E=E, K=K), read_fabric("h100-400g")
    fabric = quick.model_copy(update={"device": quick.device.model_copy(update={"tflops": 5.0})})
    slow = fabric.model_copy(update={"inside": fabric.inside.model_copy(update={"gb_per_second": 0.01})})

    def copies(windows: int, links: Fabric) -> tuple[PlacementStudy, Tried]:
        study = study_placements(
            read_trace(drifting),
            ranks=4,
            replicas=[4],
            step_tokens=32,
            windows=windows,
            size=size,
            fabric=links,
        )
        return study, study.tried[2]

    (often, follows), (seldom, late), (dear, waits) = copies(32, fabric), copies(4, fabric), copies(32, slow)
    quick_study, unchanged = copies(32, quick)
    assert follows.next < 0.8 * late.next and seldom.steps == 8 * often.steps
    assert often.pays and often.pays_after(follows) < dear.pays_after(waits) and not dear.pays
    assert math.inf == quick_study.pays_after(unchanged) and not quick_study.pays
    saved = often.tried[0].step_seconds - follows.step_seconds  # type: ignore[operator]
    # an expert of 352 MB takes a millisecond at 360 GB/s, and a rank gets one to three
    assert 0.9e-3 < follows.move_seconds < 3e-3  # type: ignore[operator]
    assert often.pays_after(follows) == math.ceil(follows.move_seconds / saved)  # type: ignore[operator]
    assert often.pays_after(often.tried[0]) == math.inf
    words = ("parallel", "place", drifting, "--ranks", 4, "--tokens", 32, "--replicas", "4", "--windows", 32)
    assert "Yes: " in mrb(*words).stdout, "without a model moving costs nothing"
    assert "pays after" in mrb(*words, "--model", "mixtral-8x7b").stdout


def test_the_nearest_rank_sends_an_expert() -> None:
    before = Placement(experts_W=((0, 1), (2,), (0, 3), (3,)), num_experts=4, ranks_per_node=2)
    after = Placement(experts_W=((1, 2), (0, 2), (3,), (0, 1)), num_experts=4, ranks_per_node=2)
    # rank 3 gets expert 0 from rank 2 of its own node, and expert 1 over the link from rank 0
    assert moves(before, after).tolist() == [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_even_routing_does_not_pay(even: Path) -> None:
    """Whatever moves, moves after noise: the next window does not keep it."""
    said = mrb("parallel", "place", even, "--ranks", 4, "--replicas", "0", "--tokens", 64).stdout
    assert "No, another placement would not pay" in said, said
    found = mrb_json("parallel", "place", even, "--ranks", 4, "--tokens", 64)
    greedy = next(one for one in found["tried"] if one["way"] == "greedy")
    assert greedy["same"] < greedy["next"]  # hindsight looks better than it is
    assert found["chance"] == pytest.approx(found["tried"][0]["next"], rel=0.1)


def test_what_cannot_be_placed_says_so(skewed: Path) -> None:
    assert "4 windows" in refused("parallel", "place", skewed, "--ranks", 4, "--tokens", 400)
    assert "--replicas" in refused("parallel", "place", skewed, "--ranks", 4, "--replicas", "a")
    few = ["--ranks", 2, "--tokens", 32]
    assert "one of each" in refused("parallel", "place", skewed, *few, "--replicas", "9")
    assert "--ranks is 0" in refused("parallel", "place", skewed, "--ranks", 0)
    assert "trace file" in refused("parallel", "place", "nothing.safetensors", "--ranks", 2)


tokens = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True), min_size=1, max_size=9)


def fewest_loads(chosen: list[list[int]], slots: int) -> int:
    """By trying everything: states are what the slots hold after a token."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for experts in map(frozenset, chosen):
        after: dict[frozenset[int], int] = {}
        for held, loads in states.items():
            rest = held - experts
            room = min(slots - len(experts), len(rest))
            cost = loads + len(experts - held)
            for kept in combinations(sorted(rest), room):
                state = experts | frozenset(kept)
                after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


@given(tokens, st.integers(2, 5))
def test_nobody_beats_belady_and_belady_is_the_best_there_is(chosen: list[list[int]], slots: int) -> None:
    loads = {name: policy(chosen, 6, slots) for name, policy in POLICIES.items()}
    assert loads["belady"] == fewest_loads(chosen, slots)
    assert min(loads.values()) == loads["belady"] or loads["static"] < loads["belady"] + slots


def test_policies_by_hand() -> None:
    chosen = [[0], [1], [0], [2], [0], [1]]
    # two slots: lru and lfu load 0, 1, 2, 1; belady keeps 0 and the better of the others
    assert POLICIES["lru"](chosen, 3, 2) == 4
    assert POLICIES["lfu"](chosen, 3, 2) == 4
    assert POLICIES["belady"](chosen, 3, 2) == 4
    assert POLICIES["belady"](chosen, 3, 3) == 3
    once_hot = [[0]] * 50 + [[1]] * 40 + [[2], [1]] * 20
    # lfu keeps 0, which nobody wants any more, and loads 1 and 2 in turns
    assert POLICIES["lfu"](once_hot, 3, 2) > POLICIES["lru"](once_hot, 3, 2) == 3


def test_cache_command(skewed: Path) -> None:
    found = mrb_json("parallel", "cache", skewed, "--slots", 4)
    rate = {one["policy"]: one["hit_rate"] for one in found["policies"]}
    assert found["layers"] == 2 and found["tokens"] == T
    assert rate["belady"] >= max(rate[name] for name in ("lru", "lfu", "decayed"))
    assert rate["lfu"] > 0.6  # two experts of eight have three quarters of the tokens
    said = mrb("parallel", "cache", skewed, "--slots", 4, "--policy", "lru", "--model", "mixtral-8x7b").stdout
    assert "MiB" in said and "lru" in said and "lfu" not in said.splitlines()[3]
    assert "give 2 to 8" in refused("parallel", "cache", skewed, "--slots", 1)
    assert "no policy" in refused("parallel", "cache", skewed, "--slots", 4, "--policy", "fifo")

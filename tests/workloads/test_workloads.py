"""Routing Suite: every workload is a valid routing, a pure function of its arguments, and hits its target."""

from __future__ import annotations

import math
import random
import re
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from command_line import mrb, mrb_json
from moe_routing_bench import Layout, Routing, make_plan
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.workloads.assignment import Draws, apportion, assign, distinct_uniform
from moe_routing_bench.workloads.families import FAMILIES, Batch, lognormal
from moe_routing_bench.workloads.workload import ALIASES, EXAMPLES, Workload, make_workload

pytestmark = pytest.mark.slow

MANY = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOME = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
REFERENCE = {"T": 512, "E": 32, "K": 2, "W": 8}
NAMES = [name for family, name in EXAMPLES.items() if family != "trace"]

# sha256 of sizes and ids at the reference size; another value is another suite: raise SUITE_VERSION
GOLDEN = {
    "uniform": "6649a84ff6dc457b",
    "balanced": "e508334a88a733c6",
    "zipf(1.2)": "54587840791af594",
    "lognormal(maxvio=4)": "c3f03b3bd8f6ccbd",
    "khot(4)": "9b9dacddec1ae9af",
    "hot_rank": "8c49db17068d1d36",
    "spread_hot": "154654c26f5d601e",
    "one_expert": "8f2a13bc06d57056",
    "zero_expert_rank": "e365a37a6579617e",
    "rotating(4)": "5babccb9c3cdf3a5",
    "burst(8)": "4828dec5f9682d04",
    "source_ragged": "0cca3c4167cb3f97",
    "correlated(0.75)": "f00eea985ba37246",
}


@st.composite
def sizes(draw: st.DrawFn, min_ranks: int = 1) -> dict[str, int]:
    W = draw(st.integers(min_ranks, 8))
    E = W * draw(st.integers(1, 8))
    K = draw(st.integers(1, min(E, 8)))
    return {"T": draw(st.integers(0, 200)), "E": E, "K": K, "W": W}


@st.composite
def names(draw: st.DrawFn, E: int, K: int) -> str:
    n = draw(st.integers(K, E))
    return draw(
        st.sampled_from(
            [
                "uniform",
                "balanced",
                f"zipf({draw(st.floats(0, 4))})",
                f"lognormal(maxvio={draw(st.floats(0, 1)) * (E / K - 1)})",
                f"khot({n})",
                "hot_rank",
                "spread_hot",
                "one_expert",
                "zero_expert_rank",
                f"rotating({n})",
                f"burst({draw(st.integers(1, 4))},n={draw(st.integers(1, K))})",
                "source_ragged",
                f"correlated({draw(st.floats(0, 1))})",
                *ALIASES,
            ]
        )
    )


def load_of(workload: Workload) -> list[int]:
    counts = Counter(workload.routing.expert_TK.flatten().tolist())
    return [counts[expert] for expert in range(workload.E)]


def ranks_of(workload: Workload) -> list[int]:
    load, each = load_of(workload), workload.E // workload.W
    return [sum(load[start : start + each]) for start in range(0, workload.E, each)]


def feasible(name: str, *, T: int, E: int, K: int, W: int) -> bool:
    """By hand, from the families' docstrings."""
    family, n = name.partition("(")[0], E // W
    if family in ("hot_rank", "spread_hot", "source_ragged"):
        return W > 1 and 1 / W < 0.5 <= n / K
    if name in ("W1", "W2", "W3", "W4", "W6"):
        return W > 1 and K < E
    if family in ("zero_expert_rank", "W5"):
        return W > 1 and E - n >= K
    return True


@MANY
@given(st.data(), sizes(), st.integers(0, 2**40), st.integers(0, 20))
def test_every_workload_is_a_routing_with_all_its_pairs(data, size, seed, step):
    name = data.draw(names(size["E"], size["K"]))
    if not feasible(name, **size):
        with pytest.raises(ValueError, match=r"^[^\n]{20,}$"):
            make_workload(name, **size, seed=seed, step=step)
        return
    workload = make_workload(name, **size, seed=seed, step=step)
    routing = workload.routing.validate()
    assert routing.expert_TK.shape == routing.gate_TK.shape == (size["T"], size["K"])
    assert routing.expert_TK.dtype == torch.int64 and routing.gate_TK.dtype == torch.float32
    assert not routing.ragged and routing.expert_TK.is_contiguous()
    load = load_of(workload)
    assert sum(load) == size["T"] * size["K"] and max(load) <= size["T"]
    assert bool((routing.gate_TK > 0).all())
    torch.testing.assert_close(routing.gate_TK.sum(1), torch.ones(size["T"]))
    assert len(workload.tokens_W) == size["W"] and sum(workload.tokens_W) == size["T"]
    # the canonical name is a fixed point and means the same
    again = make_workload(workload.name, **size, seed=seed, step=step)
    assert (again.name, again.checksum) == (workload.name, workload.checksum)
    assert torch.equal(again.routing.gate_TK, routing.gate_TK)


@MANY
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 99))
def test_assign_meets_counts_exactly(wanted, K, seed):
    E, T = len(wanted), -(-sum(wanted) // K)
    wanted[0] += T * K - sum(wanted)
    if max(wanted) > T:
        with pytest.raises(ValueError, match="none above"):
            assign(np.array(wanted), T, K, Draws(seed))
        return
    expert_TK = assign(np.array(wanted), T, K, Draws(seed))
    assert np.bincount(expert_TK.ravel(), minlength=E).tolist() == wanted
    assert all(len(set(row)) == K for row in expert_TK.tolist())


@MANY
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 10**6), st.data())
def test_apportion_is_proportional_up_to_the_limit(weights, total, data):
    positive = sum(weight > 0 for weight in weights)
    if not positive:
        return
    limit = data.draw(st.integers(-(-total // positive), 10**6))
    counts = apportion(np.array(weights), total, limit)
    assert counts.sum() == total and counts.max() <= limit and counts.min() >= 0
    open_places = [i for i, count in enumerate(counts) if count < limit and weights[i] > 1e-6]
    for i in open_places:
        for j in open_places:
            # within a pair each of the same multiple of their weights
            low, high = (counts[i] - 1) / weights[i], (counts[j] + 1) / weights[j]
            assert low <= high * (1 + 1e-6) + 1e-6 / weights[i]


def test_assign_mixes_the_sets_of_experts():
    workload = make_workload("balanced", T=4096, E=64, K=4, W=8)
    sets = {tuple(sorted(row)) for row in workload.routing.expert_TK.tolist()}
    assert len(sets) > 3900, "laid out in order there would be about 64"
    together = sum({0, 1} <= set(row) for row in sets)
    # two given experts meet in T * K (K - 1) / (E (E - 1)) = 12 tokens on average
    assert 2 <= together <= 30


def test_uniform_draws_every_set_alike():
    count = Counter(tuple(sorted(row)) for row in distinct_uniform(60_000, 5, 3, Draws(1)).tolist())
    assert len(count) == 10
    # chi squared of 9 degrees of freedom: above 27.9 once in a thousand seeds, and the seed is fixed
    assert sum((n - 6000) ** 2 / 6000 for n in count.values()) < 27.9
    first = Counter(distinct_uniform(60_000, 5, 3, Draws(2))[:, 0].tolist())
    assert all(abs(n - 12_000) < 500 for n in first.values())


@pytest.mark.parametrize("name", [*NAMES, *ALIASES])
def test_same_arguments_same_ids_and_others_different(name):
    size = {"T": 400, "E": 32, "K": 2, "W": 8}
    first = make_workload(name, **size, seed=3, step=5)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    torch.rand(7), np.random.rand(7)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate()
    assert make_workload(name, **size, seed=3, step=5).checksum == first.checksum
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate())
    others = [
        make_workload(name, **size, seed=4, step=5),
        make_workload(name, **size, seed=3, step=6),
        *(
            make_workload(name, **{**size, letter: value}, seed=3, step=5)
            for letter, value in {"T": 401, "E": 64, "K": 3, "W": 4}.items()
        ),
    ]
    checksums = [first.checksum, *(other.checksum for other in others)]
    assert len(set(checksums)) == len(checksums)


def test_different_names_draw_differently():
    assert make_workload("khot(32)", **REFERENCE).checksum != make_workload("balanced", **REFERENCE).checksum


def test_golden_checksums():
    checksums = {name: make_workload(name, **REFERENCE, seed=1, step=2).checksum[:16] for name in NAMES}
    assert checksums == GOLDEN, "the suite changed: raise SUITE_VERSION and say so"


@SOME
@given(sizes(), st.integers(0, 99))
def test_balanced_is_balanced_per_expert_and_per_rank(size, seed):
    workload = make_workload("balanced", **size, seed=seed)
    for counts in (load_of(workload), ranks_of(workload)):
        assert max(counts) - min(counts) <= 1


@SOME
@given(sizes(), st.floats(0, 3), st.integers(0, 99))
def test_zipf_loads_follow_the_power_law(size, a, seed):
    load = sorted(load_of(make_workload(f"zipf({a})", **size, seed=seed)), reverse=True)
    weight = [rank**-a for rank in range(1, size["E"] + 1)]
    below = [rank for rank, count in enumerate(load) if count < size["T"]]
    total, scale = sum(load[rank] for rank in below), sum(weight[rank] for rank in below)
    for rank in below:
        assert abs(load[rank] - total * weight[rank] / scale) < 1.01 + 0.01 * load[rank]


@SOME
@given(sizes(), st.floats(0, 1), st.integers(0, 99))
def test_lognormal_hits_its_maxvio(size, part, seed):
    T, E, K = size["T"], size["E"], size["K"]
    maxvio = part * (E / K - 1)
    load = load_of(make_workload(f"lognormal(maxvio={maxvio})", **size, seed=seed))
    wanted = (1 + maxvio) * T * K / E
    # the closest whole number that some load of T * K pairs over E experts can have as its largest
    assert max(load) in {math.floor(wanted), math.ceil(wanted), -(-T * K // E)}
    assert abs(max(load) - wanted) <= 0.5 + 1e-6 or max(load) == -(-T * K // E)


@pytest.mark.parametrize("maxvio", [0.1, 0.5, 1, 2, 4, 8, 15])
@pytest.mark.parametrize("T", [4096, 100_000])
def test_lognormal_within_one_percent(maxvio, T):
    for seed in range(3):
        workload = make_workload(f"maxvio({maxvio})", T=T, E=128, K=8, W=8, seed=seed)
        half_a_pair = 0.5 / (T * 8 / 128)
        violation = workload.statistics().max_violation.item()
        assert violation == pytest.approx(maxvio, rel=0.01, abs=half_a_pair + 1e-12)


def test_lognormal_is_lognormal_with_one_sigma_for_all():
    T, E, K = 10**6, 64, 4
    sizes = {"T": T, "E": E, "K": K, "W": 1, "seed": 0, "step": 0}
    batch = Batch(**sizes, steady=Draws("model"), draws=Draws("step"))
    load = np.bincount(np.asarray(lognormal(batch, maxvio=6).expert_TK).ravel(), minlength=E)
    assert load.max() == 7 * T * K / E
    # the logarithm of every load, the largest too, is on one line over the normal draws
    z = Draws("model").normal(E)
    sigma, offset = np.polyfit(z, np.log(load), 1)
    assert 0.5 < sigma < 3
    np.testing.assert_allclose(np.log(load), sigma * z + offset, atol=5e-3)


def test_normal_draws_are_normal():
    z = Draws("z").normal(20_000)
    # standard errors of mean, deviation, skewness and kurtosis: 0.007, 0.005, 0.017, 0.035
    assert abs(z.mean()) < 0.03 and abs(z.std() - 1) < 0.02
    assert abs((z**3).mean()) < 0.07 and abs((z**4).mean() - 3) < 0.14


@pytest.mark.parametrize("name", ["khot(4)", "rotating(4)"])
def test_a_hot_set_takes_everything_evenly(name):
    load = load_of(make_workload(name, **REFERENCE, step=3))
    assert sorted(load) == [0] * 28 + [256] * 4
    load = load_of(make_workload(name.replace(")", ",share=0.75)"), **REFERENCE))
    assert sum(sorted(load)[-4:]) == 768 and max(sorted(load)[:-4]) - min(load) <= 1


def test_the_same_heat_in_different_places():
    hot = {name: make_workload(name, **REFERENCE, step=1) for name in ("W1", "W2", "W3", "W6")}
    assert {tuple(sorted(load_of(workload))) for workload in hot.values()} == {(16,) * 28 + (144,) * 4}
    places = [expert for expert, count in enumerate(load_of(hot["W2"])) if count == 144]
    assert len({place // 4 for place in places}) == 1
    places = [expert for expert, count in enumerate(load_of(hot["W3"])) if count == 144]
    assert len({place // 4 for place in places}) == 4
    assert max(ranks_of(hot["W2"])) == 576 and max(ranks_of(hot["W3"])) == 144 + 3 * 16


def test_one_expert_is_everybodys_first_choice():
    workload = make_workload("one_expert", **REFERENCE)
    first = workload.routing.expert_TK[:, 0]
    assert bool((first == first[0]).all())
    assert workload.statistics().max_over_mean.item() == 16  # E / K
    others = sorted(load_of(workload))[:-1]
    assert max(others) - min(others) <= 1


@SOME
@given(sizes(min_ranks=2), st.integers(0, 99))
def test_the_zero_rank_is_really_zero(size, seed):
    if not feasible("zero_expert_rank", **size):
        return
    T, E, K, W = size.values()
    ranks = sorted(ranks_of(make_workload("zero_expert_rank", **size, seed=seed)))
    assert ranks[0] == 0 and ranks[-1] - ranks[1] <= 1
    if T * K >= E:
        assert load_of(make_workload("zero_expert_rank", **size, seed=seed)).count(0) == E // W


def test_rotating_moves_and_khot_stays():
    def hot(name: str, step: int, **other: int) -> set[int]:
        load = load_of(make_workload(name, **{**REFERENCE, **other}, step=step))
        return {expert for expert, count in enumerate(load) if count}

    visited = [hot("rotating(4)", step) for step in range(8)]
    assert set.union(*visited) == set(range(32)) and sum(map(len, visited)) == 32
    assert hot("rotating(4)", 8) == visited[0]
    assert len({frozenset(hot("khot(4)", step, T=64 + step)) for step in range(8)}) == 1


def test_burst_bursts():
    tops = [
        make_workload("burst(4)", **REFERENCE, step=step).statistics().max_over_mean.item()
        for step in range(9)
    ]
    assert tops == [16, 1, 1, 1, 16, 1, 1, 1, 16]
    load = sorted(load_of(make_workload("burst(4,n=2)", T=300, E=16, K=4)))
    assert load[-2:] == [300, 300] and max(load[:-2]) - min(load) <= 1


def test_sources_are_ragged_and_prefer_their_own_experts():
    workload = make_workload("source_ragged(own=0.75)", T=2040, E=32, K=2, W=8)
    assert sorted(workload.tokens_W) == [8, 16, 32, 64, 128, 256, 512, 1024]
    start = 0
    for rank, tokens in enumerate(workload.tokens_W):
        expert_TK = workload.routing.expert_TK[start : start + tokens]
        assert int((expert_TK // 4 == rank).sum()) == round(0.75 * tokens * 2)
        start += tokens


@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1])
def test_correlated_neighbours_share_experts(p):
    T, E, K = 20_001, 32, 2
    expert_TK = make_workload(f"correlated({p})", T=T, E=E, K=K).routing.expert_TK
    now, before = expert_TK[1:, :, None], expert_TK[:-1, None, :]
    overlap = (now == before).any(2).double().mean().item()
    assert overlap == pytest.approx(p + (1 - p) * K / E, rel=0.01, abs=0.005)
    repeats = int((expert_TK[1:] == expert_TK[:-1]).all(1).sum())
    assert repeats >= round(p * (T - 1))


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_smallest_batches(name):
    for T in (0, 1, 2):
        workload = make_workload(name, T=T, E=32, K=2, W=8)
        assert workload.routing.validate().num_tokens == T
        assert all(
            value is None or math.isfinite(value) for value in workload.statistics().to_dict().values()
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zipff(1)", "'zipf'"),
        ("ballanced", "'balanced'"),
        ("W9", "uniform, balanced"),
        ("", "workload"),
        ("zipf(1", "cannot read"),
        ("zipf", "zipf(1.2)"),
        ("zipf(one)", "zipf's a is 'one'"),
        ("zipf(nan)", "a number"),
        ("zipf(-1)", "between 0"),
        ("zipf(1,2)", "each once"),
        ("zipf(1,a=2)", "each once"),
        ("zipf(b=2)", "'b=2'"),
        ("balanced(3)", "no parameters"),
        ("khot(2.5)", "whole number"),
        ("khot(0)", "between 1 and 32"),
        ("khot(1)", "at most 0.5"),
        ("khot(4,share=0.1)", "0.125"),
        ("lognormal", "lognormal(maxvio=4)"),
        ("lognormal(maxvio=15.1)", "at most 15"),
        ("maxvio(-1)", "from 0"),
        ("hot_rank(share=1.5)", "at most 1"),
        ("burst(0)", "at least 1"),
        ("burst(2,n=3)", "between 1 and 2"),
        ("correlated(2)", "between 0 and 1"),
        ("trace", "needs file"),
        ("trace(/no/such.safetensors)", "/no/such.safetensors"),
    ],
)
def test_mistakes_in_names_are_one_line(name, reason):
    with pytest.raises(ValueError) as caught:
        make_workload(name, **REFERENCE)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"K": 33}, "K must be"),
        ({"K": 0}, "K must be"),
        ({"T": -1}, "negative"),
        ({"W": 5}, "divisor of 32"),
        ({"W": 0}, "divisor of 32"),
    ],
)
def test_mistakes_in_sizes_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        make_workload("balanced", **{**REFERENCE, **change})


@pytest.mark.parametrize("name", ["hot_rank", "spread_hot", "zero_expert_rank", "source_ragged", "W2"])
def test_ranks_are_needed(name):
    with pytest.raises(ValueError, match="W of at least"):
        make_workload(name, T=8, E=8, K=2)


def test_names_have_one_spelling():
    spellings = {
        " zipf( a = 1.20 ) ": "zipf(1.2)",
        "maxvio(4.0)": "lognormal(maxvio=4)",
        "W7": "burst(8,n=1)",
    }
    spellings |= {"khot(n=4)": "khot(4,share=1)", "burst(n=2, p=3)": "burst(3,n=2)", "W0": "balanced"}
    for spelling, name in spellings.items():
        assert make_workload(spelling, **REFERENCE).name == name
    assert EXAMPLES.keys() == FAMILIES.keys()


def test_list_draws_every_workload():
    text = mrb("list", "workloads").stdout
    assert "T=512, E=32, K=2, W=8" in text
    for name in EXAMPLES.values():
        assert f"\n  {name} " in text, name
    assert re.search(r"[·]{28}|[▂]{28}", text) and "max/mean 16.00" in text and "also W5" in text
    listed = mrb_json("list", "workloads")
    assert listed.keys() == {"workloads"} and listed["workloads"].keys() == FAMILIES.keys()
    for family, one in listed["workloads"].items():
        if family == "trace":
            assert one["reference"] is None
            continue
        workload = make_workload(one["example"], **REFERENCE)
        assert one["reference"]["load"] == load_of(workload) and one["reference"]["name"] == workload.name
        assert one["reference"]["checksum"] == workload.checksum
        bars = "".join(re.findall(rf"^  {re.escape(one['example'])} .*\n +(\S+)", text, re.MULTILINE))
        assert len(bars) == 32
        assert [bar == "·" for bar in bars] == [count == 0 for count in load_of(workload)]
        assert [bar == "█" for bar in bars].count(True) >= 1


def plain_statistics(load: list[int], W: int) -> dict[str, float]:
    """The textbook formulas, in the textbook's way."""
    E, total = len(load), sum(load)
    ranks = [sum(load[w * E // W : (w + 1) * E // W]) for w in range(W)]
    mean = total / E
    return {
        "active_experts": sum(count > 0 for count in load),
        "zero_experts": load.count(0),
        "max_over_mean": max(load) / mean,
        "max_violation": max(load) / mean - 1,
        "max_violation_rank": max(ranks) / (total / W) - 1,
        "cv": math.sqrt(sum((count - mean) ** 2 for count in load) / E) / mean,
        # half the mean absolute difference over the mean
        "gini": sum(abs(a - b) for a in load for b in load) / (2 * E * E * mean),
        "entropy_bits": -sum(count / total * math.log2(count / total) for count in load if count),
    }


@SOME
@given(sizes(), st.integers(0, 99))
def test_statistics_are_the_textbooks(size, seed):
    workload = make_workload("zipf(1)", **{**size, "T": size["T"] + 1}, seed=seed)
    numbers = workload.statistics().to_dict()
    for name, value in plain_statistics(load_of(workload), size["W"]).items():
        assert numbers[name] == pytest.approx(value, abs=1e-12), name
    assert numbers["dropped_pairs"] is numbers["padded_rows"] is numbers["tile_efficiency"] is None


def routing_of(load: list[int]) -> Routing:
    expert_TK = torch.repeat_interleave(torch.arange(len(load)), torch.tensor(load))[:, None]
    return Routing(expert_TK=expert_TK, gate_TK=torch.ones(expert_TK.shape), num_experts=len(load))


def test_the_example_in_the_docstring_is_true():
    routing = routing_of([5, 2, 1, 0])
    plan = make_plan(routing, Layout.block(4))
    numbers = LoadStatistics.of(routing, plan, num_ranks=2).to_dict()
    text = LoadStatistics.__doc__ or ""
    for name, value in numbers.items():
        documented = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
        assert float(documented.split("=")[1].split()[0]) == pytest.approx(value, abs=5e-5), name
    padded = LoadStatistics.of(routing, make_plan(routing, Layout.padded(capacity=2))).to_dict()
    assert (padded["dropped_pairs"], padded["padded_rows"], padded["tile_efficiency"]) == (3, 3, 5 / 8)


@pytest.mark.parametrize("layout", [Layout.compact(), Layout.block(4), Layout.padded(capacity=0)])
def test_statistics_of_nothing_are_finite(layout):
    routing = routing_of([0, 0, 0, 0])
    numbers = LoadStatistics.of(routing, make_plan(routing, layout), num_ranks=2).to_dict()
    assert numbers == {
        **dict.fromkeys(numbers, 0), "zero_experts": 4, "max_over_mean": 1, "tile_efficiency": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="divisor of 4"):
        LoadStatistics.of(routing, num_ranks=3)


def test_statistics_do_not_wait_for_the_device():
    with FakeTensorMode():
        expert_TK = torch.zeros(6, 2, dtype=torch.int64)
        routing = Routing(expert_TK=expert_TK, gate_TK=torch.zeros(6, 2), num_experts=4)
        plan = make_plan(routing, Layout.block(4), impl="argsort")
        statistics = LoadStatistics.of(routing, plan, num_ranks=2)
    assert all(getattr(statistics, name).shape == () for name in statistics.__dataclass_fields__)


@pytest.mark.parametrize(
    "name", ["uniform", "balanced", "lognormal(maxvio=8)", "source_ragged", "one_expert"]
)
def test_time_grows_linearly_in_tokens(name):
    def seconds(T: int) -> float:
        started = time.process_time()
        make_workload(name, T=T, E=512, K=8, W=16)
        return time.process_time() - started

    small = min(seconds(10_000) for _ in range(5))
    large = min(seconds(1_000_000) for _ in range(2))
    # 100 times the tokens; 4 times over linear would be caught, a busy machine forgiven
    assert large < 400 * small and large < 20

"""Plans: the invariants of every layout, for every implementation, on drawn routings."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moe_routing_bench.ops.make_plan.op as make_plan_op
from moe_routing_bench import Layout, Routing, make_plan
from moe_routing_bench.ops.make_plan.op import op

pytestmark = pytest.mark.slow

IMPLEMENTATIONS = op.names()


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    T, E = draw(st.integers(0, 40)), draw(st.integers(1, 12))
    K = draw(st.integers(1, E))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    # a skewed choice: the scores of later experts sink by a drawn amount
    score_TE = torch.rand(T, E, generator=generator) - draw(st.floats(0, 1)) * torch.arange(E)
    expert_TK = score_TE.argsort(dim=1, descending=True)[:, :K]
    absent = draw(st.sampled_from([0.0, 0.3, 1.0]))
    if absent:
        strange = draw(st.sampled_from([-1, E, E + 7, -3]))
        expert_TK = torch.where(torch.rand(T, K, generator=generator) < absent, strange, expert_TK)
    # few distinct gates, so that ties are common
    gate_TK = torch.randint(0, draw(st.sampled_from([2, 1000])), (T, K), generator=generator) / 1000
    return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=bool(absent))


layouts = st.one_of(
    st.just(Layout.compact()),
    st.integers(1, 9).map(Layout.block),
    st.builds(
        lambda capacity, drop: Layout.padded(capacity=capacity, drop=drop),
        st.integers(0, 12),
        st.sampled_from(["position", "probs"]),
    ),
    st.builds(
        lambda factor, drop: Layout.padded(capacity_factor=factor, drop=drop),
        st.sampled_from([0.25, 1.0, 1.1, 2.0]),
        st.sampled_from(["position", "probs"]),
    ),
)


@given(routing=routings(), layout=layouts, name=st.sampled_from(IMPLEMENTATIONS))
@settings(max_examples=1200, deadline=None)
def test_a_plan_keeps_its_invariants(routing: Routing, layout: Layout, name: str) -> None:
    if op.why_not(name, routing, layout) is not None:
        return
    plan = make_plan(routing.validate(), layout, impl=name).validate()
    T, K, E = routing.num_tokens, routing.num_choices, routing.num_experts

    # counts add up, and what was dropped is exactly what is missing
    assert torch.equal(plan.count_E + plan.dropped_E, routing.load_E())
    assert int((plan.row_TK >= 0).sum()) == int(plan.count_E.sum()) == int((plan.pair_R >= 0).sum())
    if layout.kind == "padded":
        capacity = layout.capacity_for(T, K, E)
        assert torch.equal(plan.count_E, routing.load_E().clamp(max=capacity))
    else:
        assert int(plan.dropped_E.sum()) == 0

    # spans cover: every kept pair lies in the span of the expert it chose
    kept_TK = plan.row_TK >= 0
    assert torch.equal(plan.expert_TK()[kept_TK], routing.expert_TK[kept_TK])
    assert torch.equal(plan.expert_TK() >= 0, kept_TK)

    # rows and pairs are inverse
    kept_P = plan.row_TK.flatten()
    assert torch.equal(plan.pair_R[kept_P[kept_P >= 0]], torch.arange(T * K)[kept_P >= 0])
    assert torch.equal(plan.token_R()[kept_P[kept_P >= 0]], (torch.arange(T * K) // K)[kept_P >= 0])


@given(routing=routings(), capacity=st.integers(0, 6))
@settings(max_examples=400, deadline=None)
def test_drops_are_exact_by_both_policies(routing: Routing, capacity: int) -> None:
    for drop in ("position", "probs"):
        plan = make_plan(routing, Layout.padded(capacity=capacity, drop=drop))
        for e in range(routing.num_experts):
            pairs = (routing.expert_TK.flatten() == e).nonzero().flatten()
            gate = routing.gate_TK.flatten()[pairs]
            kept = plan.row_TK.flatten()[pairs] >= 0
            if drop == "position":
                assert torch.equal(kept, torch.arange(len(pairs)) < capacity)
                continue
            # every kept pair beats every dropped one: a larger gate, or an equal one earlier
            for better, worse in ((b, w) for b in kept.nonzero() for w in (~kept).nonzero()):
                assert gate[better] > gate[worse] or (gate[better] == gate[worse] and better < worse)


@given(routing=routings())
@settings(max_examples=300, deadline=None)
def test_the_layouts_agree_where_nothing_is_dropped(routing: Routing) -> None:
    T = routing.num_tokens
    compact, padded, block = (
        make_plan(routing, layout)
        for layout in (Layout.compact(), Layout.padded(capacity=T), Layout.block(4))
    )
    rank = [rank_within_expert(plan) for plan in (compact, padded, block)]
    for plan, other in ((padded, rank[1]), (block, rank[2])):
        assert torch.equal(plan.count_E, compact.count_E)
        assert torch.equal(plan.expert_TK(), compact.expert_TK())
        assert torch.equal(other, rank[0])


def rank_within_expert(plan) -> Tensor:
    kept_TK = plan.row_TK >= 0
    return torch.where(kept_TK, plan.row_TK - plan.offset_E1[plan.expert_TK().clamp(min=0)], -1)


@given(routing=routings(), layout=layouts)
@settings(max_examples=300, deadline=None)
def test_implementations_give_the_same_numbers(routing: Routing, layout: Layout) -> None:
    able = [name for name in IMPLEMENTATIONS if op.why_not(name, routing, layout) is None]
    plans = [op.reference(routing, layout), *(make_plan(routing, layout, impl=name) for name in able)]
    for plan in plans[1:]:
        for field in fields(plan):
            one, other = getattr(plans[0], field.name), getattr(plan, field.name)
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, field.name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(make_plan_op, "SLAB_PAIRS", 100)
    expert_TK = torch.rand(500, 20).argsort(dim=1)[:, :3]
    expert_TK[::7, 1] = -1
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.rand(500, 3), num_experts=20)
    for layout in (Layout.compact(), Layout.block(8), Layout.padded(capacity=60, drop="probs")):
        if op.why_not(name, routing, layout) is not None:
            continue
        got, want = make_plan(routing, layout, impl=name), op.reference(routing, layout)
        assert torch.equal(got.row_TK, want.row_TK) and torch.equal(got.pair_R, want.pair_R)


def test_the_example_in_the_docstring() -> None:
    expert_TK = torch.tensor([[0, 2], [2, 0], [2, -1]])
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.rand(3, 2), num_experts=3)
    plan = make_plan(routing, Layout.block(2))
    assert plan.count_E.tolist() == [2, 0, 3]
    assert plan.offset_E1.tolist() == [0, 2, 2, 6]
    assert plan.pair_R.tolist() == [0, 3, 1, 2, 4, -1, -1, -1]
    assert plan.row_TK.tolist() == [[0, 2], [3, 1], [4, -1]]
    assert plan.token_R().tolist() == [0, 1, 0, 1, 2, -1, -1, -1]
    assert plan.expert_R().tolist() == [0, 0, 2, 2, 2, 2, 3, 3]


def test_the_layout_example_in_the_docstring() -> None:
    expert_TK = torch.tensor([[0], [0], [0], [2]])
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.rand(4, 1), num_experts=3, ragged=False)
    spans = {
        str(layout): make_plan(routing, layout).offset_E1.diff().tolist()
        for layout in (Layout.compact(), Layout.padded(capacity=2), Layout.block(2))
    }
    assert spans == {
        "compact": [3, 0, 1],
        "padded(capacity=2,drop=position)": [2, 2, 2],
        "block(2)": [4, 0, 2],
    }
    assert make_plan(routing, Layout.padded(capacity=2)).dropped_E.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "text",
    ["compact", "block(16)", "padded(capacity=8,drop=probs)", "padded(capacity_factor=1.25,drop=position)"],
)
def test_a_layout_is_read_as_it_is_written(text: str) -> None:
    assert str(Layout.parse(text)) == text
    assert Layout.parse(f" {text} ") == Layout.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "dense", "compact(3)", "block(0)", "block(a)", "padded", "padded()", "padded(capacity=-1)",
     "padded(capacity=2,capacity_factor=1)", "padded(capacity=2,drop=random)", "padded(capacity_factor=nan)",
     "padded(size=3)", "padded(8)", "block(1,2)"],
)  # fmt: skip
def test_a_bad_layout_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|block|capacity|drop"):
        Layout.parse(text)


@pytest.mark.parametrize(
    "T,K,E,factor,capacity",
    [(10, 1, 1, 1.1, 11), (128, 2, 8, 1.25, 40), (100, 1, 3, 1.0, 34), (7, 2, 4, 1.0, 4)],
)
def test_capacity_is_megatrons_formula_without_float_noise(T, K, E, factor, capacity) -> None:
    assert Layout.padded(capacity_factor=factor).capacity_for(T, K, E) == capacity


def test_flags_of_layouts() -> None:
    assert Layout.compact().causal and not Layout.compact().batch_dependent
    assert Layout.padded(capacity=1).causal and Layout.padded(capacity=1).batch_dependent
    assert not Layout.padded(capacity=1, drop="probs").causal


BROKEN = {
    "not inverse": lambda p: replace(p, row_TK=p.row_TK.flip(0)),
    "int64": lambda p: replace(p, pair_R=p.pair_R.to(torch.int32)),
    "rows": lambda p: replace(p, pair_R=p.pair_R[:-1]),
    "shape": lambda p: replace(p, offset_E1=p.offset_E1[:-1]),
    "upwards": lambda p: replace(p, offset_E1=p.offset_E1.flip(0)),
    "count": lambda p: replace(p, count_E=p.count_E + 100),
    "cannot be negative": lambda p: replace(p, dropped_E=p.dropped_E - 1),
    "only the padded": lambda p: replace(p, dropped_E=p.dropped_E + 1),
    "pairs first": lambda p: replace(p, pair_R=p.pair_R.roll(1)),
    "filled=True": lambda p: replace(p, filled=True),
}


@pytest.mark.parametrize("symptom", BROKEN)
def test_a_broken_plan_is_refused_in_words(symptom: str) -> None:
    expert_TK = torch.rand(10, 5).argsort(dim=1)[:, :2]
    expert_TK[3, 1] = -1
    plan = make_plan(Routing(expert_TK=expert_TK, gate_TK=torch.rand(10, 2), num_experts=5), Layout.block(4))
    plan.validate()
    with pytest.raises(ValueError, match=symptom):
        BROKEN[symptom](plan).validate()

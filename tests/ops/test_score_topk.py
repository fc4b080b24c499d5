"""score_topk: its rule, its agreement with the routers it sums up, and the judge that holds others to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_routing_bench import all_ops
from moe_routing_bench.conformance.cases import CASES, Case, KitCell
from moe_routing_bench.conformance.check import check_implementation
from moe_routing_bench.ops.score_topk.op import ScoreRule, reference, score_topk
from moe_routing_bench.routers.router import build

EAGER = all_ops()["score_topk"].get("eager")


def test_the_worked_example() -> None:
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    for rule, gates in (
        (ScoreRule(), [0.731, 0.269]),
        (ScoreRule(renormalise=False), [0.610, 0.225]),
        (ScoreRule(score="sigmoid"), [0.546, 0.454]),
    ):
        gate_TK, expert_TK = score_topk(logits_TE, None, 2, rule)
        assert expert_TK.tolist() == [[0, 1]]
        torch.testing.assert_close(gate_TK, torch.tensor([gates]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "router,options,rule",
    [
        ("softmax_topk", {}, ScoreRule()),
        ("softmax_topk", {"order": "softmax_then_topk"}, ScoreRule(renormalise=False)),
        ("softmax_topk", {"order": "topk_then_softmax"}, ScoreRule()),
        (
            "group_limited",
            {"groups": 4, "keep_groups": 2, "scale": 16.0},
            ScoreRule(groups=4, keep_groups=2, scale=16.0, renormalise=False),
        ),
        (
            "sigmoid_bias",
            {"groups": 4, "keep_groups": 2, "scale": 2.5},
            ScoreRule(score="sigmoid", groups=4, keep_groups=2, group_score="top2_sum", scale=2.5),
        ),
        ("sigmoid_bias", {"score": "sqrtsoftplus"}, ScoreRule(score="sqrtsoftplus")),
    ],
)
def test_routers_are_this_with_different_rules(router: str, options: dict[str, Any], rule: ScoreRule) -> None:
    made = build(router, 12, 12, 3, **options)
    x_TD = torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    bias_E = None
    if router == "sigmoid_bias":
        bias_E = torch.linspace(-0.2, 0.2, 12)
        made.bias_E.copy_(bias_E)  # type: ignore[union-attr, operator]
    routing = made(x_TD)
    gate_TK, expert_TK = score_topk(routing.logits_TE, bias_E, 3, rule)  # type: ignore[union-attr, arg-type]
    assert torch.equal(expert_TK, routing.expert_TK)  # type: ignore[union-attr]
    torch.testing.assert_close(gate_TK, routing.gate_TK)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong,told",
    [
        ({"score": "tanh"}, "tanh"),
        ({"group_score": "mean"}, "mean"),
        ({"scale": 0.0}, "scale"),
        ({"groups": 2, "keep_groups": 3}, "keep_groups"),
    ],
)
def test_a_rule_that_is_none_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ScoreRule(**wrong)


@pytest.mark.parametrize(
    "rule,told",
    [
        (ScoreRule(groups=3), "divide"),
        (ScoreRule(groups=4), "cannot give"),
        (ScoreRule(groups=8, keep_groups=3, group_score="top2_sum"), "at least 2"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: ScoreRule, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        score_topk(torch.zeros(2, 8), None, 3, rule)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def broken(change: str):
    def run(logits_TE, bias_E, K, rule):
        if change == "bias forgotten":
            return reference(logits_TE, None, K, rule)
        if change == "groups forgotten":
            return reference(logits_TE, bias_E, K, replace(rule, groups=1, keep_groups=1))
        if change == "scale forgotten":
            return reference(logits_TE, bias_E, K, replace(rule, scale=1.0))
        gate_TK, expert_TK = reference(logits_TE, bias_E, K, rule)
        if change == "higher id first":
            turned_TE, turned_E = logits_TE.flip(1), None if bias_E is None else bias_E.flip(0)
            gate_TK, turned_TK = reference(turned_TE, turned_E, K, rule)
            return gate_TK, logits_TE.shape[1] - 1 - turned_TK
        if change == "an expert twice":
            return gate_TK, expert_TK[:, :1].expand(-1, K).contiguous()
        if change == "out of range":
            return gate_TK, expert_TK + logits_TE.shape[1]
        return gate_TK.detach() if change == "no gradient" else gate_TK * 1.01, expert_TK

    return run


@pytest.mark.parametrize(
    "change,case,told",
    [
        ("bias forgotten", "sigmoid_bias", "expert_TK"),
        ("groups forgotten", "softmax_groups", "expert_TK"),
        ("scale forgotten", "scaled_softmax", "gate_TK"),
        ("higher id first", "tied_scores", "expert_TK"),
        ("an expert twice", "plain", "expert_TK"),
        ("out of range", "plain", "expert_TK"),
        ("no gradient", "plain", "no gradient reaches logits_TE"),
        ("one percent more", "plain", "gate_TK"),
    ],
)
def test_the_judge_sees(change: str, case: str, told: str) -> None:
    cell = KitCell(op="score_topk", spec=change, case=case_named(case), layout="-", dtype="float32")
    outcome = check_implementation(replace(EAGER, run=broken(change)), cell)
    assert outcome.status == "failed" and told in outcome.sentences[0], outcome


def test_the_judge_lets_a_choice_differ_by_rounding_alone() -> None:
    """Scores that differ by less than float32 rounds: the other order is as good, with its own gates."""
    case = Case(name="apart", guards="-", T=1, E=2, K=2, rule=ScoreRule(score="sigmoid"), ops=("score_topk",))

    def swapped(logits_TE, bias_E, K, rule):
        gate_TK, expert_TK = reference(logits_TE, bias_E, K, rule)
        return gate_TK.flip(1), expert_TK.flip(1)

    cell = KitCell(op="score_topk", spec="swapped", case=case, layout="-", dtype="float32")
    assert check_implementation(replace(EAGER, run=swapped), cell).status == "failed", (
        "far apart: not allowed"
    )
    near = replace(case, name="near", far_logits=-60.0)
    assert check_implementation(
        replace(EAGER, run=swapped), replace(cell, case=near)
    ).status == "passed", "both scores are below 1e-15"  # fmt: skip

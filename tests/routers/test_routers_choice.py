"""Sigmoid with bias, group limits, top-p, ReLU and token rounding against their formulas as loops."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.routers.group_limited import GroupLimitedRouter
from moe_routing_bench.routers.groups import RULES, limit_to_groups
from moe_routing_bench.routers.losses import deepseek_loss, switch_loss
from moe_routing_bench.routers.relu import ReLURouter
from moe_routing_bench.routers.sigmoid_bias import SCORES, SigmoidBiasRouter
from moe_routing_bench.routers.token_rounding import ROUNDINGS, TokenRoundingRouter, rounded
from moe_routing_bench.routers.top_p import TopPRouter
from plain_loops import (
    F64,
    all_chosen,
    assert_finite_gradients,
    chosen,
    largest,
    logits_of,
    sigmoid,
    softmax,
    with_identity,
)

INF = float("inf")


def scores_of(row: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [sigmoid(z) for z in row]
    return [math.sqrt(math.log1p(math.exp(z))) for z in row] if score == "sqrtsoftplus" else softmax(row)


def limited(row: list[float], K: int, groups: int, keep: int, rule: str) -> list[float]:
    size = len(row) // groups
    best = {"max": 1, "top2_sum": 2, "topk_sum": K // keep}[rule]
    totals = [sum(sorted(row[g * size : g * size + size], reverse=True)[:best]) for g in range(groups)]
    kept = largest(totals, keep)
    return [score if e // size in kept else -INF for e, score in enumerate(row)]


# groups


def test_groups_by_hand_with_ties() -> None:
    score_TE = torch.tensor([[0.5, 0.1, 0.4, 0.4], [0.3, 0.1, 0.1, 0.3]])
    best = limit_to_groups(score_TE, 2, 2, 1, "max")
    pair = limit_to_groups(score_TE, 2, 2, 1, "top2_sum")
    expected = [[0.5, 0.1, -INF, -INF], [0.3, 0.1, -INF, -INF]]  # equal groups: the lower one
    assert torch.equal(best, torch.tensor(expected))
    assert torch.equal(pair, torch.tensor([[-INF, -INF, 0.4, 0.4], expected[1]]))
    assert torch.equal(limit_to_groups(score_TE, 2, 2, 1, "topk_sum"), pair)  # K // keep = 2
    assert torch.equal(limit_to_groups(score_TE, 1, 2, 1, "topk_sum"), best)
    assert limit_to_groups(score_TE, 2, 2, 2, "max") is score_TE


@pytest.mark.parametrize("rule", RULES)
def test_groups_against_loops(rule: str) -> None:
    # few values, so that groups tie often
    score_TE = torch.randint(-2, 3, (60, 12)).to(F64)
    for K, groups, keep in ((4, 4, 2), (6, 6, 3), (3, 2, 1)):
        expected = [limited(row, K, groups, keep, rule) for row in score_TE.tolist()]
        assert limit_to_groups(score_TE, K, groups, keep, rule).tolist() == expected


# sigmoid with bias


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("groups", [(1, 1, "top2_sum"), (4, 2, "top2_sum"), (4, 2, "topk_sum")])
def test_sigmoid_bias_against_loops(score: str, renormalise: bool, groups: tuple[int, int, str]) -> None:
    num_groups, keep, rule = groups
    router = SigmoidBiasRouter(
        6, 8, 3, score=score, renormalise=renormalise, groups=num_groups, keep_groups=keep, group_score=rule,
        scale=2.5, dtype=F64, loss_weights={"switch": 1.0, "deepseek": 1.0},
    )  # fmt: skip
    router.bias_E += 0.3 * torch.randn(8)
    x_TD = 30 * torch.randn(12, 6)
    routing = router(x_TD, TokenInfo(num_sequences=3))
    bias = router.bias_E.tolist()
    share, plain = [], []
    moved = 0
    for t, row in enumerate(logits_of(router, x_TD)):
        s = scores_of(row, score)
        biased = limited([a + b for a, b in zip(s, bias, strict=True)], 3, num_groups, keep, rule)
        top = largest(biased, 3)
        total = sum(s[e] for e in top) + 1e-20 if renormalise else 1
        assert routing.expert_TK[t].tolist() == top
        assert routing.gate_TK[t].tolist() == pytest.approx([2.5 * s[e] / total for e in top], rel=1e-9)
        share.append([v / sum(s) for v in s])
        plain.append(largest(s, 3))
        moved += plain[-1] != top
    assert moved > 3, "the bias must matter for this to be a test"
    # the losses count without bias and groups
    score_TE, plain_TK = torch.tensor(share, dtype=F64), torch.tensor(plain)
    torch.testing.assert_close(routing.losses["switch"], switch_loss(score_TE, plain_TK, 8))
    sequence_wise = deepseek_loss(score_TE, plain_TK, 8, num_sequences=3)
    torch.testing.assert_close(routing.losses["deepseek"], sequence_wise)


def test_sigmoid_bias_ties_and_what_the_bias_does() -> None:
    router = with_identity(SigmoidBiasRouter(4, 4, 2))
    x_TD = torch.tensor([[1.0, 1.0, 1.0, 1.0], [40.0, 50.0, 0.0, 60.0]])
    assert router(x_TD).expert_TK.tolist() == [[0, 1], [0, 1]]  # 40, 50 and 60 are all 1.0 in float32
    router.bias_E.copy_(torch.tensor([-0.1, 0.0, 0.0, 0.1]))
    routing = router(x_TD)
    assert routing.expert_TK.tolist() == [[3, 1], [3, 1]]
    assert routing.gate_TK.tolist() == [[0.5, 0.5], [0.5, 0.5]]  # by s alone
    assert "bias_E" in router.state_dict() and not router.bias_E.requires_grad
    routing.gate_TK.sum().backward()
    assert router.bias_E.tolist() == pytest.approx([-0.1, 0.0, 0.0, 0.1])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_bias_where_every_score_underflows(score: str, renormalise: bool) -> None:
    names = ("switch", "deepseek", "z")
    router = SigmoidBiasRouter(
        4, 4, 2, score=score, renormalise=renormalise, loss_weights=dict.fromkeys(names, 1.0)
    )
    with_identity(router)
    x_TD = torch.tensor([[-200.0, -150.0, -300.0, -151.0], [-45.0, -30.0, -60.0, -50.0]], requires_grad=True)
    # anomaly mode: no NaN may arise even where a mask would hide it
    with torch.autograd.set_detect_anomaly(True):
        routing = router(x_TD)
        assert routing.aux_loss is not None
        (routing.gate_TK.square().sum() + routing.aux_loss).backward()
    assert_finite_gradients(x_TD, router.w_DE)
    if renormalise:
        assert routing.gate_TK.sum(1).tolist() == pytest.approx([1, 1])


def test_gate_sums_are_promised_by_options() -> None:
    assert SigmoidBiasRouter(4, 4, 2).gate_sum == "one"
    assert SigmoidBiasRouter(4, 4, 2, scale=2.5).gate_sum == "any"
    assert SigmoidBiasRouter(4, 4, 2, renormalise=False).gate_sum == "any"
    assert GroupLimitedRouter(4, 4, 2).gate_sum == "at most one"
    assert GroupLimitedRouter(4, 4, 2, renormalise=True).gate_sum == "one"
    assert GroupLimitedRouter(4, 4, 2, scale=16.0).gate_sum == "any"
    assert TopPRouter(4, 4, 2).gate_sum == "at most one"
    assert TopPRouter(4, 4, 2, renormalise=True).gate_sum == "one"


# group-limited softmax


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_group_limited_against_loops(renormalise: bool, rule: str) -> None:
    router = GroupLimitedRouter(
        6, 12, 4, groups=4, keep_groups=2, group_score=rule, renormalise=renormalise, scale=3.0, dtype=F64
    )
    x_TD = 20 * torch.randn(20, 6)
    routing = router(x_TD)
    plain = 0
    for t, row in enumerate(logits_of(router, x_TD)):
        p = softmax(row)
        top = largest(limited(p, 4, 4, 2, rule), 4)
        total = sum(p[e] for e in top) if renormalise else 1
        assert routing.expert_TK[t].tolist() == top
        assert routing.gate_TK[t].tolist() == pytest.approx([3 * p[e] / total for e in top], rel=1e-9)
        plain += top == largest(p, 4)
    assert plain < 15, "the limit must matter for this to be a test"


def test_group_limited_never_leaves_its_groups() -> None:
    router = with_identity(GroupLimitedRouter(6, 6, 3, groups=2, keep_groups=1))
    # p underflows to 0 but for expert 3; masking with 0 would take experts 0 and 1
    routing = router(torch.tensor([[0.0, 0.0, 0.0, 300.0, -9.0, -8.0]]))
    assert routing.expert_TK.tolist() == [[3, 5, 4]]


# top-p


@pytest.mark.parametrize(("p", "most"), [(0.0, None), (0.4, None), (0.7, 3), (0.95, None), (1.0, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_top_p_against_loops(p: float, most: int | None, renormalise: bool) -> None:
    weights = {"switch": 1.0, "hf": 1.0, "entropy": 1.0}
    router = TopPRouter(6, 5, 2, p=p, most=most, renormalise=renormalise, dtype=F64, loss_weights=weights)
    router.double().p.fill_(p)
    x_TD, keep_T = 30 * torch.randn(30, 6), torch.rand(30) < 0.7
    routing = router(x_TD, TokenInfo(mask_T=keep_T))
    count, mean_p, choices, entropy = [0] * 5, [0.0] * 5, 0, 0.0
    for t, row in enumerate(logits_of(router, x_TD)):
        mine = chosen(routing, t)
        if not keep_T[t]:
            assert mine == {}
            continue
        probs = softmax(row)
        taken: list[int] = []
        for e in largest(probs, most or 5):
            if not taken or sum(probs[c] for c in taken) <= p:
                taken.append(e)
        total = sum(probs[e] for e in taken) if renormalise else 1
        assert list(mine) == taken
        assert mine == pytest.approx({e: probs[e] / total for e in taken}, rel=1e-9)
        choices += len(taken)
        entropy -= sum(v * math.log(v) for v in probs)
        for e in range(5):
            count[e] += e in taken
            mean_p[e] += probs[e]
    T = int(keep_T.sum())
    product = 5 * sum(c * m for c, m in zip(count, mean_p, strict=True)) / T
    assert routing.losses["switch"].item() == pytest.approx(product / choices, rel=1e-9)
    assert routing.losses["hf"].item() == pytest.approx(product / T, rel=1e-9)
    assert routing.losses["entropy"].item() == pytest.approx(entropy / T, rel=1e-9)


def test_top_p_at_the_edge() -> None:
    # four equal probabilities, sums exact: one more is taken until the sum is above p, not at p
    for p, number in ((0.0, 1), (0.2, 1), (0.25, 2), (0.5, 3), (0.74, 3), (0.75, 4), (1.0, 4)):
        router = TopPRouter(4, 4, 1, p=p)
        assert all_chosen(router(torch.zeros(1, 4))) == [list(range(number))]
    router.p.fill_(-3.0)  # a controller may overshoot; every token keeps one expert
    assert all_chosen(router(torch.zeros(1, 4))) == [[0]]
    assert "p" in router.state_dict()
    router.p.fill_(0.5)
    assert all_chosen(TopPRouter(4, 4, 1, p=0.5, most=2)(torch.zeros(1, 4))) == [[0, 1]]


def test_top_p_is_monotone_in_p() -> None:
    x_TD = 30 * torch.randn(64, 8)
    router = TopPRouter(8, 8, 2)
    numbers = []
    for p in (0.1, 0.3, 0.6, 0.9):
        router.p.fill_(p)
        numbers.append(router(x_TD).chosen_TK().sum(1))
    for fewer, more in pairwise(numbers):
        assert bool((fewer <= more).all()) and int(fewer.sum()) < int(more.sum())


# ReLU


@pytest.mark.parametrize("most", [None, 3])
def test_relu_against_loops(most: int | None) -> None:
    router = ReLURouter(6, 5, 2, most=most, dtype=F64, loss_weights={"relu": 1.0, "l1": 2.0})
    router.double().strength.fill_(0.25)
    x_TD, keep_T = torch.randn(30, 6), torch.rand(30) < 0.7
    routing = router(x_TD, TokenInfo(mask_T=keep_T))
    count, total = [0] * 5, [0.0] * 5
    for t, row in enumerate(logits_of(router, x_TD)):
        mine = chosen(routing, t)
        if not keep_T[t]:
            assert mine == {}
            continue
        assert list(mine) == [e for e in largest(row, most or 5) if row[e] > 0]
        assert mine == pytest.approx({e: row[e] for e in mine}, rel=1e-9)
        for e in range(5):
            count[e] += e in mine
            total[e] += max(row[e], 0)
    T = int(keep_T.sum())
    relu = 0.25 * 5 * sum(c / (2 * T) * r / T for c, r in zip(count, total, strict=True))
    l1 = 0.25 * sum(total) / T
    assert routing.losses["relu"].item() == pytest.approx(relu, rel=1e-9)
    assert routing.losses["l1"].item() == pytest.approx(l1, rel=1e-9)
    assert routing.aux_loss is not None
    assert routing.aux_loss.item() == pytest.approx(relu + 2 * l1, rel=1e-9)


def test_relu_of_dead_tokens() -> None:
    router = with_identity(ReLURouter(3, 3, 1, loss_weights={"relu": 1.0, "l1": 1.0}))
    assert router.state_dict()["strength"].item() == pytest.approx(1e-8)
    x_TD = torch.tensor([[-1.0, -2.0, 0.0], [2.0, -1.0, 3.0]], requires_grad=True)
    routing = router(x_TD)
    assert all_chosen(routing) == [[], [2, 0]]
    assert routing.gate_TK.tolist() == [[0, 0, 0], [3, 2, 0]]
    assert routing.aux_loss is not None
    (routing.gate_TK.sum() + 1e8 * routing.aux_loss).backward()
    assert_finite_gradients(x_TD, router.w_DE)
    assert x_TD.grad is not None
    assert x_TD.grad[0].tolist() == [0, 0, 0] and bool((x_TD.grad[1, [0, 2]] > 0).all())


# token rounding


def rounding_by_loops(
    rows: list[list[float]], keep: list[bool], K: int, tile: int, rounding: str, most: int
) -> list[dict[int, float]]:
    """Experts and gates of each token, best first."""
    E, tokens = len(rows[0]), [t for t, kept in enumerate(keep) if kept]
    probs = [softmax(row) for row in rows]
    top = [largest(row, K) for row in rows]
    gate = [
        {e: p[e] / (sum(p[c] for c in best) if e in best else 1) for e in range(E)}
        for p, best in zip(probs, top, strict=True)
    ]
    taken: list[dict[int, float]] = [{} for _ in rows]
    for e in range(E):
        chose = [t for t in tokens if e in top[t]]
        whole = {"up": math.ceil, "down": math.floor, "nearest": round}[rounding](len(chose) / tile) * tile
        ranked = sorted(chose, key=lambda t: (-gate[t][e], t))
        ranked += sorted(set(tokens) - set(chose), key=lambda t: (-probs[t][e], t))
        for t in ranked[:whole]:
            taken[t][e] = gate[t][e]
    return [
        {e: mine[e] for e in [e for e in largest(row, E) if e in mine][:most]}
        for row, mine in zip(rows, taken, strict=True)
    ]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("tile", "most"), [(1, None), (4, None), (6, 3), (64, None)])
@pytest.mark.parametrize("masked", [False, True])
def test_token_rounding_against_loops(rounding: str, tile: int, most: int | None, masked: bool) -> None:
    router = TokenRoundingRouter(6, 5, 2, tile=tile, rounding=rounding, most=most, dtype=F64)
    x_TD = 20 * torch.randn(40, 6)
    keep_T = torch.rand(40) < (0.7 if masked else 2)
    routing = router(x_TD, TokenInfo(mask_T=keep_T if masked else None)).validate()
    rows = logits_of(router, x_TD)
    expected = rounding_by_loops(rows, keep_T.tolist(), 2, tile, rounding, most or 5)
    for t, mine in enumerate(expected):
        assert list(chosen(routing, t)) == list(mine)
        assert chosen(routing, t) == pytest.approx(mine, rel=1e-9)
    num_tokens = int(keep_T.sum())
    if most is None:
        for load in routing.load_E().tolist():
            assert load % tile == 0 or load == num_tokens


def test_rounding_is_torch_round_and_exact() -> None:
    count_E = torch.arange(0, 200)
    for tile in (1, 2, 5, 8, 128):
        exact_E = count_E.double() / tile
        assert torch.equal(rounded(count_E, tile, "nearest"), (exact_E.round() * tile).long())
        assert torch.equal(rounded(count_E, tile, "up"), (exact_E.ceil() * tile).long())
        assert torch.equal(rounded(count_E, tile, "down"), (exact_E.floor() * tile).long())
    big_E = torch.tensor([2**40 + 63, 2**40 + 64, 2**40 + 65])
    assert (rounded(big_E, 128, "nearest") - 2**40).tolist() == [0, 0, 128]


def test_token_rounding_by_hand_with_ties() -> None:
    # all four tokens choose expert 0 equally; tokens 2 and 3 like expert 1 equally, better than token 0 does
    x_TD = torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0], [9.0, 2.0, 0.0], [9.0, 2.0, 0.0]])
    down = with_identity(TokenRoundingRouter(3, 3, 1, tile=3, rounding="down"))
    routing = down(x_TD)
    assert all_chosen(routing) == [[0], [0], [0], []]  # of equal gates, the earlier tokens
    up = with_identity(TokenRoundingRouter(3, 3, 1, tile=3, rounding="up"))
    assert all_chosen(up(x_TD)) == [[0], [0], [0], [0]]  # target 6, but there are 4 tokens
    x_TD = torch.cat([x_TD, torch.tensor([[0.0, 9.0, 0.0]])])
    assert all_chosen(up(x_TD)) == [[0], [0], [0, 1], [0, 1], [1, 0]]
    masked = up(x_TD, TokenInfo(mask_T=torch.tensor([1, 1, 0, 1, 1])))
    assert all_chosen(masked) == [[0, 1], [0], [], [0, 1], [1]]


def test_token_rounding_ranks_added_tokens_whose_probability_is_tiny() -> None:
    router = with_identity(TokenRoundingRouter(2, 2, 1, tile=2, rounding="up"))
    # p of expert 1 is about 1e-22, 1e-18 and 1e-20: p - 1 would be -1 for all of them
    x_TD = torch.tensor([[50.0, 0.0], [41.0, 0.0], [46.0, 0.0], [0.0, 9.0]])
    assert all_chosen(router(x_TD)) == [[0], [0, 1], [0], [1, 0]]

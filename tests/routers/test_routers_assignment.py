"""Routers that look at the whole batch, or remember what they saw: against loops, scipy and authors' code."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe_routing_bench.controllers.controller import Counts, controller_for
from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.routers.base_assignment import BaseAssignmentRouter, auction
from moe_routing_bench.routers.expert_choice import ExpertChoiceRouter
from moe_routing_bench.routers.expert_threshold import ExpertThresholdRouter
from moe_routing_bench.routers.quantile import QuantileRouter
from moe_routing_bench.routers.random_fixed import RandomFixedRouter
from moe_routing_bench.routers.router import build
from moe_routing_bench.routers.sinkhorn import SinkhornRouter, balancing_E
from plain_loops import F64, chosen, largest, logits_of, sigmoid, softmax, with_identity

# expert choice


@pytest.mark.parametrize("over", ["batch", "sequence"])
@pytest.mark.parametrize("masked", [False, True])
def test_expert_choice_against_loops(over: str, masked: bool) -> None:
    T, E, K = 14, 5, 2
    router, x_TD = ExpertChoiceRouter(6, E, K, over=over, dtype=F64), 20 * torch.randn(T, 6)
    keep = [t % 3 > 0 or t > 10 for t in range(T)] if masked else [True] * T
    mask_T = torch.tensor(keep) if masked else None
    routing = router(x_TD, TokenInfo(mask_T=mask_T, num_sequences=2)).validate()
    score = [softmax(row) for row in logits_of(router, x_TD)]
    expected: list[dict[int, float]] = [{} for _ in range(T)]
    for group in [range(T)] if over == "batch" else [range(7), range(7, 14)]:
        real = [t for t in group if keep[t]]
        for e in range(E):
            for t in sorted(real, key=lambda t: (-score[t][e], t))[: math.ceil(len(real) * K / E)]:
                expected[t][e] = score[t][e]
    for t in range(T):
        best_first = sorted(expected[t], key=lambda e: -expected[t][e])
        assert chosen(routing, t) == pytest.approx(expected[t], rel=1e-9)
        assert list(chosen(routing, t)) == best_first
    assert len({len(row) for row in expected}) > 2


@pytest.mark.parametrize(("T", "E", "K"), [(64, 8, 2), (65, 8, 1), (7, 3, 3), (3, 16, 2), (1, 4, 2)])
def test_expert_choice_gives_every_expert_exactly_the_same(T: int, E: int, K: int) -> None:
    router, x_TD = ExpertChoiceRouter(6, E, K), torch.randn(T, 6)
    assert router(x_TD).load_E().tolist() == [math.ceil(T * K / E)] * E
    mask_T = torch.arange(T) % 4 > 0
    real = int(mask_T.sum())
    assert router(x_TD, TokenInfo(mask_T=mask_T)).load_E().tolist() == [math.ceil(real * K / E)] * E
    # with nothing to tell tokens apart the earlier ones are taken, by every expert
    tied = router(torch.ones(T, 6))
    assert tied.chosen_TK().sum(1).tolist() == [E * (t < math.ceil(T * K / E)) for t in range(T)]


def test_expert_choice_most_keeps_the_best_of_what_took_the_token() -> None:
    x_TD = 20 * torch.randn(40, 6)
    torch.manual_seed(1)
    whole = ExpertChoiceRouter(6, 8, 3)
    torch.manual_seed(1)
    capped = ExpertChoiceRouter(6, 8, 3, most=3)
    a, b = whole(x_TD), capped(x_TD)
    assert torch.equal(a.expert_TK[:, :3], b.expert_TK) and torch.equal(a.gate_TK[:, :3], b.gate_TK)
    assert a.expert_TK.shape[1] == 8 and bool((a.expert_TK[:, 3] >= 0).any())
    assert (whole.groups, capped.groups) == ("equal", "uneven")


def test_expert_choice_and_soft_moe_let_the_last_token_reach_the_first() -> None:
    """The leak that forbids them in a decoder, and that a causal relative does not have."""
    T, E = 8, 2
    x_TD = torch.zeros(T, 4)
    x_TD[:, 0] = torch.arange(T, 0, -1)  # the first token wants expert 0 the most
    other_TD = x_TD.clone()
    other_TD[-1, 0] = 100.0
    w_DE = torch.tensor([[1.0, -1.0], [0, 0], [0, 0], [0, 0]])
    choice, threshold = ExpertChoiceRouter(4, E, 1), ExpertThresholdRouter(4, E, 1)
    for router in (choice, threshold):
        with torch.no_grad():
            router.w_DE.copy_(w_DE)
    before, after = choice(x_TD).expert_TK, choice(other_TD).expert_TK
    assert 0 in before[3] and 0 not in before[7]  # expert 0 takes tokens 0 to 3
    assert 0 not in after[3] and 0 in after[7]  # token 7 has pushed token 3 out
    soft = build("soft_moe", 4, E, 1)
    assert not torch.equal(soft(x_TD).dispatch_BNS[0, 0], soft(other_TD).dispatch_BNS[0, 0])
    assert torch.equal(threshold(x_TD).expert_TK[:7], threshold(other_TD).expert_TK[:7])


# expert threshold


def test_expert_threshold_against_loops() -> None:
    T, E, K = 17, 6, 2
    for most, fallback in ((None, False), (3, False), (None, True)):
        router = ExpertThresholdRouter(8, E, K, most=most, fallback_top1=fallback, dtype=F64)
        router.threshold_E.copy_(0.1 + 0.1 * torch.rand(E))
        x_TD = 2 * torch.randn(T, 8)
        routing, nowhere = router.eval()(x_TD).validate(), 0
        for t, row in enumerate(logits_of(router, x_TD)):
            beyond = [z - float(c) for z, c in zip(row, router.threshold_E, strict=True)]
            reached = [e for e in largest(row, E) if beyond[e] >= 0]
            nowhere += not reached
            if fallback and not reached:
                reached = largest(beyond, 1)
            expected = {e: sigmoid(row[e]) for e in reached[: most or E]}
            assert chosen(routing, t) == pytest.approx(expected, rel=1e-9)
            assert list(chosen(routing, t)) == reached[: most or E]
        assert nowhere > 0


def test_a_token_exactly_on_the_threshold_goes_there() -> None:
    router = with_identity(ExpertThresholdRouter(2, 2, 1))
    router.threshold_E.copy_(torch.tensor([0.5, 0.25]))
    assert router(torch.tensor([[0.5, 0.0], [0.25, 0.25]])).expert_TK.tolist() == [[0, -1], [1, -1]]


@pytest.mark.parametrize("name", ["expert_threshold", "quantile"])
def test_what_a_batch_leaves_behind(name: str) -> None:
    T, E, K = 23, 5, 2
    router = build(name, 6, E, K, dtype=F64)
    state = "threshold_E" if name == "expert_threshold" else "beta_E"
    router.get_buffer(state).copy_(0.05 * torch.randn(E))
    before_E = router.get_buffer(state).clone()
    total = [0.0] * E
    for num_real in (T, 16, 4, 1, 0):
        x_TD = 20 * torch.randn(T, 6)
        keep = [t % T < num_real for t in range(T)]
        mask_T = None if num_real == T else torch.tensor(keep)
        router(x_TD, TokenInfo(mask_T=mask_T))
        real = [row for row, kept in zip(logits_of(router, x_TD), keep, strict=True) if kept]
        n = num_real * K // E
        for e in range(E):
            if not real:
                continue
            if name == "expert_threshold":
                total[e] += sorted((row[e] for row in real), reverse=True)[max(n, 1) - 1]
            else:
                above = []
                for row in real:
                    shifted = [z - float(b) for z, b in zip(row, before_E, strict=True)]
                    above.append(row[e] - sorted(shifted, reverse=True)[K])
                total[e] += sorted(above, reverse=True)[n]
    router.eval()(torch.randn(T, 6))
    router.train()(torch.randn(0, 6))
    assert router.get_buffer(f"seen_{state}").tolist() == pytest.approx(total, rel=1e-5)
    assert router.get_buffer("seen_batches").item() == 4
    assert torch.equal(router.get_buffer(state), before_E)
    assert {state, f"seen_{state}", "seen_batches"} <= set(router.state_dict())


@pytest.mark.parametrize("name", ["expert_threshold", "quantile"])
def test_its_controller_balances_skewed_logits(name: str) -> None:
    T, E, K = 512, 8, 2
    router = with_identity(build(name, 8, E, K))
    lean_D = torch.linspace(-2, 2, 8)
    controller, first = controller_for(router), 0.0
    for step in range(12):
        routing = router(torch.randn(T, 8) + lean_D)
        share_E = routing.load_E() / (T * K / E)
        first = share_E.max().item() if step == 0 else first
        controller.step(Counts.of(routing))
    assert first > 2
    assert share_E.max().item() < 1.3 and share_E.min().item() > 0.7


# quantile balancing


@pytest.mark.parametrize("gates", ["softmax_of_chosen", "softmax", "sigmoid"])
@pytest.mark.parametrize("K", [1, 3, 5])
def test_quantile_against_loops(gates: str, K: int) -> None:
    router, x_TD = QuantileRouter(6, 5, K, gates=gates, dtype=F64), 20 * torch.randn(9, 6)
    router.beta_E.copy_(torch.randn(5))
    routing = router(x_TD).validate()
    for t, row in enumerate(logits_of(router, x_TD)):
        top = largest([z - float(b) for z, b in zip(row, router.beta_E, strict=True)], K)
        expected = [softmax(row)[e] for e in top]
        if gates == "softmax_of_chosen":
            expected = softmax([row[e] for e in top])
        if gates == "sigmoid":
            expected = [sigmoid(row[e]) for e in top]
            expected = [g / sum(expected) for g in expected] if K > 1 else expected
        assert routing.expert_TK[t].tolist() == top
        assert routing.gate_TK[t].tolist() == pytest.approx(expected, rel=1e-9)
    assert router.seen_batches.item() == (K < 5)


def test_quantile_offsets_are_megatrons_when_the_numbers_divide() -> None:
    T, E, K = 40, 8, 2
    router, x_TD = QuantileRouter(6, E, K), 20 * torch.randn(T, 6)
    router(x_TD)
    scores = x_TD @ router.w_DE.detach()
    alpha = scores.topk(K + 1, dim=1).values[:, -1:]
    beta = (scores - alpha).topk(T * K // E + 1, dim=0).values[-1]
    torch.testing.assert_close(router.seen_beta_E, beta)
    assert ((scores - alpha) > beta).sum(0).max() <= T * K // E


# Sinkhorn


def plan_by_division(z_TE: Tensor, iterations: int) -> Tensor:
    """Megatron's iteration on exp(z), without its epsilon and its stopping rule."""
    kernel_TE = z_TE.double().exp()
    d1_E = torch.ones(z_TE.shape[1], dtype=F64)
    for _ in range(iterations):
        d0_T = 1 / len(kernel_TE) / (kernel_TE @ d1_E)
        d1_E = 1 / len(d1_E) / (d0_T @ kernel_TE)
    return d0_T[:, None] * kernel_TE * d1_E


@pytest.mark.parametrize("K", [1, 2])
def test_sinkhorn_against_the_plain_iteration(K: int) -> None:
    T, E = 40, 5
    router, x_TD = SinkhornRouter(6, E, K, dtype=F64, iterations=7), 30 * torch.randn(T, 6)
    z_TE = torch.tensor(logits_of(router, x_TD))
    plan = plan_by_division(z_TE, 7).tolist()
    training, plain = router.train()(x_TD), router.eval()(x_TD)
    assert not torch.equal(training.expert_TK, plain.expert_TK)
    for t, row in enumerate(z_TE.tolist()):
        for routing, by in ((training, plan[t]), (plain, row)):
            top = largest(by, K)
            gates = [sigmoid(row[e]) if K == 1 else softmax(row)[e] for e in top]
            assert routing.expert_TK[t].tolist() == top
            assert routing.gate_TK[t].tolist() == pytest.approx(gates, rel=1e-5)


def test_sinkhorn_iterates_as_often_as_told() -> None:
    z_TE = 3 * torch.randn(20, 4, dtype=F64)
    for iterations in (1, 2, 5):
        plan_TE = plan_by_division(z_TE, iterations)
        got_TE = (z_TE + balancing_E(z_TE, iterations)).softmax(1)
        torch.testing.assert_close(got_TE, plan_TE / plan_TE.sum(1, keepdim=True))


def test_sinkhorn_plan_is_balanced_and_masked_tokens_have_no_share() -> None:
    T, E = 256, 8
    z_TE = 3 * (torch.randn(T, E) + torch.randn(E))
    g_E = balancing_E(z_TE, 16)
    plan_TE = (z_TE + g_E).softmax(1)
    torch.testing.assert_close(plan_TE.sum(0), torch.full((E,), T / E), rtol=1e-3, atol=0)
    load_E = (z_TE + g_E).argmax(1).bincount(minlength=E)
    assert z_TE.argmax(1).bincount(minlength=E).max() > 2 * T / E > 1.6 * load_E.max()
    mask_T = torch.arange(T) % 3 > 0
    z_TE[~mask_T] = 1e4
    torch.testing.assert_close(balancing_E(z_TE, 16, mask_T), balancing_E(z_TE[mask_T], 16))
    assert bool(balancing_E(z_TE, 4, torch.zeros(T, dtype=torch.bool)).eq(0).all())
    assert bool(balancing_E(1e4 * torch.randn(T, E), 16).isfinite().all())


# BASE


def best_total(z_TE: Tensor) -> float:
    T, E = z_TE.shape
    slots = z_TE.double().repeat_interleave(math.ceil(T / E), dim=1).numpy()
    rows, columns = linear_sum_assignment(slots, maximize=True)
    return float(slots[rows, columns].sum())


@pytest.mark.parametrize(("T", "E"), [(40, 8), (41, 8), (7, 8), (1, 3), (16, 16), (30, 2), (5, 1)])
@pytest.mark.parametrize("slack", [0.2, 1 / 50, 1e-4])
def test_auction_against_scipy(T: int, E: int, slack: float) -> None:
    for lean in (0.0, 3.0):
        z_TE = torch.randn(T, E) + lean * torch.randn(E)
        expert_T = auction(z_TE, slack=slack)
        load = expert_T.bincount(minlength=E).tolist()
        assert len(load) == E and max(load) <= math.ceil(T / E)
        assert T % E or load == [T // E] * E
        total = z_TE.double().gather(1, expert_T.unsqueeze(1)).sum().item()
        eps = max(slack * (z_TE.max() - z_TE.min()).item(), 1e-4)
        assert total >= best_total(z_TE) - T * eps
    if slack == 1e-4:
        assert total == pytest.approx(best_total(z_TE), abs=1e-2)


def test_auction_ends_where_it_could_run_for_ever() -> None:
    for z_TE in (
        torch.zeros(24, 4),
        torch.full((24, 4), 1e6),
        torch.tensor([5.0, 0, -5, 1]).repeat(24, 1),
        torch.full((24, 4), float("nan")),
        torch.randn(24, 4).where(torch.rand(24, 4) < 0.8, float("inf")),
        1e30 * torch.randn(24, 4),
        torch.randn(24, 4, dtype=F64).sign() * float("inf"),
    ):
        assert auction(z_TE, slack=1 / 50).bincount(minlength=4).tolist() == [6] * 4


def test_base_assignment_is_balanced_in_training_and_greedy_in_eval() -> None:
    T, E = 40, 8
    router, x_TD = BaseAssignmentRouter(6, E), 20 * torch.randn(T, 6)
    z = logits_of(router, x_TD)
    training, greedy = router.train()(x_TD).validate(), router.eval()(x_TD)
    assert training.load_E().tolist() == [T // E] * E
    for t in range(T):
        assert greedy.expert_TK[t].tolist() == largest(z[t], 1)
        for routing in (training, greedy):
            assert routing.gate_TK[t].item() == pytest.approx(sigmoid(z[t][routing.expert_TK[t]]), rel=1e-4)
    mask_T = torch.arange(T) % 5 > 0
    masked = router.train()(x_TD, TokenInfo(mask_T=mask_T))
    assert masked.load_E().tolist() == [int(mask_T.sum()) // E] * E
    assert torch.equal(masked.expert_TK[mask_T], router(x_TD[mask_T]).expert_TK)
    assert router.host_sync


# random, fixed


@pytest.mark.parametrize("gates", ["softmax", "uniform"])
def test_random_fixed_against_loops(gates: str) -> None:
    router, x_TD = RandomFixedRouter(6, 5, 3, gates=gates, dtype=F64), 20 * torch.randn(9, 6)
    routing = router(x_TD)
    for t, row in enumerate(logits_of(router, x_TD)):
        top = largest(row, 3)
        assert routing.expert_TK[t].tolist() == top
        expected = softmax([row[e] for e in top]) if gates == "softmax" else [1 / 3] * 3
        assert routing.gate_TK[t].tolist() == pytest.approx(expected, rel=1e-9)


def test_random_fixed_learns_nothing_and_repeats_by_seed() -> None:
    router = RandomFixedRouter(64, 32, 2)
    assert not list(router.parameters()) and "w_DE" in router.state_dict()
    torch.manual_seed(99)
    assert torch.equal(router.w_DE, RandomFixedRouter(64, 32, 2).w_DE)
    assert not torch.equal(router.w_DE, RandomFixedRouter(64, 32, 2, seed=1).w_DE)
    assert router.w_DE.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # dynamo's own
@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert_choice", "expert_threshold", "sinkhorn", "quantile"])
def test_training_compiles_into_one_graph(name: str) -> None:
    router, twin = build(name, 8, 8, 2), build(name, 8, 8, 2)
    twin.load_state_dict(router.state_dict())
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    info = TokenInfo(mask_T=torch.arange(16) < 13, num_sequences=2)
    x_TD = torch.randn(16, 8)
    fast, plain = compiled(x_TD, info), twin(x_TD, info)
    assert torch.equal(fast.expert_TK, plain.expert_TK)
    torch.testing.assert_close(fast.gate_TK, plain.gate_TK)
    torch.testing.assert_close(router.state_dict(), twin.state_dict())

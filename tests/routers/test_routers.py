"""Routers and their losses against formulas written out again here, and the checker against lying routers."""

from __future__ import annotations

import math
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.routers.hashed import HashedRouter
from moe_routing_bench.routers.losses import hf_loss, importance_loss, load_loss, switch_loss, z_loss
from moe_routing_bench.routers.noisy_topk import NoisyTopkRouter, chance_TE
from moe_routing_bench.routers.router import GATE_SUMS, Router, all_routers, build, router_in
from moe_routing_bench.routers.soft_moe import SoftMoERouter
from moe_routing_bench.routers.softmax_topk import ORDERS, SoftmaxTopkRouter
from moe_routing_bench.routers.switch import SwitchRouter
from moe_routing_bench.routing import Routing, SoftRouting, TokenInfo

torch.set_num_threads(1)
F64 = torch.float64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(z - max(row)) for z in row]
    return [w / sum(weights) for w in weights]


def largest(row: list[float], K: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:K]


def logits_of(router: Any, x_TD: Tensor) -> list[list[float]]:
    w = router.w_DE.detach().double()
    return [[float(x.double() @ w[:, e]) for e in range(router.E)] for x in x_TD]


def squared_cv(totals: list[float]) -> float:
    mean = sum(totals) / len(totals)
    return sum((v - mean) ** 2 for v in totals) / len(totals) / mean**2


def assert_finite_gradients(*leaves: Tensor) -> None:
    for leaf in leaves:
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


def balanced(E: int, K: int, repeats: int = 1) -> Tensor:
    """T = E * repeats tokens; every expert is chosen K * repeats times."""
    return (torch.arange(E * repeats)[:, None] * K + torch.arange(K)) % E


# the rules


def test_switch_is_the_top_probability() -> None:
    router, x_TD = SwitchRouter(6, 5, 1, dtype=F64), 20 * torch.randn(9, 6)
    routing = router(x_TD)
    for t, row in enumerate(logits_of(router, x_TD)):
        assert routing.expert_TK[t].tolist() == largest(row, 1)
        assert routing.gate_TK[t].item() == pytest.approx(max(softmax(row)), rel=1e-9)
    assert not routing.ragged


def test_switch_jitter_is_for_training_only_and_bounded() -> None:
    router, x_TD = SwitchRouter(6, 5, 1, jitter=0.1, dtype=F64), torch.rand(400, 6)
    torch.nn.init.ones_(router.w_DE)
    plain, jittered = router.eval()(x_TD).logits_TE, router.train()(x_TD).logits_TE
    assert torch.equal(plain, x_TD.double() @ router.w_DE.double())
    ratio = jittered / plain
    assert 0.9 <= ratio.min() < 0.95 and 1.05 < ratio.max() <= 1.1
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("order", ORDERS)
def test_softmax_topk_against_loops(order: str) -> None:
    router, x_TD = SoftmaxTopkRouter(6, 5, 3, order=order, dtype=F64), 20 * torch.randn(9, 6)
    routing = router(x_TD)
    for t, row in enumerate(logits_of(router, x_TD)):
        top = largest(row, 3)
        gates = [softmax(row)[e] for e in top]
        if order == "softmax_then_topk_renormalised":
            gates = [g / sum(gates) for g in gates]
        if order == "topk_then_softmax":
            gates = softmax([row[e] for e in top])
        assert routing.expert_TK[t].tolist() == top
        assert routing.gate_TK[t].tolist() == pytest.approx(gates, rel=1e-9)


def test_renormalising_equals_topk_then_softmax_with_gradients() -> None:
    x_TD = 20 * torch.randn(32, 8)
    weights_TK = torch.randn(32, 3, dtype=F64)
    results = []
    for order in ORDERS[1:]:
        torch.manual_seed(1)
        router, x = SoftmaxTopkRouter(8, 6, 3, order=order, dtype=F64), x_TD.clone().requires_grad_()
        routing = router(x)
        (routing.gate_TK * weights_TK).sum().backward()
        results.append((routing, x.grad, router.w_DE.grad))
    (a, dx_a, dw_a), (b, dx_b, dw_b) = results
    assert torch.equal(a.expert_TK, b.expert_TK)
    torch.testing.assert_close(a.gate_TK, b.gate_TK, rtol=1e-12, atol=0)
    torch.testing.assert_close(dx_a, dx_b)
    torch.testing.assert_close(dw_a, dw_b)


def test_experts_are_chosen_where_probabilities_underflow() -> None:
    router = SoftmaxTopkRouter(4, 4, 3)
    with torch.no_grad():
        router.w_DE.copy_(torch.eye(4))
    routing = router(torch.tensor([[300.0, -50.0, 0.0, -10.0]]))
    assert routing.expert_TK.tolist() == [[0, 2, 3]]


def test_noisy_topk_against_loops() -> None:
    router = NoisyTopkRouter(6, 5, 2, dtype=F64, loss_weights={"importance": 1.0, "load": 1.0})
    torch.nn.init.normal_(router.w_DE)
    torch.nn.init.normal_(router.w_noise_DE)
    x_TD = torch.randn(9, 6)
    clean = logits_of(router, x_TD)
    raw_TE = x_TD.double() @ router.w_noise_DE.detach().double()
    for training in (True, False):
        torch.manual_seed(3)
        noise_TE = torch.randn(9, 5, dtype=F64) * training
        torch.manual_seed(3)
        routing = router.train(training)(x_TD)
        importance, load = [0.0] * 5, [0.0] * 5
        for t in range(9):
            std = [math.log1p(math.exp(raw_TE[t, e])) for e in range(5)]
            h = [clean[t][e] + float(noise_TE[t, e]) * std[e] for e in range(5)]
            top = largest(h, 2)
            gates = softmax([h[e] for e in top])
            assert routing.expert_TK[t].tolist() == top
            assert routing.gate_TK[t].tolist() == pytest.approx(gates, rel=1e-6)
            for e, gate in zip(top, gates, strict=True):
                importance[e] += gate
            for e in range(5):
                threshold = sorted(h[:e] + h[e + 1 :], reverse=True)[1]
                load[e] += 0.5 * (1 + math.erf((clean[t][e] - threshold) / std[e] / math.sqrt(2)))
        assert routing.losses["importance"].item() == pytest.approx(squared_cv(importance), rel=1e-6)
        assert routing.losses["load"].item() == pytest.approx(squared_cv(load), rel=1e-6)


def test_noisy_chance_is_the_chance_of_being_chosen_when_the_noise_is_drawn_again() -> None:
    T, E, K, draws = 3, 5, 2, 40_000
    clean_TE, std_TE = torch.randn(T, E), 0.5 + torch.rand(T, E)
    h_TE = clean_TE + torch.randn(T, E) * std_TE
    value_TK1, expert_TK1 = h_TE.topk(K + 1)
    chance = chance_TE(clean_TE, std_TE, value_TK1, expert_TK1[:, :K])
    for t in range(T):
        for e in range(E):
            redrawn = h_TE[t].repeat(draws, 1)
            redrawn[:, e] = clean_TE[t, e] + torch.randn(draws) * std_TE[t, e]
            frequency = (redrawn.topk(K).indices == e).any(1).float().mean().item()
            assert chance[t, e].item() == pytest.approx(frequency, abs=0.012)  # 4.8 standard errors


def test_noisy_load_is_certain_when_every_expert_is_chosen() -> None:
    router = NoisyTopkRouter(6, 4, 4, loss_weights={"load": 1.0})
    assert router(torch.randn(9, 6)).losses["load"].item() == 0


def test_soft_moe_against_loops_and_keeps_sequences_apart() -> None:
    router = SoftMoERouter(6, 3, 1, slots_per_expert=2, dtype=F64)
    torch.nn.init.constant_(router.scale, 3.0)
    x_TD = torch.randn(8, 6)
    routing = router(x_TD, TokenInfo(num_sequences=2)).validate()
    assert routing.slots_per_expert == 2

    def unit(v: Tensor) -> Tensor:
        return v / math.sqrt(float((v * v).sum()) + 1e-6)

    phi = router.phi_DS.detach().double()
    for b in range(2):
        tokens = x_TD[4 * b : 4 * b + 4].double()
        logits = [[float(3 * unit(x) @ unit(phi[:, s])) for s in range(6)] for x in tokens]
        for s in range(6):
            column = softmax([logits[n][s] for n in range(4)])
            assert routing.dispatch_BNS[b, :, s].tolist() == pytest.approx(column, rel=1e-6)
        for n in range(4):
            assert routing.combine_BNS[b, n].tolist() == pytest.approx(softmax(logits[n]), rel=1e-6)
    changed_TD = torch.cat([x_TD[:4], torch.randn(4, 6)])
    other = router(changed_TD, TokenInfo(num_sequences=2))
    assert torch.equal(other.dispatch_BNS[0], routing.dispatch_BNS[0])
    assert not torch.equal(other.dispatch_BNS[1], routing.dispatch_BNS[1])


def test_soft_moe_masked_tokens_and_masked_sequences() -> None:
    router, x_TD = SoftMoERouter(6, 3), torch.randn(8, 6)
    x_TD.requires_grad_()
    keep_T = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    routing = router(x_TD, TokenInfo(mask_T=keep_T, num_sequences=2))
    alone = router(x_TD[:4][keep_T[:4]])
    torch.testing.assert_close(routing.dispatch_BNS[0][keep_T[:4]], alone.dispatch_BNS[0])
    torch.testing.assert_close(routing.combine_BNS[0][keep_T[:4]], alone.combine_BNS[0])
    for weights in (routing.dispatch_BNS, routing.combine_BNS):
        assert bool((weights.flatten(0, 1)[~keep_T] == 0).all())
    # anomaly mode: no NaN may arise even where a mask would hide it
    with torch.autograd.set_detect_anomaly(True):
        routing = router(x_TD, TokenInfo(mask_T=keep_T, num_sequences=2))
        (routing.dispatch_BNS.square().sum() + routing.combine_BNS.square().sum()).backward()
    assert_finite_gradients(x_TD, *router.parameters())


def test_hash_is_uniform_stable_and_seeded() -> None:
    ids_T = torch.arange(40_000)
    x_TD = torch.zeros(40_000, 2)
    experts = HashedRouter(2, 8, 3)(x_TD, TokenInfo(token_id_T=ids_T)).expert_TK
    # chi-square of the 56 sets of three experts: mean 55, standard deviation 10.5
    sets = (2**experts).sum(1).bincount(minlength=256)
    sets = sets[sets > 0].double()
    assert len(sets) == 56
    chi_square = ((sets - 40_000 / 56).square() / (40_000 / 56)).sum().item()
    assert 15 < chi_square < 110
    # the same in every process and on every machine
    assert experts[:4].tolist() == [[5, 6, 3], [2, 0, 1], [1, 3, 7], [5, 6, 4]]
    again = HashedRouter(2, 8, 3)(x_TD, TokenInfo(token_id_T=ids_T.int())).expert_TK
    other = HashedRouter(2, 8, 3, seed=1)(x_TD, TokenInfo(token_id_T=ids_T)).expert_TK
    assert torch.equal(experts, again)
    assert 0.05 < (experts == other).double().mean().item() < 0.3


def test_hash_against_python_integers_for_extreme_ids() -> None:
    def mix(x: int) -> int:
        for _ in range(2):
            x %= 2**32
            x = (x // 2**16 ^ x) * 0x45D9F3B % 2**32
        return x // 2**16 ^ x

    ids = [0, 1, -1, 2**31 - 1, 2**31, 2**62 + 5, -(2**63)]
    for K, seed in ((1, 0), (3, 1), (7, 2**40 + 9)):
        router = HashedRouter(2, 7, K, seed=seed)
        routing = router(torch.zeros(7, 2), TokenInfo(token_id_T=torch.tensor(ids))).validate()
        for t, token_id in enumerate(ids):
            chosen: list[int] = []
            for j in range(7 - K, 7):
                draw = mix(mix(token_id % 2**32 ^ mix(seed)) + j * 0x9E3779B9) % (j + 1)
                chosen.append(j if draw in chosen else draw)
            assert routing.expert_TK[t].tolist() == chosen


# the losses


def hf_formula(logits_TE: Tensor, K: int) -> Tensor:
    """Transformers' load_balancing_loss_func without a mask, for one layer."""
    weights = torch.softmax(logits_TE, dim=-1)
    _, selected = torch.topk(weights, K, dim=-1)
    expert_mask = torch.nn.functional.one_hot(selected, logits_TE.shape[1]).to(weights)
    tokens_per_expert = expert_mask.mean(dim=0)
    return (tokens_per_expert * weights.mean(dim=0).unsqueeze(0)).sum() * logits_TE.shape[1]


def test_hf_dialect_is_transformers_and_k_times_switch() -> None:
    for K in (1, 2, 5):
        router = SoftmaxTopkRouter(6, 5, K, dtype=F64, loss_weights={"hf": 1.0, "switch": 1.0})
        routing = router(20 * torch.randn(40, 6))
        torch.testing.assert_close(routing.losses["hf"], hf_formula(routing.logits_TE, K))
        torch.testing.assert_close(routing.losses["hf"], K * routing.losses["switch"])


def test_switch_and_z_loss_against_loops() -> None:
    router = SoftmaxTopkRouter(6, 5, 2, dtype=F64, loss_weights={"switch": 0.5, "z": 0.25})
    x_TD, keep_T = 20 * torch.randn(12, 6), torch.rand(12) < 0.6
    routing = router(x_TD, TokenInfo(mask_T=keep_T))
    rows = [row for row, keep in zip(logits_of(router, x_TD), keep_T.tolist(), strict=True) if keep]
    switch = 0.0
    for e in range(5):
        count = sum(e in largest(row, 2) for row in rows)
        switch += 5 * count / (2 * len(rows)) * sum(softmax(row)[e] for row in rows) / len(rows)
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in rows) / len(rows)
    assert routing.losses["switch"].item() == pytest.approx(switch, rel=1e-9)
    assert routing.losses["z"].item() == pytest.approx(z, rel=1e-9)
    assert routing.aux_loss is not None
    assert routing.aux_loss.item() == pytest.approx(0.5 * switch + 0.25 * z, rel=1e-9)


def test_losses_at_total_imbalance() -> None:
    E, T = 6, 10
    expert_TK = torch.full((T, 1), 2)
    score_TE = torch.nn.functional.one_hot(expert_TK[:, 0], E).float()
    assert switch_loss(score_TE, expert_TK, E).item() == pytest.approx(E)
    assert importance_loss(torch.ones(T, 1), expert_TK, E).item() == pytest.approx(E - 1)
    assert load_loss(score_TE).item() == pytest.approx(E - 1)
    assert z_loss(torch.zeros(T, E)).item() == pytest.approx(math.log(E) ** 2)


def all_losses(logits_TE: Tensor, K: int, mask_T: Tensor | None = None) -> list[Tensor]:
    E = logits_TE.shape[1]
    score_TE = logits_TE.softmax(1)
    value_TK, expert_TK = logits_TE.topk(K)
    return [
        switch_loss(score_TE, expert_TK, E, mask_T),
        hf_loss(score_TE, expert_TK, E, mask_T),
        z_loss(logits_TE, mask_T),
        importance_loss(value_TK.softmax(1), expert_TK, E, mask_T),
        load_loss(score_TE, mask_T),
    ]


def test_losses_do_not_see_padding_order_or_repetition() -> None:
    logits_TE = torch.randn(12, 5, dtype=F64)
    plain = all_losses(logits_TE, 2)
    padded_TE = torch.cat([logits_TE, torch.full((4, 5), 7.0, dtype=F64)])
    order_T = torch.randperm(16)
    masked = all_losses(padded_TE[order_T], 2, (torch.arange(16) < 12)[order_T])
    repeated = all_losses(logits_TE.repeat(3, 1), 2)
    torch.testing.assert_close(masked, plain)
    torch.testing.assert_close(repeated, plain)


def test_z_loss_is_the_mean_of_micro_batches() -> None:
    logits_TE = torch.randn(12, 5, dtype=F64)
    parts = torch.stack([z_loss(part) for part in logits_TE.split(3)])
    torch.testing.assert_close(z_loss(logits_TE), parts.mean())


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_losses_of_no_tokens_are_zero_with_finite_gradients(num_tokens: int) -> None:
    logits_TE = torch.randn(num_tokens, 5, requires_grad=True)
    losses = all_losses(logits_TE, 2, torch.zeros(num_tokens, dtype=torch.bool))
    assert [loss.item() for loss in losses] == [0.0] * 5
    assert [loss.item() for loss in all_losses(torch.zeros(0, 5), 2)] == [0.0] * 5
    torch.stack(losses).sum().backward()
    assert logits_TE.grad is not None and bool((logits_TE.grad == 0).all())


def test_losses_ignore_ids_that_name_no_expert() -> None:
    score_TE = torch.rand(2, 3)
    ragged, gates = torch.tensor([[0, -1], [3, 2]]), torch.tensor([[0.5, 9.0], [9.0, 0.5]])
    expected = 3 * sum(0.25 * score_TE[:, e].mean() for e in (0, 2))
    torch.testing.assert_close(switch_loss(score_TE, ragged, 3), expected)
    assert importance_loss(gates, ragged, 3).item() == pytest.approx(squared_cv([0.5, 0, 0.5]))


def test_losses_of_bfloat16_scores_are_float32() -> None:
    score_TE = torch.rand(4096, 4).bfloat16()
    expert_TK = torch.zeros(4096, 1, dtype=torch.int64)
    for loss in (switch_loss(score_TE, expert_TK, 4), z_loss(score_TE), load_loss(score_TE)):
        assert loss.dtype == torch.float32
    expected = 4 * score_TE[:, 0].float().mean()
    torch.testing.assert_close(switch_loss(score_TE, expert_TK, 4), expected)


# what every router keeps


@pytest.mark.parametrize("name", all_routers())
def test_router_conforms(name: str) -> None:
    assert check_router(name) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("switch", {"jitter": 0.3}),
        ("softmax_topk", {"order": "softmax_then_topk"}),
        ("softmax_topk", {"order": "topk_then_softmax", "topk": "torch_topk"}),
        ("soft_moe", {"slots_per_expert": 3}),
        ("hashed", {"seed": 7}),
    ],
)
def test_router_conforms_with_options(name: str, options: dict[str, Any]) -> None:
    assert check_router(name, **options) == []


@pytest.mark.parametrize("name", all_routers())
def test_router_is_documented(name: str) -> None:
    rule = all_routers()[name]
    summary = (__import__(rule.__module__, fromlist=["_"]).__doc__ or "").partition("\n")[0]
    assert summary.endswith(".") and len(summary) < 110
    assert "arXiv:" in rule.paper and rule.gate_sum in GATE_SUMS


@pytest.mark.parametrize("name", ["switch", "softmax_topk", "noisy_topk", "soft_moe"])
def test_autocast_does_not_reach_the_router(name: str) -> None:
    router, x_TD = build(name, 16, 4, 1).eval(), torch.randn(8, 16)
    plain = router(x_TD)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x_TD)
    for field in ("logits_TE", "gate_TK", "dispatch_BNS", "combine_BNS"):
        if hasattr(plain, field):
            assert torch.equal(getattr(plain, field), getattr(cast, field))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own
@pytest.mark.parametrize("name", all_routers())
def test_router_compiles_without_graph_breaks(name: str) -> None:
    rule = all_routers()[name]
    router = rule(8, 8, rule.fixed_K or 2, loss_weights=dict.fromkeys(rule.loss_names, 0.1))
    info = TokenInfo(token_id_T=torch.arange(16), mask_T=torch.arange(16) < 13, num_sequences=2)
    backend = "inductor" if name == "softmax_topk" else "eager"
    compiled = torch.compile(router.eval(), fullgraph=True, backend=backend)
    x_TD = torch.randn(16, 8)
    plain, fast = router(x_TD, info), compiled(x_TD, info)
    if isinstance(plain, SoftRouting):
        torch.testing.assert_close(fast.combine_BNS, plain.combine_BNS)
    else:
        assert torch.equal(fast.expert_TK, plain.expert_TK)
        torch.testing.assert_close(fast.gate_TK, plain.gate_TK)
        torch.testing.assert_close(dict(fast.losses), dict(plain.losses))


def test_routers_are_found_by_file_and_mistakes_are_named() -> None:
    assert {"switch", "softmax_topk", "noisy_topk", "soft_moe", "hashed"} <= set(all_routers())
    assert not {"router", "losses"} & set(all_routers())
    with pytest.raises(ValueError, match="did you mean 'softmax_topk'"):
        build("softmax_top", 4, 4, 2)
    with pytest.raises(ValueError, match=r"there is no router 'xyz'; there are .*switch"):
        build("xyz", 4, 4, 2)
    empty, double = types.ModuleType("empty"), types.ModuleType("double")
    for name in ("One", "Two"):
        setattr(double, name, type(name, (Router,), {"__module__": "double"}))
    with pytest.raises(ValueError, match="empty must define exactly one subclass of Router; it has none"):
        router_in(empty)
    with pytest.raises(ValueError, match="it has One, Two"):
        router_in(double)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SwitchRouter(4, 4, 2), "has K=1 only, not K=2"),
        (lambda: SoftMoERouter(4, 4, 2), "has K=1 only, not K=2"),
        (lambda: SoftMoERouter(4, 4, slots_per_expert=0), "slots_per_expert"),
        (lambda: SwitchRouter(4, 4, 1, jitter=1.5), "jitter"),
        (lambda: SoftmaxTopkRouter(4, 4, 5), "K=5 choices per token"),
        (lambda: SoftmaxTopkRouter(4, 4, 0), "K=0 choices per token"),
        (lambda: SoftmaxTopkRouter(0, 4, 1), "D >= 1"),
        (lambda: SoftmaxTopkRouter(4, 4, 2, order="best"), "order 'best' is unknown"),
        (lambda: SoftmaxTopkRouter(4, 4, 2, topk="fastest"), "no implementation 'fastest'"),
        (
            lambda: SoftmaxTopkRouter(4, 4, 2, loss_weights={"load": 1.0}),
            "no loss load; it offers switch, hf, z",
        ),
        (lambda: SoftMoERouter(4, 4, loss_weights={"z": 1.0}), "no loss z; it offers none"),
        (lambda: HashedRouter(4, 4, 2)(torch.zeros(3, 4)), "reads vocabulary ids"),
        (lambda: SwitchRouter(4, 4)(torch.zeros(3, 5)), "reads T x 4"),
        (lambda: SwitchRouter(4, 4)(torch.zeros(3, 4), TokenInfo(mask_T=torch.ones(2))), "mask_T has shape"),
        (
            lambda: SoftMoERouter(4, 4)(torch.zeros(3, 4), TokenInfo(num_sequences=2)),
            "sequences of equal length",
        ),
    ],
)
def test_mistakes_get_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_reset_parameters_with_a_generator_repeats() -> None:
    for name, rule in all_routers().items():
        router = build(name, 64, 32, rule.fixed_K or 2)
        before: dict[str, Tensor] = {}
        for _ in range(2):
            router.reset_parameters(torch.Generator().manual_seed(5))
            state = {key: value.clone() for key, value in router.state_dict().items()}
            assert not before or all(torch.equal(state[key], before[key]) for key in state)
            before = state
        if "w_DE" in before:
            assert before["w_DE"].std().item() == pytest.approx(0.02, rel=0.1)


# properties


sizes = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))


def drawn(name: str, size: tuple[int, int, int, int], scale: float) -> tuple[Router, Tensor, TokenInfo]:
    T, D, E, seed = size
    torch.manual_seed(seed)
    rule = all_routers()[name]
    K = rule.fixed_K or 1 + seed % E
    router = rule(D, E, K, loss_weights=dict.fromkeys(rule.loss_names, 1.0))
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    info = TokenInfo(token_id_T=torch.randint(2**40, (T,)), mask_T=torch.rand(T) < 0.8)
    return router, scale * torch.randn(T, D), info


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(all_routers())), sizes, st.sampled_from([0.0, 1.0, 100.0]), st.booleans())
def test_experts_are_distinct_and_gates_sum_as_declared(
    name: str, size: tuple[int, int, int, int], scale: float, training: bool
) -> None:
    router, x_TD, info = drawn(name, size, scale)
    routing = router.train(training)(x_TD, info)
    keep_T = info.mask_T
    assert keep_T is not None
    if isinstance(routing, SoftRouting):
        totals = routing.combine_BNS[0, keep_T].sum(1).tolist()
    else:
        assert not bool(routing.chosen_TK()[~keep_T].any())
        totals = []
        for row, gates in zip(routing.expert_TK.tolist(), routing.gate_TK.tolist(), strict=True):
            chosen = [e for e in row if 0 <= e < router.E]
            assert len(set(chosen)) == len(chosen)
            if chosen:
                totals.append(sum(gate for e, gate in zip(row, gates, strict=True) if e in chosen))
    for total in totals:
        assert total >= (1 - 1e-5 if router.gate_sum == "one" else 0)
        assert total <= 1 + 1e-5 or router.gate_sum == "any"


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(all_routers())), sizes, st.sampled_from([0.0, 1e-3, 1.0, 100.0, 1e4]))
def test_gradients_are_finite(name: str, size: tuple[int, int, int, int], scale: float) -> None:
    router, x_TD, info = drawn(name, size, scale)
    x_TD.requires_grad_()
    routing = router(x_TD, info)
    total = (
        routing.combine_BNS.sum() + routing.dispatch_BNS.square().sum()
        if isinstance(routing, SoftRouting)
        else routing.gate_TK.square().sum()
    )
    if routing.aux_loss is not None:
        assert bool(routing.aux_loss.isfinite())
        total = total + routing.aux_loss
    if total.requires_grad:
        total.backward()
        assert_finite_gradients(x_TD, *router.parameters())


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.data(), st.integers(1, 4), st.integers(0, 2**31))
def test_losses_at_balance(E: int, data: st.DataObject, repeats: int, seed: int) -> None:
    K = data.draw(st.integers(1, E))
    torch.manual_seed(seed)
    expert_TK = balanced(E, K, repeats)
    logits_TE = torch.randn(E * repeats, E, dtype=F64, requires_grad=True)
    score_TE = logits_TE.softmax(1)
    # with equal counts the scores do not matter, since each row sums to 1
    switch, hf = switch_loss(score_TE, expert_TK, E), hf_loss(score_TE, expert_TK, E)
    assert switch.item() == pytest.approx(1)
    assert hf.item() == pytest.approx(K)
    gate_TK = torch.full(expert_TK.shape, 1 / K, dtype=F64, requires_grad=True)
    importance = importance_loss(gate_TK, expert_TK, E)
    flat_TE = torch.full((repeats, E), 0.5, dtype=F64, requires_grad=True)
    load = load_loss(flat_TE)
    assert importance.item() == pytest.approx(0, abs=1e-12)
    assert load.item() == pytest.approx(0, abs=1e-12)
    (switch + hf + importance + load).backward()
    assert_finite_gradients(logits_TE, gate_TK, flat_TE)


# lying routers: the checker must see through each


class Leaning(SoftmaxTopkRouter):
    """An honest router that adds something to x; `lean` says what."""

    def lean(self, x_TD: Tensor) -> Tensor:
        return torch.zeros_like(x_TD)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        x_TD = self.prepare(x_TD, info)
        return super().forward(x_TD + self.lean(x_TD), info)


class LooksAhead(Leaning):
    batch_dependent = True

    def lean(self, x_TD: Tensor) -> Tensor:
        return x_TD.flip(0).cumsum(0).flip(0)


class LooksBack(Leaning):
    def lean(self, x_TD: Tensor) -> Tensor:
        return x_TD.cumsum(0)


class LooksBackHonestly(LooksBack):
    batch_dependent = True


class LooksAheadInTraining(Leaning):
    batch_dependent = True

    def lean(self, x_TD: Tensor) -> Tensor:
        return x_TD.flip(0).cumsum(0).flip(0) if self.training else x_TD.cumsum(0)


class CountsTokens(Leaning):
    def lean(self, x_TD: Tensor) -> Tensor:
        return torch.full_like(x_TD, float(x_TD.shape[0]))


class SaysNotCausal(Leaning):
    causal = False
    batch_dependent = True


class Altered(SoftmaxTopkRouter):
    """An honest router whose answer is altered afterwards."""

    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return routing

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        return self.alter(super().forward(x_TD, info), info)


class Repeats(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, expert_TK=routing.expert_TK[:, :1].expand_as(routing.expert_TK))


class Inflates(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=1.01 * routing.gate_TK)


class Deflates(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=0.99 * routing.gate_TK)


class GoesNegative(Altered):
    gate_sum = "any"

    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, order="softmax_then_topk", **options)

    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=routing.gate_TK - 0.5)


class RoundsGates(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=routing.gate_TK.bfloat16())


class RoutesMasked(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        expert_TK = torch.where(routing.chosen_TK(), routing.expert_TK, torch.arange(routing.num_choices))
        return replace(routing, expert_TK=expert_TK)


class CountsMasked(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        assert routing.logits_TE is not None
        return replace(routing, losses={**routing.losses, "z": z_loss(routing.logits_TE)})


class RollsDice(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=(routing.gate_TK + torch.rand_like(routing.gate_TK)).softmax(1))


class BreaksGradient(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        zero_TK = routing.gate_TK - routing.gate_TK.detach()
        return replace(routing, gate_TK=routing.gate_TK + zero_TK.square().sqrt())


class CutsGradient(Altered):
    loss_names = ()  # type: ignore[assignment]

    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, gate_TK=routing.gate_TK.detach())


class ForgetsTheSum(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        total = torch.stack(list(routing.losses.values())).sum() if routing.losses else None
        return replace(routing, aux_loss=total)


class SaysNothing(Router):
    pass


class SaysFull(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, ragged=False)


class Overwrites(SoftmaxTopkRouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = super().forward(x_TD, info)
        x_TD.data.mul_(2)
        return routing


class LosesMass(SoftMoERouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> SoftRouting:
        routing = super().forward(x_TD, info)
        return replace(routing, dispatch_BNS=0.9 * routing.dispatch_BNS)


class SeesMasked(Altered):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        shift_D = x_TD.nan_to_num(1.0).sum(0)
        return super().forward(x_TD + shift_D, info)


class Volunteers(Altered):
    def alter(self, routing: Routing, info: TokenInfo) -> Routing:
        return replace(routing, losses={**routing.losses, "extra": routing.gate_TK.sum() * 0})


class HasIdleParameter(SoftmaxTopkRouter):
    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, **options)
        self.idle = torch.nn.Parameter(torch.zeros(()))


class TakesAnyLoss(SoftmaxTopkRouter):
    def __init__(self, D: int, E: int, K: int, *, loss_weights: Any = None, **options: Any):
        known = {name: weight for name, weight in (loss_weights or {}).items() if name in self.loss_names}
        super().__init__(D, E, K, loss_weights=known, **options)


class DeclaresNonsense(SoftmaxTopkRouter):
    causal = False
    paper = ""

    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, **options)
        self.gate_sum = "plenty"


LIARS: list[tuple[type[Router], str]] = [
    (LooksAhead, "causal=True, but later tokens"),
    (LooksAheadInTraining, "causal=True, but later tokens"),
    (LooksBack, "batch_dependent=False, but other tokens"),
    (CountsTokens, "batch_dependent=False, but other tokens"),
    (SaysNotCausal, "causal=False, but no trial"),
    (SaysNotCausal, "batch_dependent=True, but no trial"),
    (Repeats, "twice"),
    (Inflates, "gate_sum is 'one'"),
    (Deflates, "gate_sum is 'one'"),
    (GoesNegative, "negative"),
    (RoundsGates, "must be float32"),
    (RoutesMasked, "masked tokens somewhere"),
    (CountsMasked, "z loss counts masked tokens"),
    (RollsDice, "eval mode differ"),
    (BreaksGradient, "gradient of x is not finite"),
    (CutsGradient, "carry no gradient"),
    (ForgetsTheSum, "aux_loss is not the sum"),
    (SaysNothing, "does not declare"),
    (SaysFull, "ragged=False promises"),
    (Overwrites, "overwrites x"),
    (LosesMass, "dispatch weights of a slot must sum to 1"),
    (SeesMasked, "what stands in masked tokens changes where the others go"),
    (SeesMasked, "what stands in masked tokens changes a loss"),
    (Volunteers, "asked for losses"),
    (Volunteers, "losses that nobody asked for"),
    (HasIdleParameter, "parameter idle gets no gradient"),
    (TakesAnyLoss, "accepts a loss weight for a loss it does not have"),
    (DeclaresNonsense, "causal=False needs batch_dependent=True"),
    (DeclaresNonsense, "names no paper"),
    (DeclaresNonsense, "gate_sum 'plenty' is none of"),
]


@pytest.mark.parametrize(("liar", "sentence"), LIARS)
def test_checker_sees_through(liar: type[Router], sentence: str) -> None:
    found = check_router(liar)
    assert any(sentence in line for line in found), found


@pytest.mark.parametrize("honest", [Leaning, LooksBackHonestly, Altered])
def test_checker_accepts_honest_relatives(honest: type[Router]) -> None:
    assert check_router(honest) == []

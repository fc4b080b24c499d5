"""Switch, softmax with top-k, noisy top-k, Soft MoE and hashing against their formulas as loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.routers.hashed import HashedRouter
from moe_routing_bench.routers.noisy_topk import NoisyTopkRouter, chance_TE
from moe_routing_bench.routers.soft_moe import SoftMoERouter
from moe_routing_bench.routers.softmax_topk import ORDERS, SoftmaxTopkRouter
from moe_routing_bench.routers.switch import SwitchRouter
from plain_loops import F64, assert_finite_gradients, largest, logits_of, softmax, squared_cv, with_identity


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
    router = with_identity(SoftmaxTopkRouter(4, 4, 3))
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

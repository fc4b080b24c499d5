"""Losses of routers: against loops, at balance and collapse, and blind to padding, order and repetition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.routers.losses import (
    deepseek_loss,
    entropy_loss,
    hf_loss,
    importance_loss,
    l1_loss,
    load_loss,
    relu_loss,
    switch_loss,
    z_loss,
)
from moe_routing_bench.routers.softmax_topk import SoftmaxTopkRouter
from plain_loops import F64, assert_finite_gradients, largest, logits_of, softmax, squared_cv


def all_losses(logits_TE: Tensor, mask_T: Tensor | None = None, num_sequences: int = 1) -> dict[str, Tensor]:
    E = logits_TE.shape[1]
    score_TE, relu_TE = logits_TE.softmax(1), logits_TE.relu()
    value_TK, expert_TK = logits_TE.topk(2)
    return {
        "switch": switch_loss(score_TE, expert_TK, E, mask_T),
        "switch of 2": switch_loss(score_TE, expert_TK, E, mask_T, choices_per_token=2),
        "hf": hf_loss(score_TE, expert_TK, E, mask_T),
        "z": z_loss(logits_TE, mask_T),
        "importance": importance_loss(value_TK.softmax(1), expert_TK, E, mask_T),
        "load": load_loss(score_TE, mask_T),
        "deepseek": deepseek_loss(score_TE, expert_TK, E, mask_T, num_sequences=num_sequences),
        "entropy": entropy_loss(logits_TE, mask_T),
        "l1": l1_loss(relu_TE, mask_T),
        "relu": relu_loss(relu_TE, expert_TK, E, mask_T, choices_per_token=2),
    }


def loop_switch(score: list[list[float]], chosen: list[list[int]], E: int, K: float) -> float:
    T = len(score)
    return sum(
        E * sum(e in mine for mine in chosen) / (T * K) * sum(row[e] for row in score) / T for e in range(E)
    )


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
    switch = loop_switch([softmax(row) for row in rows], [largest(row, 2) for row in rows], 5, 2)
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in rows) / len(rows)
    assert routing.losses["switch"].item() == pytest.approx(switch, rel=1e-9)
    assert routing.losses["z"].item() == pytest.approx(z, rel=1e-9)
    assert routing.aux_loss is not None
    assert routing.aux_loss.item() == pytest.approx(0.5 * switch + 0.25 * z, rel=1e-9)


def test_the_others_against_loops_with_a_mask() -> None:
    B, N, E, K = 3, 6, 5, 2
    logits_TE = torch.randn(B * N, E, dtype=F64)
    score_TE, expert_TK = logits_TE.softmax(1), logits_TE.topk(K).indices
    keep_T = torch.rand(B * N) < 0.7
    keep_T[N : 2 * N] = False  # a sequence without tokens counts nowhere
    rows, chosen, kept = score_TE.tolist(), expert_TK.tolist(), keep_T.tolist()
    by_sequence = [[t for t in range(b * N, b * N + N) if kept[t]] for b in range(B)]
    parts = [
        loop_switch([rows[t] for t in own], [chosen[t] for t in own], E, K) for own in by_sequence if own
    ]
    assert len(parts) == 2
    got = deepseek_loss(score_TE, expert_TK, E, keep_T, num_sequences=B)
    assert got.item() == pytest.approx(sum(parts) / 2, rel=1e-12)
    tokens = [t for t in range(B * N) if kept[t]]
    seen = [rows[t] for t in tokens]
    relu_TE = logits_TE.relu()
    relu = [relu_TE.tolist()[t] for t in tokens]
    expected = loop_switch(relu, [chosen[t] for t in tokens], E, 1.5)
    got = relu_loss(relu_TE, expert_TK, E, keep_T, choices_per_token=1.5)
    assert got.item() == pytest.approx(expected, rel=1e-12)
    assert l1_loss(relu_TE, keep_T).item() == pytest.approx(sum(map(sum, relu)) / len(tokens))
    entropy = -sum(p * math.log(p) for row in seen for p in row) / len(tokens)
    assert entropy_loss(logits_TE, keep_T).item() == pytest.approx(entropy, rel=1e-12)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.data(), st.integers(1, 4), st.integers(0, 2**31))
def test_at_balance(E: int, data: st.DataObject, repeats: int, seed: int) -> None:
    K = data.draw(st.integers(1, E))
    torch.manual_seed(seed)
    # 3 * E * repeats tokens; in each third of them every expert is chosen K * repeats times
    expert_TK = (torch.arange(3 * E * repeats)[:, None] * K + torch.arange(K)) % E
    logits_TE = torch.randn(3 * E * repeats, E, dtype=F64, requires_grad=True)
    score_TE, relu_TE = logits_TE.softmax(1), logits_TE.relu()
    # with equal counts the scores do not matter, since each row sums to 1
    switch, hf = switch_loss(score_TE, expert_TK, E), hf_loss(score_TE, expert_TK, E)
    deepseek = deepseek_loss(score_TE, expert_TK, E, num_sequences=3)
    relu = relu_loss(relu_TE, expert_TK, E, choices_per_token=K)
    for loss, wanted in ((switch, 1), (hf, K), (deepseek, 1), (relu, l1_loss(relu_TE).item())):
        assert loss.item() == pytest.approx(wanted)
    gate_TK = torch.full(expert_TK.shape, 1 / K, dtype=F64, requires_grad=True)
    flat_TE = torch.full((repeats, E), 0.5, dtype=F64, requires_grad=True)
    importance, load = importance_loss(gate_TK, expert_TK, E), load_loss(flat_TE)
    entropy = entropy_loss(flat_TE)
    for loss, wanted in ((importance, 0), (load, 0), (entropy, math.log(E))):
        assert loss.item() == pytest.approx(wanted, abs=1e-12)
    (switch + hf + deepseek + relu + importance + load + entropy).backward()
    assert_finite_gradients(logits_TE, gate_TK, flat_TE)


@pytest.mark.parametrize("E", [1, 4, 6, 8])
def test_at_collapse(E: int) -> None:
    one_TK = torch.full((12, 1), E - 1)
    sure_TE = torch.zeros(12, E, dtype=F64).index_fill(1, torch.tensor([E - 1]), 1.0)
    assert switch_loss(sure_TE, one_TK, E).item() == pytest.approx(E)
    assert importance_loss(torch.ones(12, 1), one_TK, E).item() == pytest.approx(E - 1)
    assert load_loss(sure_TE).item() == pytest.approx(E - 1)
    assert z_loss(torch.zeros(12, E)).item() == pytest.approx(math.log(E) ** 2)
    assert deepseek_loss(sure_TE, one_TK, E, num_sequences=4).item() == pytest.approx(E)
    assert relu_loss(3 * sure_TE, one_TK, E, choices_per_token=1).item() == pytest.approx(3 * E)
    sure_TE = (2000 * sure_TE).requires_grad_()
    entropy_loss(sure_TE).backward()
    assert entropy_loss(sure_TE).item() == pytest.approx(0, abs=1e-12)
    assert_finite_gradients(sure_TE)


def test_opposite_sequences_cancel_in_the_batch_but_not_one_by_one() -> None:
    expert_TK = torch.tensor([[0], [0], [1], [1]])
    score_TE = torch.nn.functional.one_hot(expert_TK[:, 0], 2).double()
    assert switch_loss(score_TE, expert_TK, 2).item() == 1
    assert deepseek_loss(score_TE, expert_TK, 2, num_sequences=2).item() == 2


def test_they_do_not_see_padding_order_or_repetition() -> None:
    logits_BNE = torch.randn(3, 4, 5, dtype=F64)
    plain = all_losses(logits_BNE.flatten(0, 1), num_sequences=3)
    padding_BNE = torch.full((3, 2, 5), 7.0, dtype=F64)
    padded_BNE = torch.cat([logits_BNE, padding_BNE], dim=1)
    order_N = torch.randperm(6)
    mask_T = (order_N < 4).repeat(3)
    masked = all_losses(padded_BNE[:, order_N].flatten(0, 1), mask_T, num_sequences=3)
    torch.testing.assert_close(masked, plain)
    repeated_TE = logits_BNE.repeat(3, 1, 1).flatten(0, 1)
    torch.testing.assert_close(all_losses(repeated_TE, num_sequences=9), plain)


def test_means_are_means_of_micro_batches() -> None:
    logits_BNE = torch.randn(4, 6, 5, dtype=F64)
    whole = all_losses(logits_BNE.flatten(0, 1), num_sequences=4)
    a, b = (all_losses(part.flatten(0, 1), num_sequences=2) for part in logits_BNE.split(2))
    for name in ("z", "deepseek", "entropy", "l1"):
        torch.testing.assert_close(whole[name], (a[name] + b[name]) / 2)


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_without_tokens_they_are_zero_with_finite_gradients(num_tokens: int) -> None:
    logits_TE = torch.randn(num_tokens, 5, requires_grad=True)
    losses = all_losses(logits_TE, torch.zeros(num_tokens, dtype=torch.bool))
    for found in (losses, all_losses(torch.zeros(0, 5))):
        assert {name: loss.item() for name, loss in found.items()} == dict.fromkeys(losses, 0.0)
    torch.stack([*losses.values()]).sum().backward()
    assert logits_TE.grad is not None and bool((logits_TE.grad == 0).all())


def test_they_ignore_ids_that_name_no_expert() -> None:
    score_TE = torch.rand(4, 3, dtype=F64)
    ragged = torch.tensor([[0, -1], [3, 2], [1, 5], [-7, 0]])
    gates = torch.tensor([[0.5, 9.0], [9.0, 0.5], [0.5, 9.0], [9.0, 0.5]])
    rows, real = score_TE.tolist(), [[0], [2], [1], [0]]
    assert switch_loss(score_TE, ragged, 3).item() == pytest.approx(loop_switch(rows, real, 3, 2), rel=1e-12)
    halves = [loop_switch(rows[b : b + 2], real[b : b + 2], 3, 2) for b in (0, 2)]
    got = deepseek_loss(score_TE, ragged, 3, num_sequences=2)
    assert got.item() == pytest.approx(sum(halves) / 2, rel=1e-12)
    assert importance_loss(gates, ragged, 3).item() == pytest.approx(squared_cv([1, 0.5, 0.5]))
    torch.testing.assert_close(
        switch_loss(score_TE, ragged, 3, choices_per_token=1), hf_loss(score_TE, ragged, 3)
    )


def test_of_bfloat16_they_are_float32() -> None:
    logits_TE = torch.randn(4096, 4).bfloat16()
    assert {loss.dtype for loss in all_losses(logits_TE, num_sequences=2).values()} == {torch.float32}
    score_TE, expert_TK = torch.rand(4096, 4).bfloat16(), torch.zeros(4096, 1, dtype=torch.int64)
    expected = 4 * score_TE[:, 0].float().mean()
    torch.testing.assert_close(switch_loss(score_TE, expert_TK, 4), expected)

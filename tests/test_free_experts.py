"""Zero, copy and constant experts: the formula by hand, no rows in the plan, their own loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_routing_bench import MoE, Routing, TokenInfo, all_routers
from moe_routing_bench.moe.free_experts import FreeExperts
from moe_routing_bench.routers.router import build
from tiny_layers import assert_gradients, swiglu

D, H, E, K, T = 12, 8, 3, 2, 40
FREE = FreeExperts(zero=2, copy=1, constant=2)
DOUBLE = {"dtype": torch.float64, "router_options": {"dtype": torch.float64}}


def by_hand(layer: MoE, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
    rows, free, w = [], layer.free, layer.experts
    for t in range(x_TD.shape[0]):
        x, y = x_TD[t], torch.zeros(D, dtype=x_TD.dtype)
        for e, g in zip(routing.expert_TK[t].tolist(), routing.gate_TK[t], strict=True):
            if 0 <= e < E:
                y = y + g * swiglu(x, w.w_in_EDG[e], w.w_out_EFD[e])
            elif e == E + 2:
                y = y + g * x
            elif e > E + 2:
                a, b = torch.stack([x @ free.w_2De[i, :, e - E - 3] for i in (0, 1)]).softmax(0)
                y = y + g * (a * x + b * free.v_eD[e - E - 3])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "layout,impl",
    [
        ("compact", "staged"),
        ("compact", "eager_loop"),
        ("padded(capacity_factor=4)", "staged(grouped_gemm=padded_bmm)"),
        ("block(4)", "staged(grouped_gemm=block_sparse)"),
    ],
)
def test_the_layer_is_the_formula(layout: str, impl: str) -> None:
    layer = MoE(D, H, E, K, free_experts=FREE, layout=layout, impl=impl, **DOUBLE)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, routing = layer(x_TD)
    assert set(routing.expert_TK.flatten().tolist()) == set(range(E + FREE.total)), "every kind is tried"
    torch.testing.assert_close(y_TD, by_hand(layer, x_TD, routing))


def test_the_kernels_have_no_rows_for_them() -> None:
    layer = MoE(D, H, E, K, free_experts=FREE)
    _, routing = layer(torch.randn(T, D))
    plan = layer.plan(routing).validate()
    assert plan.num_experts == E and routing.num_experts == E + FREE.total
    assert torch.equal(plan.count_E, routing.load_E()[:E])
    assert plan.num_rows == T * K  # R is fixed by sizes; the rows past the last span are nobody's
    assert int(plan.offset_E1[-1]) == int(routing.load_E()[:E].sum()) < T * K


def test_a_token_with_zero_experts_alone_is_discarded_and_copies_are_exact() -> None:
    layer = MoE(D, H, E, 1, free_experts=FreeExperts(zero=1, copy=1))
    x_TD = torch.randn(2, D)
    routing = Routing(expert_TK=torch.tensor([[E], [E + 1]]), gate_TK=torch.ones(2, 1), num_experts=E + 2)
    y_TD = layer.compute(x_TD, routing)
    assert bool((y_TD[0] == 0).all()) and torch.equal(y_TD[1], x_TD[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_get_nothing_whatever_they_hold(dtype: torch.dtype) -> None:
    layer = MoE(D, H, E, K, free_experts=FREE, dtype=dtype)
    x_TD = torch.randn(T, D).to(dtype)
    mask_T = torch.arange(T) % 3 != 0
    expected_TD = layer(x_TD[mask_T])[0]
    x_TD[~mask_T] = float("nan")
    y_TD, _ = layer(x_TD, TokenInfo(mask_T=mask_T))
    assert y_TD.dtype == dtype and bool((y_TD[~mask_T] == 0).all())
    torch.testing.assert_close(y_TD[mask_T], expected_TD)
    y_TD.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_the_gate_of_zero_experts_goes_to_the_others_if_asked() -> None:
    keeps = MoE(D, H, E, K, free_experts=FREE)
    gives = MoE(D, H, E, K, free_experts=replace(FREE, zero_keeps_gate=False))
    gives.load_state_dict(keeps.state_dict())
    x_TD = torch.randn(10 * T, D)
    kept, given = keeps(x_TD)[1], gives(x_TD)[1]
    assert torch.equal(kept.expert_TK, given.expert_TK)
    zero_TK = (kept.expert_TK == E) | (kept.expert_TK == E + 1)
    assert bool((given.gate_TK[zero_TK] == 0).all()) and bool((kept.gate_TK[zero_TK] > 0).all())
    only_T = zero_TK.all(1)
    assert bool(only_T.any()) and bool((zero_TK.any(1) & ~only_T).any())
    torch.testing.assert_close(given.gate_TK.sum(1), (~only_T).float())
    mixed_T = ~zero_TK.any(1)
    torch.testing.assert_close(given.gate_TK[mixed_T], kept.gate_TK[mixed_T])


def test_the_loss_weighs_free_experts_by_tau() -> None:
    free = replace(FREE, loss_weight=0.1, tau=0.3)
    options = {**DOUBLE, "router_options": {"dtype": torch.float64, "loss_weights": {"switch": 0.2}}}
    layer = MoE(D, H, E, K, free_experts=free, **options)
    mask_T = torch.arange(T) < 30
    x_TD = torch.randn(T, D, dtype=torch.float64)
    _, routing = layer(x_TD, TokenInfo(mask_T=mask_T))
    p_TE = (x_TD[mask_T] @ layer.router.w_DE.double()).softmax(-1)
    N = E + FREE.total
    expected = sum(
        N * (1.0 if e < E else 0.3) * (routing.load_E()[e] / (30 * K)) * p_TE[:, e].mean() for e in range(N)
    )
    torch.testing.assert_close(routing.losses["free"], expected)
    torch.testing.assert_close(routing.aux_loss, 0.1 * expected + 0.2 * routing.losses["switch"])
    even = MoE(D, H, E, K, free_experts=replace(free, tau=1.0), **options)
    _, routing = even(x_TD)
    torch.testing.assert_close(routing.losses["free"], routing.losses["switch"])


def test_gradients_against_numerical_differentiation() -> None:
    free = FreeExperts(zero=1, copy=1, constant=2, zero_keeps_gate=False, loss_weight=1.0)
    layer = MoE(4, 3, 2, 2, free_experts=free, **DOUBLE).double()
    assert_gradients(layer, torch.randn(8, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name in all_routers() if name != "soft_moe"])
def test_every_router_that_chooses(name: str) -> None:
    choices = all_routers()[name].fixed_K or K
    free = FreeExperts(zero=2, copy=1, constant=2)  # 8 to choose from, for rules that need groups
    layer = MoE(D, H, E, choices, router=name, free_experts=free)
    x = torch.randn(2, 8, D)
    y, routing = layer(x, TokenInfo(token_id_T=torch.arange(16), num_sequences=2))
    assert routing.validate().num_experts == E + free.total
    layer.plan(routing).validate()
    torch.testing.assert_close(y.view(-1, D), by_hand(layer, x.view(-1, D), routing))


def test_the_state_dict_is_as_documented() -> None:
    layer = MoE(D, H, E, K, free_experts=FREE)
    shapes = {n: tuple(p.shape) for n, p in layer.state_dict().items() if not n.startswith("experts.")}
    assert shapes == {"router.w_DE": (D, E + 5), "free.v_eD": (2, D), "free.w_2De": (2, D, 2)}


def test_the_users_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="zero, copy and constant"):
        FreeExperts()
    with pytest.raises(ValueError, match="none below 0"):
        FreeExperts(zero=2, copy=-1)
    with pytest.raises(ValueError, match="tau is the weight"):
        FreeExperts(zero=1, tau=0.0)
    with pytest.raises(ValueError, match="E=3"):
        MoE(D, H, E, K, router=build("softmax_topk", D, E, K), free_experts=FREE)
    with pytest.raises(ValueError, match="Soft-MoE"):
        MoE(D, H, E, 1, router="soft_moe", free_experts=FREE)(torch.randn(T, D))
    hashed = MoE(D, H, E, K, router="hashed", free_experts=replace(FREE, loss_weight=0.1))
    with pytest.raises(ValueError, match="no logits"):
        hashed(torch.randn(2, D), TokenInfo(token_id_T=torch.arange(2)))


def test_no_device_values_are_read() -> None:
    with FakeTensorMode():
        free = replace(FREE, loss_weight=0.1, zero_keeps_gate=False)
        layer = MoE(
            D, H, E, K, free_experts=free, layout="block(4)", impl="staged(grouped_gemm=block_sparse)"
        )
        y_TD, _ = layer(torch.zeros(T, D), TokenInfo(mask_T=torch.ones(T, dtype=torch.bool)))
        assert y_TD.shape == (T, D)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.timeout(600)
def test_it_compiles_as_one_graph() -> None:
    free = replace(FREE, loss_weight=0.1, zero_keeps_gate=False)
    layer = MoE(D, H, E, K, free_experts=free, layout="block(4)", impl="staged(grouped_gemm=block_sparse)")
    x_TD = torch.randn(T, D)
    y_TD, routing = torch.compile(layer, fullgraph=True)(x_TD)
    torch.testing.assert_close(y_TD, layer(x_TD)[0])
    torch.testing.assert_close(routing.aux_loss, layer(x_TD)[1].aux_loss)

"""ChainOfExperts: the formula by hand, C = 1 is MoE, gradients, sizes that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_routing_bench import MoE, TokenInfo
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.free_experts import FreeExperts
from tiny_layers import assert_gradients, swiglu

D, H, E, T = 12, 8, 5, 9
DOUBLE = {"dtype": torch.float64, "router_options": {"dtype": torch.float64}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_F": 6, "shared_gate": True, "bias": True},
        {"layout": "padded(capacity_factor=1.0)", "router_options": {"loss_weights": {"switch": 0.01}}},
        {"router": "soft_moe", "K": 1},
        {"free_experts": FreeExperts(zero=1, copy=1, constant=2)},
    ],
    ids=["plain", "shared", "padded", "soft", "free"],
)
def test_one_iteration_without_residual_is_the_plain_layer(dtype: torch.dtype, options: dict) -> None:
    options = {"K": 2, "dtype": dtype, **options}
    moe = MoE(D, H, E, **options)
    chain = ChainOfExperts(D, H, E, iterations=1, inner_residual=False, **options)
    assert chain.layer.state_dict().keys() == moe.state_dict().keys()
    chain.layer.load_state_dict(moe.state_dict())
    x = torch.randn(2, 6, D).to(dtype)
    runs = []
    for layer in (moe, chain):
        y, routing = layer(x)
        y.float().square().sum().backward()
        runs.append((y, routing, [p.grad for p in layer.parameters()]))
    (y, routing, grads), (chain_y, routings, chain_grads) = runs
    assert torch.equal(y, chain_y)
    assert len(routings) == 1 and type(routings[0]) is type(routing)
    assert (routing.aux_loss is None) == (routings.aux_loss is None)
    if routing.aux_loss is not None:
        assert torch.equal(routing.aux_loss, routings.aux_loss)
    for mine, theirs in zip(grads, chain_grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("inner_residual", [True, False])
@pytest.mark.parametrize("iterations", [2, 3])
def test_the_chain_is_the_formula(iterations: int, inner_residual: bool) -> None:
    chain = ChainOfExperts(
        D, H, E, 6, iterations=iterations, inner_residual=inner_residual, shared_F=4, **DOUBLE
    )
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, routings = chain(x_TD)
    assert len(routings) == iterations
    w, shared = chain.layer.experts, chain.layer.shared

    for t in range(T):
        state = x_TD[t]
        for router in (chain.layer.router, *chain.later_routers):
            p = (state @ router.w_DE.double()).softmax(0)
            top = p.argsort(descending=True)[: 6 // iterations]
            out = swiglu(state, shared.w_in_EDG[0], shared.w_out_EFD[0])
            for e in top:
                out = out + p[e] / p[top].sum() * swiglu(state, w.w_in_EDG[e], w.w_out_EFD[e])
            state = out + state if inner_residual else out
        torch.testing.assert_close(y_TD[t], state)


def test_losses_of_all_iterations_are_summed() -> None:
    chain = ChainOfExperts(
        D, H, E, 4, iterations=2, router_options={"loss_weights": {"switch": 0.5, "z": 0.1}}
    )
    _, routings = chain(torch.randn(T, D))
    expected = sum(0.5 * r.losses["switch"] + 0.1 * r.losses["z"] for r in routings)
    torch.testing.assert_close(routings.aux_loss, expected)
    assert ChainOfExperts(D, H, E, 4)(torch.randn(T, D))[1].aux_loss is None


def test_gradients_reach_every_router_and_expert() -> None:
    chain = ChainOfExperts(4, 3, 4, 4, iterations=2, shared_F=2, **DOUBLE).double()
    with torch.no_grad():  # far from ties, so that a small step changes no choice
        for router in (chain.layer.router, *chain.later_routers):
            router.w_DE.mul_(50)
    assert_gradients(chain, torch.randn(5, 4, dtype=torch.float64))


def test_the_users_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="K=3"):
        ChainOfExperts(D, H, E, 3, iterations=2)
    with pytest.raises(ValueError, match="1 iteration"):
        ChainOfExperts(D, H, E, 2, iterations=0)
    with pytest.raises(ValueError, match="by name"):
        ChainOfExperts(D, H, E, 2, router=MoE(D, H, E, 1).router)


def test_it_reads_no_device_values_and_keeps_shapes() -> None:
    with FakeTensorMode():
        chain = ChainOfExperts(D, H, E, 4, layout="block(4)", impl="staged(grouped_gemm=block_sparse)")
        y, _ = chain(torch.zeros(2, 3, D), TokenInfo(mask_T=torch.ones(6, dtype=torch.bool)))
        assert y.shape == (2, 3, D)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.timeout(600)
def test_it_compiles_as_one_graph() -> None:
    chain = ChainOfExperts(D, H, E, 4, layout="block(4)", impl="staged(grouped_gemm=block_sparse)")
    x = torch.randn(T, D)
    torch.testing.assert_close(torch.compile(chain, fullgraph=True)(x)[0], chain(x)[0])

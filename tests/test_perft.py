"""Perft: equal to the frozen layer at the start, the four formulas by hand, only the new part trains."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_routing_bench import MoE, TokenInfo
from moe_routing_bench.core import cpp
from moe_routing_bench.moe.free_experts import FreeExperts
from moe_routing_bench.moe.perft import ADAPTERS, KINDS, Perft
from tiny_layers import assert_gradients

D, H, E, K, T = 12, 8, 5, 2, 9
DOUBLE = {"dtype": torch.float64, "router_options": {"dtype": torch.float64}}
SIZES = {"R": {"num_adapters": 4, "K": 2}, "E": {}, "D": {"num_adapters": 3}, "S": {}}
EVERY = [*product(KINDS, ADAPTERS)]


def fill(perft: Perft) -> None:
    """Values as after some training."""
    with torch.no_grad():
        perft.adapters.up_EFD.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind,adapter", EVERY)
@pytest.mark.parametrize(
    "options",
    [
        {"shared_F": 4, "bias": True},
        {"layout": "padded(capacity_factor=1.0)"},
        {"free_experts": FreeExperts(zero=1, copy=1, constant=1)},
    ],
    ids=["compact", "padded", "free"],
)
def test_a_new_one_is_the_frozen_layer(kind: str, adapter: str, dtype: torch.dtype, options: dict) -> None:
    # frozen, as Perft makes it: a kernel may round otherwise where gradients of weights are wanted
    moe = MoE(D, H, E, K, dtype=dtype, **options).requires_grad_(False)
    x = torch.randn(2, 5, D).to(dtype)
    before, routing = moe(x)
    y, routings = Perft(moe, kind, adapter=adapter, rank=3, **SIZES[kind])(x)
    assert y.dtype == dtype and torch.equal(y, before)
    assert torch.equal(routings[0].expert_TK, routing.expert_TK)
    assert len(routings) == (2 if kind == "R" else 1)


@pytest.mark.parametrize("kind,adapter", EVERY)
def test_the_formula(kind: str, adapter: str) -> None:
    moe = MoE(D, H, E, K, **DOUBLE)
    lora = adapter == "lora"
    options = {"router_options": {"dtype": torch.float64}} if kind == "R" else {}
    perft = Perft(moe, kind, adapter=adapter, rank=3, alpha=6.0 if lora else None, **SIZES[kind], **options)
    fill(perft)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, _ = perft(x_TD)
    U, V = perft.adapters.down_EDF, perft.adapters.up_EFD

    def one(j: int, x_D: torch.Tensor) -> torch.Tensor:
        return 6.0 / 3 * (x_D @ U[j]) @ V[j] if lora else F.silu(x_D @ U[j]) @ V[j]

    base_TD, routing = moe(x_TD)
    for t in range(T):
        if kind in ("D", "S"):
            new = sum(one(j, x_TD[t]) for j in range(U.shape[0]))
        elif kind == "E":
            new = sum(routing.gate_TK[t, k] * one(int(routing.expert_TK[t, k]), x_TD[t]) for k in range(K))
        else:
            p = (x_TD[t] @ perft.router.w_DE.double()).softmax(0)
            top = p.argsort(descending=True)[:2]
            new = sum(p[j] / p[top].sum() * one(int(j), x_TD[t]) for j in top)
        torch.testing.assert_close(y_TD[t], base_TD[t] + new)


def test_kind_e_drops_what_the_frozen_layer_drops() -> None:
    moe = MoE(D, H, E, 1, layout="padded(capacity=1)", **DOUBLE)
    perft = Perft(moe, "E", rank=3)
    fill(perft)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, routings = perft(x_TD)
    dropped_T = (moe.plan(routings[0]).row_TK < 0).all(1)
    assert bool(dropped_T.any()) and bool((y_TD[dropped_T] == 0).all())


@pytest.mark.parametrize("kind,adapter", EVERY)
def test_only_the_new_part_trains(kind: str, adapter: str) -> None:
    perft = Perft(MoE(D, H, E, K, shared_F=4), kind, adapter=adapter, rank=3, **SIZES[kind])
    frozen = {name: value.clone() for name, value in perft.moe.state_dict().items()}
    optimiser = torch.optim.SGD((p for p in perft.parameters() if p.requires_grad), lr=0.5)
    x_TD = torch.randn(T, D)
    for _ in range(2):  # with V = 0 the first step moves V alone
        optimiser.zero_grad()
        (perft(x_TD)[0] - 1).square().mean().backward()
        optimiser.step()
    assert all(p.grad is None for p in perft.moe.parameters())
    assert all(float(p.grad.abs().sum()) > 0 for n, p in perft.named_parameters() if p.requires_grad)
    assert {n for n, p in perft.named_parameters() if p.requires_grad} == set(perft.adapter_state_dict())
    assert all(torch.equal(value, frozen[name]) for name, value in perft.moe.state_dict().items())


@pytest.mark.parametrize("kind,adapter", EVERY)
def test_gradients_against_numerical_differentiation(kind: str, adapter: str) -> None:
    moe = MoE(4, 3, 3, 2, **DOUBLE)
    options = {"router_options": {"dtype": torch.float64}} if kind == "R" else {}
    perft = Perft(moe, kind, adapter=adapter, rank=2, **SIZES[kind], **options).double()
    fill(perft)
    assert_gradients(perft, torch.randn(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_part_is_small_and_enough(kind: str) -> None:
    moe = MoE(D, H, E, K)
    trained, fresh = (Perft(moe, kind, rank=3, **SIZES[kind]) for _ in range(2))
    fill(trained)
    state = trained.adapter_state_dict()
    count = {"R": 4, "E": E, "D": 3, "S": 1}[kind]
    shapes = {"adapters.down_EDF": (count, D, 3), "adapters.up_EFD": (count, 3, D)}
    if kind == "R":
        shapes["router.w_DE"] = (D, 4)
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes
    x_TD = torch.randn(T, D)
    assert not torch.equal(fresh(x_TD)[0], trained(x_TD)[0])
    fresh.load_adapter_state_dict(state)
    assert torch.equal(fresh(x_TD)[0], trained(x_TD)[0])
    with pytest.raises(ValueError, match=f"a Perft of kind {kind} has adapters.down_EDF"):
        fresh.load_adapter_state_dict({"router.w_DE": torch.zeros(1)})


def test_the_users_mistakes_are_told() -> None:
    moe = MoE(D, H, E, K)
    for options, sentence in (
        ({"kind": "Q"}, "there is no kind 'Q'; there are R, E, D, S"),
        ({"kind": "S", "adapter": "prefix"}, "there is no adapter 'prefix'"),
        ({"kind": "S", "adapter": "parallel", "alpha": 1.0}, "alpha scales LoRA"),
        ({"kind": "S", "rank": 0}, "rank is the width"),
        ({"kind": "D"}, "kind D needs num_adapters"),
        ({"kind": "E", "num_adapters": 3}, "kind E has 5 adapters here"),
        ({"kind": "R", "num_adapters": 4}, "R needs it"),
        ({"kind": "S", "K": 1}, "is for kind R"),
        ({"kind": "R", "num_adapters": 4, "K": 2, "router": moe.router}, "the router must be for D=12, E=4"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Perft(moe, **options)
    soft = MoE(D, H, E, 1, router="soft_moe")
    x_TD = torch.randn(T, D)
    with pytest.raises(ValueError, match="R, D or S"):
        Perft(soft, "E")(x_TD)
    assert torch.equal(Perft(soft, "R", **SIZES["R"])(x_TD)[0], soft(x_TD)[0])


def test_the_loss_of_the_new_router_is_reachable() -> None:
    weights = {"loss_weights": {"switch": 0.5}}
    perft = Perft(MoE(D, H, E, K), "R", **SIZES["R"], router_options=weights)
    _, routings = perft(torch.randn(T, D))
    torch.testing.assert_close(routings.aux_loss, 0.5 * routings[1].losses["switch"])
    routings.aux_loss.backward()
    assert float(perft.router.w_DE.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_device_values_are_read(kind: str) -> None:
    with FakeTensorMode():
        # R plans in the compact layout, for which the only grouped_gemm without a host read is torch's
        dtype, gemm = (torch.bfloat16, "torch_grouped_mm") if kind == "R" else (None, "block_sparse")
        moe = MoE(16, H, E, K, layout="block(4)", impl="staged(grouped_gemm=block_sparse)", dtype=dtype)
        perft = Perft(moe, kind, rank=8, grouped_gemm=gemm, **SIZES[kind])
        y_TD, _ = perft(torch.zeros(T, 16, dtype=dtype), TokenInfo(mask_T=torch.ones(T, dtype=torch.bool)))
        assert y_TD.shape == (T, 16)


@pytest.mark.parametrize("kind,adapter", EVERY)
def test_a_new_one_is_the_frozen_layer_in_c_plus_plus(kind: str, adapter: str) -> None:
    if (reason := cpp.why_not()) is not None:
        pytest.skip(reason)
    moe = MoE(D, H, E, K, impl="native", plan_impl="native", dtype=torch.bfloat16).requires_grad_(False)
    x_TD = torch.randn(T, D).to(torch.bfloat16)
    perft = Perft(moe, kind, adapter=adapter, rank=4, grouped_gemm="native", **SIZES[kind])
    y_TD, _ = perft(x_TD)
    assert torch.equal(y_TD, moe(x_TD)[0])
    y_TD.float().square().sum().backward()
    assert float(perft.adapters.up_EFD.grad.abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["E", "S"])
def test_it_compiles_as_one_graph(kind: str) -> None:
    moe = MoE(D, H, E, K, layout="block(4)", impl="staged(grouped_gemm=block_sparse)")
    perft = Perft(moe, kind, rank=3, grouped_gemm="block_sparse")
    fill(perft)
    x_TD = torch.randn(T, D)
    torch.testing.assert_close(torch.compile(perft, fullgraph=True)(x_TD)[0], perft(x_TD)[0])

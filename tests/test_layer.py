"""MoE: the layer as a whole, against formulas written out by hand."""

from __future__ import annotations

from importlib import import_module
from itertools import product

import pytest
import torch

from moe_routing_bench import (
    ExpertWeights,
    Layout,
    MoE,
    Routing,
    SoftRouting,
    TokenInfo,
    all_routers,
    from_expert_list,
    from_transformers,
)
from moe_routing_bench.core import cpp
from moe_routing_bench.moe.free_experts import FreeExperts
from moe_routing_bench.routers.router import build
from moe_routing_bench.routers.softmax_topk import ORDERS
from tiny_layers import assert_gradients, swiglu

D, H, E, K, T = 12, 8, 5, 2, 9
LAYOUTS = ("compact", "padded(capacity_factor=4)", "block(4)")
PATHS = [
    ("compact", "staged"),
    ("compact", "eager_loop"),
    ("compact", "dense_all_experts"),
    ("compact", "staged(dispatch=one_hot_matmul,combine=one_hot_matmul)"),
    ("compact", "staged(combine=index_add)"),
    ("compact", "staged(combine=embedding_bag)"),
    ("padded(capacity_factor=4)", "staged(grouped_gemm=padded_bmm)"),
    ("block(4)", "staged(grouped_gemm=block_sparse)"),
]
DOUBLE = {"dtype": torch.float64, "router_options": {"dtype": torch.float64}}


def by_hand(layer: MoE, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
    w = layer.experts.weights()
    rows = []
    for t in range(x_TD.shape[0]):
        y = torch.zeros(D, dtype=x_TD.dtype)
        for e, g in zip(routing.expert_TK[t].tolist(), routing.gate_TK[t], strict=True):
            y = y + g * swiglu(x_TD[t], w.w_in_EDG[e], w.w_out_EFD[e])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("layout,impl", PATHS)
def test_the_layer_is_the_formula(layout: str, impl: str) -> None:
    layer = MoE(D, H, E, K, layout=layout, impl=impl, **DOUBLE)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, routing = layer(x_TD)
    assert isinstance(routing, Routing)
    torch.testing.assert_close(y_TD, by_hand(layer, x_TD, routing))


@pytest.mark.parametrize("layout,impl", PATHS)
def test_gradients_reach_x_gates_and_every_weight(layout: str, impl: str) -> None:
    layer = MoE(D, H, E, K, layout=layout, impl=impl, bias=True, shared_F=4, **DOUBLE).double()
    # through the gates to router.w_DE too
    assert_gradients(layer, torch.randn(4, D, dtype=torch.float64), fast_mode=True)


@pytest.mark.parametrize("name,layout", [*product(all_routers(), LAYOUTS)])
def test_every_router_in_every_layout(name: str, layout: str) -> None:
    choices = all_routers()[name].fixed_K or K
    options = {"tile": 2} if name == "token_rounding" else {}  # of tiles of 128 six tokens fill none
    layer = MoE(D, H, E, choices, router=name, router_options=options, layout=layout)
    x = torch.randn(2, 3, D)
    y, routing = layer(x, TokenInfo(token_id_T=torch.arange(6), num_sequences=2))
    assert y.shape == x.shape and bool(y.isfinite().all())
    routing.validate()
    y.sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert len(gradients) >= 2 and all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("layout", [*LAYOUTS, "padded(capacity_factor=0.1)"])
def test_soft_moe_is_the_formula(layout: str) -> None:
    options = {"dtype": torch.float64, "slots_per_expert": 3}
    layer = MoE(D, H, E, 1, router="soft_moe", router_options=options, layout=layout, dtype=torch.float64)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    y, soft = layer(x, TokenInfo(num_sequences=2))
    assert isinstance(soft, SoftRouting)
    w = layer.experts.weights()
    for b in range(2):
        slots = soft.dispatch_BNS[b].T @ x[b]
        outs = [swiglu(slots[s], w.w_in_EDG[s // 3], w.w_out_EFD[s // 3]) for s in range(E * 3)]
        torch.testing.assert_close(y[b], soft.combine_BNS[b] @ torch.stack(outs))


def test_shared_experts_see_every_token() -> None:
    layer = MoE(D, H, E, K, shared_F=6, **DOUBLE)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    y_TD, routing = layer(x_TD)
    shared_TD = swiglu(x_TD, layer.shared.w_in_EDG[0], layer.shared.w_out_EFD[0])
    torch.testing.assert_close(y_TD, by_hand(layer, x_TD, routing) + shared_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_leading_dimensions(dtype: torch.dtype) -> None:
    layer = MoE(D, H, E, K, dtype=dtype)
    for shape in ((D,), (0, D), (3, D), (2, 3, D), (2, 0, 3, D)):
        y, routing = layer(torch.randn(shape).to(dtype))
        assert y.shape == shape and y.dtype == dtype
        assert routing.gate_TK.dtype == torch.float32


def test_the_state_dict_is_as_documented() -> None:
    layer = MoE(D, H, E, K, bias=True, shared_F=4)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == {
        "router.w_DE": (D, E),
        "experts.w_in_EDG": (E, D, 2 * H),
        "experts.w_out_EFD": (E, H, D),
        "experts.b_in_EG": (E, 2 * H),
        "experts.b_out_ED": (E, D),
        "shared.w_in_EDG": (1, D, 8),
        "shared.w_out_EFD": (1, 4, D),
        "shared.b_in_EG": (1, 8),
        "shared.b_out_ED": (1, D),
    }
    # implementation and layout are not part of it: one checkpoint, any way to compute it
    other = MoE(
        D, H, E, K, bias=True, shared_F=4, layout="block(4)", impl="staged(grouped_gemm=block_sparse)"
    )
    other.load_state_dict(layer.state_dict())
    x = torch.randn(T, D)
    torch.testing.assert_close(layer(x)[0], other(x)[0])


def test_weights_are_loaded_and_refused() -> None:
    layer = MoE(D, H, E, K)
    weights = ExpertWeights(w_in_EDG=torch.randn(E, D, 2 * H), w_out_EFD=torch.randn(E, H, D))
    layer.experts.load_weights(weights)
    assert torch.equal(layer.experts.w_in_EDG, weights.w_in_EDG)
    with pytest.raises(ValueError, match="relu"):
        layer.experts.load_weights(
            ExpertWeights(w_in_EDG=torch.randn(E, D, H), w_out_EFD=torch.randn(E, H, D), activation="relu")
        )
    with pytest.raises(ValueError, match=r"w_in_EDG is \(5, 3, 16\)"):
        layer.experts.load_weights(
            ExpertWeights(w_in_EDG=torch.randn(E, 3, 2 * H), w_out_EFD=torch.randn(E, H, 3))
        )


def test_the_users_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="'softmax_topk'"):
        MoE(D, H, E, K, router="softmax_topK")
    with pytest.raises(ValueError, match="no implementation 'fastest'"):
        MoE(D, H, E, K, impl="fastest")
    with pytest.raises(ValueError, match="D=3"):
        MoE(D, H, E, K, router=build("softmax_topk", 3, E, K))
    with pytest.raises(ValueError, match="router_options"):
        MoE(D, H, E, K, router=build("softmax_topk", D, E, K), router_options={"order": "x"})
    with pytest.raises(ValueError, match="width 3"):
        MoE(D, H, E, K)(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"torch.float64"):
        MoE(D, H, E, K)(torch.randn(2, D).double())
    with pytest.raises(NotImplementedError, match="padded"):
        MoE(D, H, E, K, impl="staged(grouped_gemm=padded_bmm)")(torch.randn(2, D))


def test_a_masked_token_gets_nothing_and_changes_nothing() -> None:
    layer = MoE(D, H, E, K, layout=Layout.padded(capacity_factor=4.0))
    x_TD = torch.randn(T, D)
    mask_T = torch.arange(T) != 4
    y_TD, _ = layer(x_TD, TokenInfo(mask_T=mask_T))
    assert bool((y_TD[4] == 0).all())
    torch.testing.assert_close(y_TD[mask_T], layer(x_TD[mask_T])[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout,impl,dtype",
    [
        pytest.param(
            "block(4)", "staged(grouped_gemm=block_sparse)", torch.float32, marks=pytest.mark.nightly
        ),
        pytest.param(
            "padded(capacity_factor=1.25)",
            "staged(grouped_gemm=padded_bmm)",
            torch.float32,
            marks=pytest.mark.nightly,
        ),
        ("compact", "staged(grouped_gemm=torch_grouped_mm)", torch.bfloat16),
    ],
)
def test_compiles_as_one_graph(layout: str, impl: str, dtype: torch.dtype) -> None:
    layer = MoE(16, H, E, K, layout=layout, impl=impl, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 6, 16).to(dtype)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        y, routing = run(x)
        y.float().square().sum().backward()
        results.append((y, routing.gate_TK, *(p.grad.clone() for p in layer.parameters())))
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph, **close)


def test_autocast_computes_in_bfloat16_and_trains() -> None:
    layer = MoE(D, H, E, K, shared_F=4)
    x_TD = torch.randn(T, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_TD, routing = layer(x_TD)
    # the router is not rounded
    assert torch.equal(routing.gate_TK, layer(x_TD)[1].gate_TK)
    torch.testing.assert_close(y_TD.float(), layer(x_TD)[0], rtol=5e-2, atol=5e-2)
    y_TD.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize(
    "layout,causal,batch_dependent",
    [
        ("compact", True, False),
        ("block(4)", True, False),
        ("padded(capacity=3)", True, True),
        ("padded(capacity=3,drop=probs)", False, True),
    ],
)
def test_leaks_between_tokens_are_declared(layout: str, causal: bool, batch_dependent: bool) -> None:
    layer = MoE(D, H, E, K, layout=layout, **DOUBLE)
    assert (layer.causal, layer.batch_dependent) == (causal, batch_dependent)
    changed_by_later = changed_by_earlier = False
    for seed in range(30):
        torch.manual_seed(seed)
        x_TD = 10 * torch.randn(T, D, dtype=torch.float64)
        later, earlier = x_TD.clone(), x_TD.clone()
        later[T // 2 :] = 10 * torch.randn(T - T // 2, D)
        earlier[: T // 2] = 10 * torch.randn(T // 2, D)
        y_TD = layer(x_TD)[0]
        changed_by_later |= not torch.allclose(y_TD[: T // 2], layer(later)[0][: T // 2])
        changed_by_earlier |= not torch.allclose(y_TD[T // 2 :], layer(earlier)[0][T // 2 :])
    assert changed_by_later == (not causal)
    assert changed_by_earlier == batch_dependent


ONE_EXPERT = [
    *(("softmax_topk", {"order": order}) for order in ORDERS),
    ("switch", {}),
    ("noisy_topk", {}),
    ("hashed", {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("impl", ["staged", "eager_loop", "dense_all_experts"])
@pytest.mark.parametrize("router,options", ONE_EXPERT, ids=str)
def test_one_expert_is_a_dense_network(router: str, options: dict, impl: str, dtype: torch.dtype) -> None:
    layer = MoE(D, H, 1, 1, router=router, router_options=options, impl=impl, dtype=dtype)
    x_TD = torch.randn(T, D).to(dtype)
    y_TD, routing = layer(x_TD, TokenInfo(token_id_T=torch.arange(T)))
    assert bool((routing.gate_TK == 1).all())
    assert torch.equal(y_TD, swiglu(x_TD, layer.experts.w_in_EDG[0], layer.experts.w_out_EFD[0]))


@pytest.mark.slow
def test_shared_experts_with_a_gate_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = modeling.Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=H, shared_expert_intermediate_size=6, num_experts=E,
        num_experts_per_tok=K, norm_topk_prob=False,
    )  # fmt: skip
    theirs = modeling.Qwen2MoeSparseMoeBlock(config).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    order = {"dtype": torch.float64, "order": "softmax_then_topk"}
    layer = MoE(
        D, H, E, K, shared_F=6, shared_gate=True, dtype=torch.float64, router_options=order
    ).double()  # fmt: skip
    shared = theirs.shared_expert
    layer.experts.load_weights(
        from_transformers(theirs.experts.gate_up_proj, theirs.experts.down_proj, activation="swiglu")
    )
    layer.shared.load_weights(
        from_expert_list(
            [shared.gate_proj.weight], [shared.up_proj.weight], [shared.down_proj.weight], activation="swiglu"
        )
    )
    with torch.no_grad():
        layer.router.w_DE.copy_(theirs.gate.weight.T)
        layer.shared_gate_D1.copy_(theirs.shared_expert_gate.weight.T)
    x = torch.randn(2, 6, D, dtype=torch.float64)
    y, _ = layer(x)
    # their router rounds probabilities to float32
    torch.testing.assert_close(y, theirs(x), rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    assert float(layer.shared_gate_D1.grad.abs().sum()) > 0
    with pytest.raises(ValueError, match="shared_F"):
        MoE(D, H, E, K, shared_gate=True)


@pytest.mark.parametrize("impl", ["staged", "native"])
@pytest.mark.parametrize("part", ["router", "experts", "all"])
def test_what_is_frozen_has_no_gradient(monkeypatch, part: str, impl: str) -> None:
    native_gemm = import_module("moe_routing_bench.ops.grouped_gemm.native")
    if impl == "native" and (reason := cpp.why_not()) is not None:
        pytest.skip(reason)
    of_weights = []
    gradient = native_gemm._weight_gradient
    monkeypatch.setattr(
        native_gemm, "_weight_gradient", lambda *args: of_weights.append(1) or gradient(*args)
    )
    free = FreeExperts(zero=1, copy=1, constant=1)
    layer = MoE(D, H, E, K, shared_F=4, shared_gate=True, free_experts=free, impl=impl)
    assert layer.train_only("router").train_only(part) is layer
    x_TD = torch.randn(T, D, requires_grad=True)
    y_TD, _ = layer(x_TD)
    y_TD.square().sum().backward()
    trained = {name for name, p in layer.named_parameters() if p.grad is not None}
    routers = {name for name, _ in layer.named_parameters() if name.startswith("router.")}
    everything = {name for name, _ in layer.named_parameters()}
    assert trained == {"router": routers, "experts": everything - routers, "all": everything}[part]
    assert all(float(p.grad.abs().sum()) > 0 for n, p in layer.named_parameters() if n in trained)
    assert x_TD.grad is not None
    if impl == "native":
        assert bool(of_weights) == (part != "router"), "gradients of frozen weights cost nothing"
    with pytest.raises(ValueError, match="'gate'"):
        layer.train_only("gate")

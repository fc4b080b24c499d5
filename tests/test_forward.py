"""moe_forward is the layer: MoE and the oracle are held to it, in every layout, with gradients."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import Tensor

from moe_routing_bench import Layout, MoE, Routing, expert_ffn, make_plan, moe_forward
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op

LAYOUTS = [
    "compact",
    "padded(capacity_factor=8)",
    "padded(capacity=3)",
    "padded(capacity=3,drop=probs)",
    "block(4)",
]
LAYERS = {
    "plain": {},
    "biases": {"bias": True},
    "no gate": {"activation": "gelu"},
    "ragged": {"router": "top_p"},
    "bfloat16": {"dtype": torch.bfloat16},
}


def gradients(y_TD: Tensor, x_TD: Tensor, layer: MoE) -> list[Tensor | None]:
    leaves = [x_TD, *layer.parameters()]
    return list(torch.autograd.grad(y_TD.float().square().sum(), leaves, allow_unused=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_staged_layer_has_the_same_bits(kind: str, layout: str) -> None:
    options = LAYERS[kind]
    layer = MoE(D=24, F=16, E=5, K=2, layout=layout, impl="staged", **options)
    x_TD = torch.randn(9, 24, dtype=options.get("dtype", torch.float32), requires_grad=True)
    ours = moe_forward(x_TD, layer.router, layer.experts.weights(), layout)
    theirs, _ = layer(x_TD)
    assert torch.equal(ours, theirs)
    for one, other in zip(gradients(ours, x_TD, layer), gradients(theirs, x_TD, layer), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_agrees(layout: str) -> None:
    double = {"dtype": torch.float64}
    layer = MoE(D=24, F=16, E=5, K=2, bias=True, router_options=double, **double)
    x_TD = torch.randn(9, 24, **double, requires_grad=True)
    routing, weights = layer.router(x_TD), layer.experts.weights()
    assert isinstance(routing, Routing)
    plan = make_plan(routing, Layout.parse(layout))
    oracle = expert_ffn_op.reference(x_TD, routing.gate_TK, plan, weights)
    ours = moe_forward(x_TD, layer.router, weights, Layout.parse(layout))
    torch.testing.assert_close(ours, oracle)
    for one, other in zip(gradients(ours, x_TD, layer), gradients(oracle, x_TD, layer), strict=True):
        torch.testing.assert_close(one, other)


def test_what_auto_picks_agrees() -> None:
    layer, x_TD = MoE(D=64, F=32, E=8, K=2), torch.randn(33, 64)
    with torch.no_grad():
        ours = moe_forward(x_TD, layer.router, layer.experts.weights())
        torch.testing.assert_close(layer(x_TD)[0], ours, atol=1e-5, rtol=1e-4)
        routing = layer.router(x_TD)
        ffn = expert_ffn(x_TD, routing.gate_TK, layer.plan(routing), layer.experts.weights())
        torch.testing.assert_close(ffn, ours, atol=1e-5, rtol=1e-4)


def test_a_router_that_mixes_is_refused() -> None:
    layer = MoE(D=8, F=8, E=4, K=1, router="soft_moe")
    with pytest.raises(ValueError, match="use MoE"):
        moe_forward(torch.randn(4, 8), layer.router, layer.experts.weights())


def test_it_is_short() -> None:
    (function,) = ast.parse(inspect.getsource(moe_forward)).body
    assert isinstance(function, ast.FunctionDef)
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    assert len(statements) <= 15

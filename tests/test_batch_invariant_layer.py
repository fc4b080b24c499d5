"""MoE(batch_invariant=True): a token's result has the same bits alone, among others and elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.routers.router import all_routers

needs_cpp = pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
ALONE = [name for name, rule in all_routers().items() if not rule.batch_dependent and name != "hashed"]


def differing(layer: MoE, x_TD: Tensor) -> list[str]:
    """The batches in which a token has other bits."""
    T, found = len(x_TD), []
    with torch.no_grad():
        right = layer(x_TD)[0]
        for n in (1, 2, 3, 7, 16, 17, 33):
            if not torch.equal(layer(x_TD[T - n :])[0], right[T - n :]):
                found.append(f"the last {n}")
        if not torch.equal(layer(x_TD.flip(0))[0], right.flip(0)):
            found.append("backwards")
        crowd = torch.cat([x_TD, x_TD[:1].expand(200, -1)])
        if not torch.equal(layer(crowd)[0][:T], right):
            found.append("with 200 equal tokens")
    return found


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": "sigmoid_bias", "layout": "block(8)"},
        {"shared_F": 24, "shared_gate": True, "bias": True},
        {"router_options": {"bias": True, "logits_dtype": torch.bfloat16}},
        {"router_options": {"fused": "auto"}},
    ],
    ids=["plain", "sigmoid", "shared", "logits_dtype", "fused"],
)
def test_the_layer_has_the_same_bits_in_every_batch(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = MoE(D=96, F=40, E=12, K=3, dtype=dtype, batch_invariant=True, **options).eval()
    x_TD = torch.randn(70, 96).to(dtype)
    assert differing(layer, x_TD) == []
    if "bias" not in options:
        assert differing(layer.freeze(), x_TD) == []


@needs_cpp
@pytest.mark.parametrize("name", ALONE)
def test_every_rule_that_looks_at_a_token_alone(name: str) -> None:
    torch.manual_seed(4)
    K = all_routers()[name].fixed_K or 2
    layer = MoE(D=64, F=24, E=8, K=K, router=name, batch_invariant=True).eval()
    assert differing(layer, torch.randn(50, 64)) == []


@needs_cpp
def test_without_it_bits_differ() -> None:
    """Else the tests above would show nothing."""
    torch.manual_seed(3)
    layer = MoE(D=96, F=40, E=12, K=3, impl="staged").eval()
    assert "the last 1" in differing(layer, torch.randn(70, 96))


@needs_cpp
def test_it_computes_and_trains_as_the_plain_layer() -> None:
    torch.manual_seed(5)
    options: dict[str, Any] = {"D": 32, "F": 16, "E": 6, "K": 2, "shared_F": 8, "shared_gate": True}
    plain, invariant = MoE(**options, impl="staged"), MoE(**options, batch_invariant=True)
    invariant.load_state_dict(plain.state_dict())
    x_TD = torch.randn(20, 32)
    grads = []
    for layer in (plain, invariant):
        layer(x_TD)[0].square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None
        torch.testing.assert_close(grads[1][name], grad)


@pytest.mark.parametrize(
    "options,says",
    [
        ({"impl": "staged"}, "these are: native.batch_invariant=True"),
        ({"impl": "eager_loop"}, "these are: native.batch_invariant=True"),
        ({"layout": "padded(capacity_factor=2)"}, "dropped"),
        ({"router": "expert_choice"}, "ExpertChoiceRouter"),
        ({"router_options": {"topk": "torch_topk"}}, "topk.torch_topk"),
    ],
)
def test_what_cannot_be_so_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MoE(D=16, F=8, E=4, K=2, batch_invariant=True, **options)


@needs_cpp
def test_it_says_what_runs_and_one_for_all_sizes() -> None:
    layer = MoE(D=16, F=8, E=4, K=2, batch_invariant=True)
    assert "expert_ffn.native(batch_invariant=True) (auto: the first on" in layer.implementation
    with pytest.raises(NotImplementedError, match="batch-invariant"):
        layer.double()(torch.randn(3, 16, dtype=torch.float64))


@needs_cpp
def test_the_plugin_takes_only_such() -> None:
    pytest.importorskip("transformers")
    from moe_routing_bench.models import transformers as plugin

    assert plugin.register(batch_invariant=True) == "moe_routing_bench:native(batch_invariant=True)"
    with pytest.raises(ValueError, match=r"expert_ffn\.staged.* these are: native"):
        plugin.register("staged", batch_invariant=True)

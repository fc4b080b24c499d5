"""The override for torchtitan gives what its own experts give, values and gradients.

What needs torchtitan is skipped without it; measurements/models/torchtitan_override.sh has it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from child_process import python
from moe_routing_bench.core.accuracy import judge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:In CPU autocast"),
]

INSTALLED = importlib.util.find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed")
TARGET = "moe_routing_bench.models.torchtitan.experts"
D, F, E, K = 64, 96, 6, 2

WITHOUT = """
import importlib.util, importlib.metadata, sys
real, wanted = importlib.util.find_spec, sys.argv[1]
there = None if wanted == "absent" else True
importlib.util.find_spec = lambda name, package=None: there if name == "torchtitan" else real(name, package)
importlib.metadata.version = lambda name: wanted
try:
    import moe_routing_bench.models.torchtitan
except NotImplementedError as reason:
    print(reason)
"""


@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        ("absent", "torchtitan==0.3.0"),
        ("0.4.1", "0.4.1"),
        ("0.31", "0.31"),
    ],
)
def test_absent_or_another_version_is_refused_with_a_sentence(which: str, sentence: str) -> None:
    assert sentence in python(WITHOUT, which).stdout


def layers(**kwargs: Any) -> tuple[Any, Any]:
    """torchtitan's MoE as it is and with the override, on the same weights."""
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    def config() -> Any:
        return MoE.Config(
            num_experts=E,
            routed_experts=RoutedExperts.Config(
                inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
                token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
            ),
            router=TokenChoiceTopKRouter.Config(
                num_experts=E, top_k=K, gate=Linear.Config(in_features=D, out_features=E, bias=False)
            ),
        )

    overridden = config()
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, kwargs) if kwargs else TARGET]), overridden)
    assert len(lines) == 1 and "routed_experts.inner_experts" in lines[0]
    theirs, ours = config().build(), overridden.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        theirs.expert_bias_E[E - 1] = -10  # an expert without tokens
        theirs.tokens_per_expert_E.zero_()
    ours.load_state_dict(theirs.state_dict())  # the same names
    return theirs, ours


def oracle(layer: Any, x_BLD: Tensor, dy_BLD: Tensor) -> dict[str, Tensor]:
    """By hand in float64, from what torchtitan rounds to bfloat16 first."""
    experts = layer.routed_experts.inner_experts
    w = {n: p.detach().bfloat16().double().requires_grad_() for n, p in experts.named_parameters()}
    x_TD = x_BLD.detach().flatten(0, 1).bfloat16().double().requires_grad_()
    with torch.no_grad():
        gate_BLK, expert_BLK, _ = layer.router(x_BLD, layer.expert_bias_E)
    y_TD = torch.zeros_like(x_TD)
    for k in range(K):
        for e in range(E):
            t = (expert_BLK.flatten(0, 1)[:, k] == e).nonzero().flatten()
            h = functional.silu(x_TD[t] @ w["w1_EFD"][e].T) * (x_TD[t] @ w["w3_EFD"][e].T)
            gate = gate_BLK.flatten(0, 1)[t, k, None].double()
            y_TD = y_TD.index_add(0, t, gate * (h @ w["w2_EDF"][e].T))
    y_TD.backward(dy_BLD.flatten(0, 1).double())
    found = {name: tensor.grad for name, tensor in w.items()}
    return {"y": y_TD.detach().view(x_BLD.shape), **found}  # type: ignore[dict-item]


@needs_torchtitan
@pytest.mark.parametrize("impl", ["auto", "expert_loop"])
def test_values_and_gradients_are_those_of_torchtitan(impl: str) -> None:
    theirs, ours = layers(**({} if impl == "auto" else {"impl": impl}))
    assert type(ours.routed_experts.inner_experts).__module__ == "moe_routing_bench.models.torchtitan"
    x_BLD, dy_BLD = torch.randn(2, 40, D), torch.randn(2, 40, D)
    found = []
    for layer in (theirs, ours):
        x = x_BLD.clone().requires_grad_()
        y = layer(x)
        y.backward(dy_BLD)
        gradients = {n: p.grad for n, p in layer.routed_experts.inner_experts.named_parameters()}
        found.append({"y": y.detach(), "x": x.grad, "gate": layer.router.gate.weight.grad, **gradients})
    right = oracle(theirs, x_BLD, dy_BLD)
    for name, value in right.items():
        assert float(value.abs().sum()) > 0
        verdict = judge(found[1][name], value, found[0][name])
        assert verdict.passed, f"{name}: {verdict.sentence}"
    for name in ("x", "gate"):  # through torchtitan's router too: as near as bfloat16 is
        torch.testing.assert_close(
            found[1][name], found[0][name], rtol=0.05, atol=0.02 * float(found[0][name].abs().max())
        )


@needs_torchtitan
def test_rows_behind_the_last_expert_belong_to_nobody() -> None:
    from moe_routing_bench.models.torchtitan import plan_of

    plan = plan_of(7, torch.tensor([2, 2, 5], dtype=torch.int32)).validate()
    assert plan.count_E.tolist() == [2, 0, 3] and plan.pair_R.tolist() == [0, 1, 2, 3, 4, -1, -1]


@needs_torchtitan
def test_an_unknown_implementation_is_an_error_with_a_hint() -> None:
    with pytest.raises(ValueError, match="natve"):
        layers(impl="natve")

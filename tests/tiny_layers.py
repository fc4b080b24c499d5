"""Routings, weights and arguments of expert_ffn in a size for tests, and the judge of what comes out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_routing_bench import ExpertWeights, Layout, Routing, RoutingPlan, all_ops
from moe_routing_bench.core import cpp
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.experts import GATED

MAKE_PLAN = all_ops()["make_plan"].get("argsort")
EXPERT_FFN = all_ops()["expert_ffn"]
needs_compiler = pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
Arguments = tuple[Tensor, Tensor, RoutingPlan, ExpertWeights]


def routing_of(T: int, K: int, E: int, *, absent: float = 0.0) -> Routing:
    """Different experts in a row; a share of the choices names none, by -1 and by ids past both ends."""
    expert_TK = torch.rand(T, E).argsort(dim=1)[:, :K]
    nobody_TK = torch.tensor([-1, -3, E, E + 3])[torch.randint(4, (T, K))]
    expert_TK = torch.where(torch.rand(T, K) < absent, nobody_TK, expert_TK)
    return Routing(expert_TK=expert_TK, gate_TK=torch.rand(T, K), num_experts=E, ragged=absent > 0)


def weights_of(
    E: int = 5, D: int = 40, F: int = 24, *, dtype: torch.dtype = torch.float32, activation: str = "swiglu",
    bias: bool = False,
) -> ExpertWeights:  # fmt: skip
    G = 2 * F if activation in GATED else F
    weights = ExpertWeights(
        w_in_EDG=torch.randn(E, D, G) / D**0.5,
        w_out_EFD=torch.randn(E, F, D) / F**0.5,
        b_in_EG=torch.randn(E, G) if bias else None,
        b_out_ED=torch.randn(E, D) if bias else None,
        activation=activation,
    )
    return weights.to(dtype=dtype)


def arguments(
    T: int = 9, K: int = 2, E: int = 5, D: int = 40, F: int = 24, *, dtype: torch.dtype = torch.float32,
    activation: str = "swiglu", bias: bool = False, layout: str = "compact", absent: float = 0.0,
) -> Arguments:  # fmt: skip
    routing = routing_of(T, K, E, absent=absent)
    weights = weights_of(E, D, F, dtype=dtype, activation=activation, bias=bias)
    return torch.randn(T, D).to(dtype), routing.gate_TK, MAKE_PLAN(routing, Layout.parse(layout)), weights


def assert_right(
    y_TD: Tensor, x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights
) -> None:
    with torch.no_grad():
        exact = weights.to(dtype=torch.float64)
        oracle = EXPERT_FFN.reference(x_TD.double(), gate_TK.double(), plan, exact)
        verdict = judge(y_TD, oracle, EXPERT_FFN.reference(x_TD, gate_TK, plan, weights))
    assert verdict.passed, verdict.sentence


def assert_same_plan(got: RoutingPlan, want: RoutingPlan) -> None:
    for name, value in vars(want).items():
        other = getattr(got, name)
        assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, name


def swiglu(x: Tensor, w_in_DG: Tensor, w_out_FD: Tensor) -> Tensor:
    """One expert by hand."""
    gate, up = (x @ w_in_DG).chunk(2, dim=-1)
    return (nn.functional.silu(gate) * up) @ w_out_FD


def assert_gradients(layer: nn.Module, x_TD: Tensor, **options: bool) -> None:
    """Against numerical differentiation, by x and all that is trained; and none of them is zero."""
    names, values = zip(*((n, p) for n, p in layer.named_parameters() if p.requires_grad), strict=True)

    def run(x_TD: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y_TD, routing = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x_TD,))
        return y_TD if routing.aux_loss is None else (y_TD, routing.aux_loss)

    x_TD.requires_grad_()
    assert torch.autograd.gradcheck(run, (x_TD, *values), **options)
    layer(x_TD)[0].square().sum().backward()
    assert all(float(value.grad.abs().sum()) > 0 for value in values)

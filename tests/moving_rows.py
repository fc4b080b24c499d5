"""What every pair of kernels that move rows must do, whatever they are written in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_routing_bench import Layout, RoutingPlan, all_ops
from moe_routing_bench.ops.implementation import Implementation
from tiny_layers import MAKE_PLAN, routing_of

DISPATCH, COMBINE = all_ops()["dispatch"], all_ops()["combine"]


def plan_of(T: int, K: int, E: int = 5, layout: str = "block(8)", absent: float = 0.2) -> RoutingPlan:
    return MAKE_PLAN(routing_of(T, K, E, absent=absent), Layout.parse(layout))


def with_gradients(
    run: Callable[..., Tensor], inputs: tuple[Tensor, ...], plan: RoutingPlan, upstream: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = run(*leaves, plan)
    if not result.requires_grad:  # plain torch on nothing
        return [result, *map(torch.zeros_like, leaves)]
    gradients = torch.autograd.grad(result, leaves, upstream, allow_unused=True, materialize_grads=True)
    return [result.detach(), *gradients]


def assert_agree(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    plan: RoutingPlan,
    upstream: Tensor,
) -> None:
    """Results and gradients."""
    got, want = (with_gradients(run, inputs, plan, upstream) for run in (ours, theirs))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def check_strides(gather: Implementation, gather_sum: Implementation) -> None:
    plan = plan_of(T=6, K=2)
    x_TD, dx_RD = torch.randn(40, 12).t()[::2], torch.randn(40).expand(plan.num_rows, 40)
    assert x_TD.stride() == (2, 12) and dx_RD.stride() == (0, 1)
    assert torch.equal(gather(x_TD, plan), DISPATCH.reference(x_TD, plan))
    assert_agree(gather, DISPATCH.reference, (x_TD,), plan, dx_RD)
    y_RD, gate_TK = torch.randn(40, plan.num_rows).t(), torch.rand(2, 6).t()
    assert_agree(gather_sum, COMBINE.reference, (y_RD, gate_TK), plan, torch.ones(()).expand(6, 40))


def check_edges(
    gather: Implementation, gather_sum: Implementation, T: int, K: int, D: int, layout: str
) -> None:
    plan = plan_of(T=T, K=K, layout=layout)
    x_TD, dx_RD = torch.randn(T, D), torch.randn(plan.num_rows, D)
    assert_agree(gather, DISPATCH.get("index_select"), (x_TD,), plan, dx_RD)
    y_RD, gate_TK, dy_TD = torch.randn(plan.num_rows, D), torch.rand(T, K), torch.randn(T, D)
    assert_agree(gather_sum, COMBINE.get("gather_sum"), (y_RD, gate_TK), plan, dy_TD)


def check_gradients_nobody_wants(gather_sum: Implementation, work: Callable[[], int] | None = None) -> None:
    """work: how much was done so far; one gradient takes less than both."""
    plan = plan_of(T=5, K=2)
    y_RD, gate_TK = torch.randn(plan.num_rows, 8), torch.rand(5, 2)
    both = with_gradients(gather_sum, (y_RD, gate_TK), plan, torch.ones(5, 8))
    work_for_both = work() if work else 0
    for wanted, expected in ((0, both[1]), (1, both[2])):
        leaves = [y_RD.clone(), gate_TK.clone()]
        leaves[wanted].requires_grad_()
        before = work() if work else 0
        gather_sum(*leaves, plan).backward(torch.ones(5, 8))
        assert torch.equal(leaves[wanted].grad, expected) and leaves[1 - wanted].grad is None
        assert work is None or work() - before < work_for_both


def check_mistakes(gather: Implementation, gather_sum: Implementation) -> None:
    plan = plan_of(T=3, K=2)
    x_TD, y_RD, gate_TK = torch.randn(3, 8), torch.randn(plan.num_rows, 8), torch.rand(3, 2)
    with pytest.raises(ValueError, match="4 tokens"):
        gather(torch.randn(4, 8), plan)
    with pytest.raises(ValueError, match="1 rows"):
        gather_sum(y_RD[:1], gate_TK, plan)
    assert "float64" in str(gather.why_not(x_TD.double(), plan))
    assert "float16" in str(gather_sum.why_not(y_RD, gate_TK.half(), plan))

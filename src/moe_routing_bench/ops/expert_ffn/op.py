"""expert_ffn: the whole expert layer.   x_TD, gate_TK, plan, weights -> y_TD

y_t = sum over k of gate_tk * expert(t, k)(x_t), over the pairs that have a row in the plan; an expert is
activate(x @ w_in + b_in) @ w_out + b_out. Fused kernels live here; `staged` composes the other operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_routing_bench.core.cost import INDEX_BYTES, Cost, counts, tokens_with_a_row
from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.formats.int8 import rounded_rows
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.combine.op import judge
from moe_routing_bench.ops.implementation import Implementation, tensors_in
from moe_routing_bench.ops.registry import Op

STRIP = 128  # columns


def reference(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    return by_expert(x_TD, gate_TK, plan, weights)


def by_expert(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    rounded: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """The reference. With `rounded`, the rows of both products are rounded as in kernels with narrow rows."""
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, gate_TK.dtype), torch.float32)
    y_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    expert_TK = plan.expert_TK()
    # unbind has one gradient; w[e] would have a gradient of all of w for every expert
    w_in, w_out = weights.w_in_EDG.unbind(0), weights.w_out_EFD.unbind(0)
    for e in range(weights.num_experts):
        t, k = (expert_TK == e).nonzero(as_tuple=True)
        if not t.numel() and not torch.is_grad_enabled():  # converting its weights takes time
            continue
        h = _times(rounded(x_TD[t]), w_in[e])
        h = activate(h if weights.b_in_EG is None else h + weights.b_in_EG[e], weights.activation)
        y = _times(rounded(h), w_out[e])
        y = y if weights.b_out_ED is None else y + weights.b_out_ED[e]
        y_TD = y_TD.index_add(0, t, gate_TK[t, k].to(wide).unsqueeze(1) * y.to(wide))
    return y_TD.to(x_TD.dtype)


def _times(rows_ND: Tensor, w_DF: Any) -> Tensor:
    """The product. Weights of another dtype are converted one expert at a time, because all of them may not
    fit in memory; without gradients in strips that stay in the cache, which is 3x faster."""
    if not isinstance(w_DF, Tensor) or w_DF.dtype == rows_ND.dtype or torch.is_grad_enabled():
        return rows_ND @ w_DF.to(rows_ND.dtype)
    return torch.cat([rows_ND @ strip.to(rows_ND.dtype) for strip in w_DF.split(STRIP, 1)], 1)


def with_int8_rows(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    """The reference with rows rounded to 8 bits in both products, each row with its own scale."""
    return by_expert(x_TD, gate_TK, plan, weights, rounded=rounded_rows)


def cost(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Cost:
    """Both projections and the gates. Intermediate results need no memory, so only x and y are counted."""
    pairs, owned, active = counts(plan)
    matrices = weights.w_in_EDG[0].numel() + weights.w_out_EFD[0].numel()
    parameters = sum(tensor[0].numel() for tensor in weights.tensors().values())
    T, K, D = plan.num_tokens, plan.num_choices, weights.D
    rows = (tokens_with_a_row(plan) + T) * D * x_TD.element_size()
    return Cost(
        useful_flops=2 * matrices * pairs + 2 * D * pairs,
        executed_flops=2 * matrices * owned + 2 * D * pairs,
        weight_bytes=active * parameters * weights.w_in_EDG.element_size(),
        activation_bytes=rows + T * K * (gate_TK.element_size() + INDEX_BYTES),
    )


op = Op(
    __package__, reference, cost=cost, judge=judge, weights="weights", int8_rows=with_int8_rows, widens=True,
    default="staged", stage=6, by_token=lambda out, args: out,
    usual=("staged", "auto", "frozen(auto)", "hf_grouped_mm", "hf_eager", "hf_batched_mm"),
)  # fmt: skip


def expert_ffn(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, impl: str = "auto"
) -> Tensor:
    """Compute the whole expert layer for a plan: both projections, the activation and the gates.

    >>> layer, x_TD = mrb.MoE(D=8, F=16, E=4, K=2), torch.randn(5, 8)
    >>> routing = layer.router(x_TD)
    >>> y_TD = mrb.expert_ffn(x_TD, routing.gate_TK, layer.plan(routing), layer.experts.weights())
    >>> torch.equal(y_TD, layer(x_TD)[0])
    True
    """
    return resolve(op, impl)(x_TD, gate_TK, plan, weights)


Forward = Callable[[Tensor, Tensor, RoutingPlan, ExpertWeights], Tensor]


def check_sizes(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> None:
    (T, D), E = x_TD.shape, weights.num_experts
    if tuple(gate_TK.shape) != (plan.num_tokens, plan.num_choices):
        wanted = f"{plan.num_tokens} x {plan.num_choices}"
        raise ValueError(f"gate_TK has shape {tuple(gate_TK.shape)}, the plan was made for {wanted}")
    if T != plan.num_tokens or D != weights.D or plan.num_experts != E:
        raise ValueError(
            f"x is {T} x {D}, the plan for {plan.num_tokens} tokens and {plan.num_experts} experts, "
            f"the weights for width {weights.D} and {E} experts"
        )


def recomputed(
    forward: Forward,
    gradients: Implementation,
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
) -> Tensor:
    """Computes forward(x_TD, gate_TK, plan, weights) with the gradients of another implementation.

    This is for a kernel without a backward. It saves only its inputs, and backward recomputes the forward of
    the other implementation. torch.compile cannot trace this, so there only the other implementation runs.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors_in((x_TD, gate_TK, weights))):
        return forward(x_TD, gate_TK, plan, weights)
    if torch.compiler.is_compiling():
        return gradients.run(x_TD, gate_TK, plan, weights)
    b_in_EG, b_out_ED = weights.b_in_EG, weights.b_out_ED
    return _Recomputed.apply(
        forward, gradients, plan, weights.activation, x_TD, gate_TK, weights.w_in_EDG, weights.w_out_EFD,
        b_in_EG, b_out_ED,
    )  # fmt: skip


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        gradients: Implementation,
        plan: RoutingPlan,
        activation: str,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.gradients, ctx.plan, ctx.activation = gradients, plan, activation
        ctx.save_for_backward(*leaves)
        return forward(*_arguments(plan, activation, leaves))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            y_TD = ctx.gradients.run(*_arguments(ctx.plan, ctx.activation, leaves))
        if not y_TD.requires_grad:  # the result does not depend on them
            return (None,) * len(ctx.needs_input_grad)
        wanting = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        gradients_left = iter(torch.autograd.grad(y_TD, wanting, dy_TD, allow_unused=True))
        return None, None, None, None, *(next(gradients_left) if wants else None for wants in wanted)


def _arguments(
    plan: RoutingPlan, activation: str, leaves: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, RoutingPlan, ExpertWeights]:
    x_TD, gate_TK, w_in_EDG, w_out_EFD, b_in_EG, b_out_ED = leaves
    assert x_TD is not None and gate_TK is not None and w_in_EDG is not None and w_out_EFD is not None
    weights = ExpertWeights(
        w_in_EDG=w_in_EDG, w_out_EFD=w_out_EFD, b_in_EG=b_in_EG, b_out_ED=b_out_ED, activation=activation
    )
    return x_TD, gate_TK, plan, weights

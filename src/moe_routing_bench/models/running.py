"""Runs the experts of a model by our operations, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.experts import GATED, ExpertWeights
from moe_routing_bench.core.frozen import Form, Frozen
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.reading import make_weights
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op

LAYOUT = Layout.compact()


def make_plan(expert_TK: Tensor, gate_TK: Tensor, weights: ExpertWeights) -> tuple[Tensor, RoutingPlan]:
    """Returns the gates, 0 where no expert is named (Transformers' may be anything there), and the plan."""
    E = weights.num_experts
    routing = Routing(
        expert_TK=expert_TK.long(), gate_TK=gate_TK, num_experts=E, ragged=_some_are_absent(expert_TK, E)
    )
    if routing.ragged:
        routing = replace(routing, gate_TK=torch.where(routing.chosen_TK(), gate_TK, 0.0))
    return routing.gate_TK, resolve(make_plan_op, "auto", lambda: weights)(routing, LAYOUT)


def _some_are_absent(expert_TK: Tensor, E: int) -> bool:
    """Returns whether some ids name no expert: Transformers uses ids of E and more for "not on this rank". On
    a CPU looking costs 5 us, and masks a fifth of a training step. Elsewhere looking would stop the device,
    so the answer is True."""
    if expert_TK.device.type != "cpu" or expert_TK.numel() == 0:
        return True
    low, high = expert_TK.aminmax()
    return bool(low < 0) or bool(high >= E)


def run_experts(
    x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor, weights: ExpertWeights, impl: str
) -> Tensor:
    gate_TK, plan = make_plan(expert_TK, gate_TK, weights)
    return resolve(expert_ffn_op, impl)(x_TD, gate_TK, plan, weights)


def stages(impl: str) -> dict[str, str]:
    """Returns the implementations of dispatch, grouped_gemm and combine for a module whose activation we have
    no name for: the module's function is called between them."""
    names = ("dispatch", "grouped_gemm", "combine")
    if impl == "auto":
        return dict.fromkeys(names, "auto")
    named = expert_ffn_op.get(impl)
    if named.batch_invariant:
        raise NotImplementedError(
            "the model's own function between the products is not known to be batch-invariant; freeze() the "
            "model if its function has a name here"
        )
    if named.name == "staged":
        return {name: str(named.config[name]) for name in names}
    if named.name == "native" and "store" not in named.config:
        level = f"(level={named.config['level']})" if "level" in named.config else ""
        return dict.fromkeys(names, f"native{level}")
    raise NotImplementedError(
        f"expert_ffn.{named.label} computes the activation itself and does not know that of this model; "
        "use auto, native or staged"
    )


@torch.compiler.disable(
    reason="the model's own activation is called between kernels that torch.compile cannot trace; compile "
    "without fullgraph=True"
)
def run_around(
    x_TD: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    weights: ExpertWeights,
    impl: str,
    activation: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Runs dispatch, grouped_gemm, the model's own function, grouped_gemm and combine. `after` is applied to
    the experts' results."""
    gate_TK, plan = make_plan(expert_TK, gate_TK, weights)
    dispatch, grouped_gemm, combine = (
        resolve(op, name, lambda: weights)
        for op, name in zip((dispatch_op, grouped_gemm_op, combine_op), stages(impl).values(), strict=True)
    )
    # rows without an expert may hold any value; a function with parameters would make NaN gradients of them
    holds_R1 = (plan.pair_R >= 0).unsqueeze(1)

    def gemm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.where(holds_R1, grouped_gemm(x, w, plan, b), 0.0)

    h_RF = activation(gemm(dispatch(x_TD, plan), weights.w_in_EDG, weights.b_in_EG))
    y_RD = gemm(h_RF, weights.w_out_EFD, weights.b_out_ED)
    y_RD = y_RD if after is None else after(y_RD)
    return combine(y_RD, gate_TK, plan)


# torch.compile cannot trace C++ called by address. Without gradients the call is one node of the graph, an
# operator of its own; with them the graph breaks around it, and autograd sees the operations inside.


@torch.library.custom_op("moe_routing_bench::experts", mutates_args=())
def experts_op(
    x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor,
    w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    activation: str, is_transposed: bool, interleaved: bool, impl: str,
) -> Tensor:  # fmt: skip
    """Runs the experts of a model without gradients, for torch.compile."""
    weights = make_weights(
        w_in, w_out, b_in, b_out,
        activation=activation, is_transposed=is_transposed, interleaved=interleaved,
    )  # fmt: skip
    return run_experts(x_TD, expert_TK, gate_TK, weights, impl)


@experts_op.register_fake
def _(x_TD: Tensor, *rest: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


@torch.library.custom_op("moe_routing_bench::frozen_experts", mutates_args=())
def frozen_experts_op(
    x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor,
    panels_in: Tensor, panels_out: Tensor,
    b_in: Tensor | None, b_out: Tensor | None, size_in: list[int], size_out: list[int],
    kernel: str, store: str, activation: str, interleaved: bool, impl: str,
) -> Tensor:  # fmt: skip
    """Does the same with frozen weights, which arrive as the plain tensors inside them."""

    def frozen(panels: Tensor, size: list[int], gated: bool) -> Frozen:
        form = Form(
            kernel=kernel, size=(size[0], size[1], size[2]), dtype=x_TD.dtype, gated=gated,
            store=store or None,
        )  # fmt: skip
        return Frozen(panels, form)

    weights = make_weights(
        frozen(panels_in, size_in, activation in GATED),
        frozen(panels_out, size_out, False), b_in, b_out,
        activation=activation, is_transposed=True, interleaved=interleaved,
    )  # fmt: skip
    return run_experts(x_TD, expert_TK, gate_TK, weights, impl)


@frozen_experts_op.register_fake
def _(x_TD: Tensor, *rest: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


run_experts_for_training = torch.compiler.disable(
    run_experts,
    reason="with gradients wanted the experts run kernels that torch.compile cannot trace; compile without "
    "fullgraph=True, or call the model under torch.no_grad()",
)

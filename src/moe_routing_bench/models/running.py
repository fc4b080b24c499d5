"""Experts of a model run by our operations: which implementation, why, and the call itself, compiled or
not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.models.reading import make_weights
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.decisions import Facts
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import Implementation, Op
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

LAYOUT = Layout.compact()


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Picked(run=<expert_ffn.native>, why="decisions are off; native can run here")"""

    run: Implementation
    why: str


def pick(op: Op, impl: str, args: tuple[Any, ...], facts: Facts | None = None) -> Picked:
    """The implementation to call with these arguments. "auto": the measured winner if decisions are on and it
    can run, else `native` if it can run, else the op's default. A named one that cannot run raises
    NotImplementedError with the reason."""
    if impl != "auto":
        run = op.get(impl)
        if (reason := run.why_not(*args)) is not None:
            raise NotImplementedError(f"{op.name}.{run.label}: {reason}")
        return Picked(run=run, why="asked for")
    choice = choose(op, facts)
    if choice.warning is not None:
        warnings.warn(choice.warning, UserWarning, stacklevel=2)
    said = choice.why.removeprefix(f"the default of {op.name}: ")
    if choice.decisions is not None:
        if (reason := op.why_not(choice.spec, *args)) is None:
            return Picked(run=op.get(choice.spec), why=said)
        said = f"the measured winner {choice.spec} cannot run here: {reason}"
        warnings.warn(f"{op.name}: {said}; another one runs", UserWarning, stacklevel=2)
    if (reason := op.why_not("native", *args)) is None:
        return Picked(run=op.get("native"), why=f"{said}; native can run here")
    if (lacking := op.why_not(op.default, *args)) is not None:
        raise NotImplementedError(f"{op.name}.{op.default}: {lacking}; and native: {reason}")
    return Picked(run=op.get(op.default), why=f"{said}; native cannot run: {reason}")


def pick_ffn(impl: str, x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Picked:
    w_EDG = weights.w_in_EDG
    sizes = (*w_EDG.shape[:2], weights.F, plan.num_choices, plan.num_tokens)
    facts = _facts(*sizes, w_EDG.dtype, w_EDG.device.type, weights.activation)
    return pick(expert_ffn_op, impl, (x_TD, gate_TK, plan, weights), facts)


@lru_cache(maxsize=1024)
def _facts(E: int, D: int, F: int, K: int, T: int, dtype: torch.dtype, device: str, activation: str) -> Facts:
    return Facts(
        D=D,
        F=F,
        E=E,
        K=K,
        dtype=str(dtype).removeprefix("torch."),
        layout=str(LAYOUT),
        activation=activation,
        tokens=T,
        device=device,
    )


def make_plan(expert_TK: Tensor, gate_TK: Tensor, E: int) -> tuple[Tensor, RoutingPlan]:
    """The plan, and the gates with 0 where no expert is named: there Transformers' may be anything."""
    routing = Routing(
        expert_TK=expert_TK.long(), gate_TK=gate_TK, num_experts=E, ragged=_some_are_absent(expert_TK, E)
    )
    if routing.ragged:
        routing = replace(routing, gate_TK=torch.where(routing.chosen_TK(), gate_TK, 0.0))
    plan = pick(make_plan_op, "auto", (routing, LAYOUT)).run.run(routing, LAYOUT)
    return routing.gate_TK, plan


def _some_are_absent(expert_TK: Tensor, E: int) -> bool:
    """Ids of E and more are Transformers' sign for "not on this rank". On a CPU a look at them costs 5 us and
    masks for them a fifth of a training step; elsewhere the look would stop the device, so there may be."""
    if expert_TK.device.type != "cpu" or expert_TK.numel() == 0:
        return True
    low, high = expert_TK.aminmax()
    return bool(low < 0) or bool(high >= E)


def run_experts(
    x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor, weights: ExpertWeights, impl: str
) -> Tensor:
    gate_TK, plan = make_plan(expert_TK, gate_TK, weights.num_experts)
    return pick_ffn(impl, x_TD, gate_TK, plan, weights).run.run(x_TD, gate_TK, plan, weights)


def stages(impl: str) -> dict[str, str]:
    """The implementations of dispatch, grouped_gemm and combine for a module whose activation we have no name
    for, so that it must be called between them."""
    names = ("dispatch", "grouped_gemm", "combine")
    if impl == "auto":
        return dict.fromkeys(names, "auto")
    named = expert_ffn_op.get(impl)
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
    """dispatch, grouped_gemm, the model's own function, grouped_gemm, combine; `after` is applied to what an
    expert gives."""
    gate_TK, plan = make_plan(expert_TK, gate_TK, weights.num_experts)
    names = stages(impl)
    # rows of no expert hold anything; a function with parameters would make NaN gradients of them
    holds_R1 = (plan.pair_R >= 0).unsqueeze(1)

    def gemm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        args = (x, w, plan, b)
        return torch.where(holds_R1, pick(grouped_gemm_op, names["grouped_gemm"], args).run.run(*args), 0.0)

    x_RD = pick(dispatch_op, names["dispatch"], (x_TD, plan)).run.run(x_TD, plan)
    h_RF = activation(gemm(x_RD, weights.w_in_EDG, weights.b_in_EG))
    y_RD = gemm(h_RF, weights.w_out_EFD, weights.b_out_ED)
    y_RD = y_RD if after is None else after(y_RD)
    return pick(combine_op, names["combine"], (y_RD, gate_TK, plan)).run.run(y_RD, gate_TK, plan)


# torch.compile cannot trace C++ called by address. Without gradients the call is one node of the graph, an
# operator of its own; with them the graph breaks around it, and autograd sees the operations inside.


@torch.library.custom_op("moe_routing_bench::experts", mutates_args=())
def experts_op(
    x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor,
    w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    activation: str, is_transposed: bool, interleaved: bool, impl: str,
) -> Tensor:  # fmt: skip
    """The experts of a model without gradients, for torch.compile."""
    weights = make_weights(
        w_in, w_out, b_in, b_out,
        activation=activation, is_transposed=is_transposed, interleaved=interleaved,
    )  # fmt: skip
    return run_experts(x_TD, expert_TK, gate_TK, weights, impl)


@experts_op.register_fake
def _(x_TD: Tensor, *rest: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


run_experts_for_training = torch.compiler.disable(
    run_experts,
    reason="with gradients wanted the experts run kernels that torch.compile cannot trace; compile without "
    "fullgraph=True, or call the model under torch.no_grad()",
)

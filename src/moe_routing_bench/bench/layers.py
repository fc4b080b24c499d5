"""Layers around a cell's weights, which all its implementations share: ours, and the same in plain torch.

The router reads one column of x for each expert, and x is made so that the router follows the workload
(`Call.planted_TD`). In a chain, later routers read what earlier experts wrote, so experts write nothing to
those columns: rounding cannot make an implementation choose other experts than the oracle, which would look
like an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.moe.perft import Perft
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.routers.router import Router, build, router_named
from moe_routing_bench.workloads.experiment import ImplementationRef

ROUTER = "softmax_topk"
# kinds of layer, with the defaults of their options
KINDS: dict[str, dict[str, Any]] = {
    "moe": {},
    "chain": {"iterations": 2},
    "perft": {"kind": "R", "rank": 8},
}
ROUTED_ADAPTERS = {"num_adapters": 4, "K": 2}  # of perft kind R
SEED = 20  # for routers' own weights, and for rules that draw random numbers in training


def layer_kind(implementation: ImplementationRef) -> tuple[str, dict[str, Any]]:
    """("chain", {"iterations": 2}): the kind of the implementation's layer and its options. ValueError if
    there is no such kind."""
    kind, options = parse_spec(implementation.layer or "moe")
    if kind not in KINDS:
        raise ValueError(f"there is no layer {kind!r}; there are {', '.join(KINDS)}")
    options = {**KINDS[kind], **options}
    return kind, {**ROUTED_ADAPTERS, **options} if options.get("kind") == "R" else options


def choices_of(implementation: ImplementationRef, inputs: Inputs) -> int:
    """Returns K of each router of the implementation. Some routers fix it, and a chain divides K among its
    iterations."""
    kind, options = layer_kind(implementation)
    name, _ = parse_spec(implementation.router or ROUTER)
    K = inputs.experiment.K // (options["iterations"] if kind == "chain" else 1)
    return router_named(name).fixed_K or max(1, K)


def layer_of(
    implementation: ImplementationRef, inputs: Inputs, ffn: Implementation, make_plan: Implementation, *,
    topk: str, dtype: torch.dtype | None = None, fused: bool = True, silent: bool = False,
) -> nn.Module:  # fmt: skip
    """Builds the implementation's layer around the inputs' weights, converted if `dtype` is another.
    fused=False removes the router's option `fused`. silent: experts write nothing to the columns of logits,
    because another layer follows; always so in a chain."""
    s, case, (kind, options) = inputs.experiment.shape, inputs.experiment, layer_kind(implementation)
    dtype = dtype or inputs.dtype
    name, router_options = parse_spec(implementation.router or ROUTER)
    sizes: dict[str, Any] = {
        "D": s.D, "F": s.F, "E": s.E, "K": choices_of(implementation, inputs),
        "layout": implementation.layout, "activation": case.activation, "bias": case.bias,
        "shared_F": shared_width(inputs),
        "device": "meta", "dtype": dtype,
    }  # fmt: skip
    if kind == "chain":
        if s.K % options["iterations"] and router_named(name).fixed_K is None:
            raise ValueError(f"K={s.K} cannot be shared equally by {options['iterations']} iterations")
        sizes["K"] *= options["iterations"]
        layer: nn.Module = ChainOfExperts(**sizes, **options, router=name, router_options=router_options)
        assert isinstance(layer, ChainOfExperts)
        routers = [
            router_of(implementation, inputs, topk, fused) for _ in range(1 + len(layer.later_routers))
        ]
        layer.later_routers = nn.ModuleList(routers[1:])
        moe = layer.layer
        moe.router = routers[0]
    else:
        moe = layer = MoE(**sizes, router=name, router_options=router_options)
        moe.router = router_of(implementation, inputs, topk, fused)
    moe.expert_ffn, moe.make_plan = ffn, make_plan
    if kind == "moe" and ffn.batch_invariant and ffn.invariant_with:
        moe.make_batch_invariant()
    _put_weights(moe, inputs, ffn, dtype, silent=silent or kind == "chain", asked=implementation.frozen)
    if kind == "perft":
        layer = _with_adapters(moe, inputs, options)
    return layer.train(case.direction != "forward")


def plain_layer(
    implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype, silent: bool = False
) -> nn.Module:
    """Builds the layer in plain torch, in `dtype`. The references of the operations compute everything but
    the router."""
    layer = layer_of(
        implementation, inputs, reference_of(expert_ffn_op), make_plan_op.get("counting"), topk="sort",
        dtype=dtype, fused=False, silent=silent,
    )  # fmt: skip
    if dtype == torch.float64:
        for module in layer.modules():
            if isinstance(module, Router):
                _widen(module)
    if isinstance(layer, Perft):
        adapters = layer.adapters
        adapters.dispatch, adapters.grouped_gemm = reference_of(dispatch_op), reference_of(grouped_gemm_op)
        adapters.combine = reference_of(combine_op)
    return layer


def _widen(router: Router) -> None:
    """Makes the gates float64. Where rounding alone would change a choice, it keeps the router's own float32
    routing."""
    plain = router.forward

    def forward(x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing | SoftRouting:
        narrow, before = plain(x_TD, info), router.dtype
        router.dtype = torch.float64
        try:
            wide = plain(x_TD, info)
        finally:
            router.dtype = before
        if isinstance(wide, SoftRouting) or isinstance(narrow, SoftRouting):
            return wide
        return wide if torch.equal(wide.expert_TK, narrow.expert_TK) else narrow

    router.forward = forward  # type: ignore[method-assign]


def reference_of(op: Op) -> Implementation:
    return Implementation(op=op.name, name="reference", origin="", summary="", run=op.reference)


def moe_of(layer: nn.Module) -> MoE:
    inner = layer.layer if isinstance(layer, ChainOfExperts) else layer
    inner = inner.moe if isinstance(inner, Perft) else inner
    assert isinstance(inner, MoE)
    return inner


def experts_arguments(
    layer: MoE, x_TD: Tensor, routing: Routing | SoftRouting
) -> tuple[Tensor, Routing, RoutingPlan, ExpertWeights]:
    """The arguments of expert_ffn for a routing; for Soft-MoE its slots, without their values."""
    layout = layer.layout
    if isinstance(routing, SoftRouting):
        routing, layout = layer.slots(routing)
        x_TD = x_TD.new_empty(routing.num_tokens, x_TD.shape[1])
    plan = make_plan_op.get("counting").run(routing, layout)
    return x_TD, routing, plan, layer.experts.weights()


def router_of(implementation: ImplementationRef, inputs: Inputs, topk: str, fused: bool = True) -> Router:
    """The router, with a projection that reads the columns that hold the logits."""
    s = inputs.experiment.shape
    if inputs.checkpoint is not None and not implementation.router:
        return inputs.checkpoint.router(topk).to(inputs.put)
    name, options = parse_spec(implementation.router or ROUTER)
    if not fused:
        options.pop("fused", None)
    if "fused" not in options:
        options.setdefault("topk", topk)
    router = build(name, s.D, s.E, choices_of(implementation, inputs), **options)
    router.reset_parameters(torch.Generator().manual_seed(SEED))
    weight = getattr(router, "w_DE", None)
    if isinstance(weight, Tensor) and weight.shape == inputs.router_DE.shape:
        put(router, "w_DE", inputs.router_DE, inputs)
    for parameter in router.parameters():
        parameter.requires_grad_(inputs.experiment.direction != "forward")
    return router.to(inputs.put)


def shared_width(inputs: Inputs) -> int:
    return 0 if inputs.shared is None else inputs.shared.F


def _put_weights(
    moe: MoE, inputs: Inputs, ffn: Implementation, dtype: torch.dtype, *, silent: bool, asked: bool
) -> None:
    experts = inputs.weights if silent else inputs.frozen(ffn, asked)
    for home, weights in ((moe.experts, experts), (moe.shared, inputs.shared)):
        if home is None or weights is None:
            continue
        if silent:
            weights = _silent(weights, inputs.logit_columns)
            if home is moe.experts and (freeze := inputs.freeze_of(ffn, asked)) is not None:
                weights = freeze(weights)
        narrow = dtype == torch.float64 and inputs.experiment.direction == "forward" and home is moe.experts
        if narrow:  # the reference converts one expert at a time: all would need four times the room
            assert isinstance(moe.expert_ffn, Implementation)
            moe.expert_ffn = replace(moe.expert_ffn, run=_with_weights(moe.expert_ffn, weights))
        for name, tensor in weights.tensors().items():
            value = tensor.detach().to(dtype) if not narrow else tensor.new_zeros(1, dtype=dtype)
            put(home, name, value.expand(tensor.shape) if narrow else value, inputs)


def _with_weights(ffn: Implementation, weights: ExpertWeights) -> Callable[..., Tensor]:
    """Computes with these weights and ignores the ones it is given."""
    run = ffn.run
    return lambda x_TD, gate_TK, plan, stand_ins: run(x_TD, gate_TK, plan, weights)


def _silent(weights: ExpertWeights, columns: Tensor) -> ExpertWeights:
    """Makes experts write nothing into some columns."""
    w_out, b_out = weights.w_out_EFD.detach().clone(), weights.b_out_ED
    w_out[..., columns] = 0.0
    if b_out is not None:
        b_out = b_out.detach().clone()
        b_out[..., columns] = 0.0
    return replace(weights, w_out_EFD=w_out, b_out_ED=b_out)


def _with_adapters(moe: MoE, inputs: Inputs, options: dict[str, Any]) -> Perft:
    layer = Perft(moe, **options)
    # the second matrix starts at 0, where adapters would not change the result
    for place, name in enumerate(("down_EDF", "up_EFD")):
        value = getattr(layer.adapters, name)
        drawn = inputs.normal(*value.shape, place=31 + place, scale=value.shape[1] ** -0.5)
        put(layer.adapters, name, drawn.to(inputs.put, value.dtype), inputs)
    if layer.router is not None:
        layer.router.reset_parameters(torch.Generator().manual_seed(SEED + 1))
    return layer


def put(module: nn.Module, name: str, value: Tensor, inputs: Inputs) -> None:
    setattr(module, name, nn.Parameter(value, requires_grad=inputs.experiment.direction != "forward"))

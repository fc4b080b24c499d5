"""layer: router, plan, experts and shared expert, as a model runs them.

An implementation names an implementation of expert_ffn, or a whole layer that is not ours:
`transformers(EXPERTS)`, which is Transformers' Qwen3-MoE block, or `hand-ordered`, a careful layer in plain
torch. The router may be any rule of the zoo; the layer is a plain MoE, a chain or one with adapters. The
router itself is not judged here (`mrb check --op routers` does that): every implementation must follow what
it chooses in plain torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.layers import (
    ROUTER,
    SEED,
    choices_of,
    experts_arguments,
    layer_kind,
    layer_of,
    moe_of,
    plain_layer,
)
from moe_routing_bench.bench.spans.op import STAGED, staged_stages
from moe_routing_bench.bench.spans.span import (
    PACKAGE,
    Computation,
    Load,
    Span,
    Stage,
    auto_label,
    packed_once,
    stand_ins,
    why_not_stored,
)
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.names import parse_spec, slots_of
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.models.decoder import transformers_moe
from moe_routing_bench.models.hand_ordered import hand_ordered
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.routers.router import router_named
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

WHOLE = re.compile(r"\s*(transformers|hand-ordered)\s*(?:\((\w*)\))?\s*")


class LayerSpan(Span):
    name = "layer"
    ops: tuple[str, ...] = ("expert_ffn",)
    included: tuple[str, ...] = ("router projection", "topk", "make_plan", "expert_ffn", "shared expert")
    weights = routed = True
    decides = "expert_ffn"

    def origins(self, name: str) -> list[str]:
        return [BUILT_IN] if WHOLE.fullmatch(name) else super().origins(name)

    def parts(self, name: str) -> tuple[Implementation, ...]:
        return () if WHOLE.fullmatch(name) else super().parts(name)

    def named(self, name: str) -> list[tuple[str, str]]:
        return [] if WHOLE.fullmatch(name) else super().named(name)

    def check(self, implementation: ImplementationRef) -> None:
        self.origins(implementation.name)
        router_named(parse_spec(implementation.router or ROUTER)[0])
        layer_kind(implementation)

    def settled(self, implementation: ImplementationRef, case: Experiment) -> ImplementationRef:
        """Names its router, unless a checkpoint has its own, and writes layer="" for "moe"."""
        router = implementation.router or ("" if case.checkpoint else ROUTER)
        layer = "" if implementation.layer == "moe" else implementation.layer
        return super().settled(replace(implementation, router=router, layer=layer), case)

    def call(self, implementation: ImplementationRef, inputs: Inputs, number: int, step: int) -> Call:
        return inputs.at(number, step, implementation.layout, choices_of(implementation, inputs))

    def arguments(self, call: Call) -> dict[str, Any]:
        by_own_router = call.inputs.checkpoint is not None
        info = TokenInfo(token_id_T=call.token_id_T, num_sequences=call.inputs.experiment.sequences)
        return {"x_TD": call.x_TD if by_own_router else call.planted_TD, "info": info}

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        if whole := WHOLE.fullmatch(implementation.name):
            return _whole(self._layer(implementation, inputs, expert_ffn_op.get("staged")), *whole.groups())
        (ffn,) = self.parts(implementation.name)
        layer = self._layer(implementation, inputs, ffn)
        named = [*self.resolved(implementation, inputs), ("expert_ffn", ffn.label)]
        runs = " + ".join(f"{op}.{label}" for op, label in named)
        runs += packed_once(moe_of(layer).experts.weights())
        s, sequences = inputs.experiment.shape, inputs.experiment.sequences
        if slots := slots_of(implementation.router, T=s.T, E=s.E, K=s.K, sequences=sequences):
            runs += f", {slots}"
        return Computation(run=runner(layer), parameters=wanting(layer), runs=runs, owner=layer)

    def _layer(self, implementation: ImplementationRef, inputs: Inputs, ffn: Implementation) -> nn.Module:
        """The layer; "auto" picks, for these sizes, all parts that the implementation does not name."""
        picked = dict(self.resolved(implementation, inputs))
        return layer_of(
            implementation, inputs, ffn, make_plan_op.get(picked["make_plan"]), topk=picked["topk"]
        )

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        try:
            if WHOLE.fullmatch(implementation.name):
                self.built(implementation, inputs)
                differs = inputs.experiment.direction != "forward"
                return "only the forward pass of layers that are not ours is measured" if differs else None
            (ffn,) = self.parts(implementation.name)
            if (reason := why_not_stored(ffn, inputs.experiment.store)) is not None:
                return reason
            layer = moe_of(layer_of(implementation, inputs, ffn, make_plan_op.get("counting"), topk="sort"))
            with torch.no_grad():
                routing = layer.router(args["x_TD"], args["info"])
                x_TD, settled, plan, weights = experts_arguments(layer, args["x_TD"], routing)
            return ffn.why_not(x_TD, settled.gate_TK, plan, weights)
        except (NotImplementedError, ValueError) as error:
            return str(error)

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        if WHOLE.fullmatch(implementation.name):
            return
        (ffn,) = self.parts(implementation.name)
        layer = self._layer(implementation, inputs, ffn)
        if not isinstance(layer, MoE):
            return
        x_TD, held = args["x_TD"], dict[str, Any]()
        yield "route", lambda: held.update(routing=layer.router(x_TD, args["info"]))
        routing = held["routing"]
        if isinstance(routing, SoftRouting):
            yield "mix", lambda: held.update(slot_TD=layer.mixed(x_TD, routing))
            yield "experts", lambda: held.update(slot_TD=layer.slots_computed(held["slot_TD"], routing))
            yield "write back", lambda: layer.written_back(held["slot_TD"], routing)
            return
        yield "plan", lambda: held.update(plan=layer.make_plan(routing, layer.layout))
        given = {"x_TD": x_TD, "gate_TK": routing.gate_TK, "plan": held["plan"]}
        given["weights"] = layer.experts.weights()
        if set(STAGED) <= set(ffn.config):
            yield from staged_stages(ffn.config, given, held)
        else:
            yield ffn.name, lambda: ffn.run(*given.values())
        if layer.shared is not None:
            yield "shared", partial(layer.shared.on_every_token, x_TD)

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        layer = plain_layer(implementation, inputs, dtype)
        return Computation(run=runner(layer), parameters=wanting(layer))

    def rows(self, implementation: ImplementationRef, inputs: Inputs) -> int:
        name, options = parse_spec(implementation.router or ROUTER)
        if router_named(name).groups == "dense":  # Soft-MoE computes slots, however many tokens there are
            return inputs.experiment.E * int(options.get("slots_per_expert", 1))
        return inputs.experiment.T * choices_of(implementation, inputs)

    @torch.no_grad()
    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        args = self.arguments(self.call(implementation, inputs, 0, 0))
        layer = moe_of(plain_layer(implementation, inputs, inputs.dtype))
        routing = layer.router(args["x_TD"], args["info"])
        x_TD, settled, plan, weights = experts_arguments(layer, args["x_TD"], routing)
        once = expert_ffn_op.cost(x_TD, settled.gate_TK, plan, weights)
        once += _around(layer, args["x_TD"], routing)
        kind, options = layer_kind(implementation)
        cost = once.times(flops=options["iterations"] if kind == "chain" else 1, bytes=1)
        return cost, LoadStatistics.of(settled, plan, num_ranks=inputs.experiment.W).to_dict()

    def roots(self, implementation: ImplementationRef) -> list[Path]:
        rule = router_named(parse_spec(implementation.router or ROUTER)[0])
        return [PACKAGE / "bench" / "spans" / "layer.py", Path(inspect.getfile(rule))]

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        K, adapted = choices_of(implementation, inputs), layer_kind(implementation)[0] == "perft"
        made, key = inputs.made, ("resolved", implementation.layout, K, adapted)
        if key not in made:  # many implementations share it
            source = stand_ins(implementation, inputs.experiment, K)
            source.score_TE = source.logits_TE  # routers choose in float32
            adapters = ("dispatch", "grouped_gemm", "combine") if adapted else ()
            made[key] = [(op, auto_label(op, source)) for op in ("topk", "make_plan", *adapters)]
        return list(made[key])


def runner(layer: nn.Module) -> Callable[[Tensor, TokenInfo], Tensor]:
    def run(x_TD: Tensor, info: TokenInfo) -> Tensor:
        if layer.training:  # some rules draw random numbers then: every implementation gets the same
            torch.manual_seed(SEED)
        return layer(x_TD, info)[0]

    return run


def wanting(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in layer.named_parameters() if tensor.requires_grad}


def _whole(layer: nn.Module, name: str, option: str | None) -> Computation:
    if not isinstance(layer, MoE):
        raise NotImplementedError(f"{name} can only be a plain MoE layer")
    if name == "hand-ordered":
        runs = "sort, index, one matmul for each expert, index_add"
        return Computation(run=lambda x_TD, info: hand_ordered(layer, x_TD), runs=runs, owner=layer)
    block = transformers_moe(layer, experts=option or "grouped_mm")
    return Computation(
        run=lambda x_TD, info: block(x_TD.unsqueeze(0)).squeeze(0),
        runs=f"Transformers' Qwen3MoeSparseMoeBlock, {option or 'grouped_mm'} experts",
        owner=block,
    )


def _around(layer: MoE, x_TD: Tensor, routing: Routing | SoftRouting) -> Cost:
    """The cost of the router's products, Soft-MoE's mixing and write-back, and the shared expert."""
    (T, D), size = x_TD.shape, x_TD.element_size()
    projections = [p for p in layer.router.parameters() if p.ndim == 2 and p.shape[0] == D]
    numbers = sum(p.numel() for p in projections)
    flops, weight_bytes = 2 * T * numbers, 4 * numbers
    if isinstance(routing, SoftRouting):
        flops += 2 * 2 * routing.dispatch_BNS.numel() * D
    if layer.shared is not None:
        matrices = layer.shared.w_in_EDG.numel() + layer.shared.w_out_EFD.numel()
        flops, weight_bytes = flops + 2 * T * matrices, weight_bytes + matrices * size
    return Cost(useful_flops=flops, executed_flops=flops, weight_bytes=weight_bytes)


span = LayerSpan()

"""What is timed: a span names the ops it covers, calls them in a row and says what it leaves out.

Spans with different names are never compared: a matmul against a whole layer says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.cost import Cost, cost_of
from moe_routing_bench.experts import activate
from moe_routing_bench.layer import MoE
from moe_routing_bench.names import did_you_mean
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import BUILT_IN, Implementation, all_ops
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

PACKAGE = Path(__file__).parent.parent
Stage = tuple[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Span:
    """SPANS["pack"]: ops=("dispatch", "combine"), so a subject is "index_select+gather_sum"."""

    name: str
    ops: tuple[str, ...]
    included: tuple[str, ...]
    excluded: tuple[str, ...] = ("allocation of weights", "weight conversion")

    def split(self, spec: str) -> list[str]:
        """One spec for each op of the span; a + inside brackets belongs to an option."""
        specs = re.findall(r"(?:[^+()]|\([^()]*(?:\([^()]*\)[^()]*)*\))+", spec)
        if len(specs) != len(self.ops):
            raise ValueError(
                f"{spec!r} names {len(specs)} implementations, but {self.name} is {' + '.join(self.ops)}"
            )
        return specs

    def parts(self, spec: str) -> tuple[Implementation, ...]:
        """The implementations a subject names, loaded."""
        ops = all_ops()
        return tuple(ops[name].get(one) for name, one in zip(self.ops, self.split(spec), strict=True))

    def origins(self, spec: str) -> list[str]:
        """Where each implementation comes from; nothing is loaded."""
        ops = all_ops()
        names = [one.partition("(")[0].strip() for one in self.split(spec)]
        return [ops[op].origin(name) for op, name in zip(self.ops, names, strict=True)]

    def specs(self) -> list[str]:
        """Everything worth trying: the defaults first, then one part varied at a time. Code from outside is
        named but not loaded: only a worker does that."""
        ops = [all_ops()[name] for name in self.ops]
        defaults = [op.default for op in ops]
        labels = {tuple(part.label for part in self.parts("+".join(defaults))): defaults}
        for place, op in enumerate(ops):
            ours = [found for found in find_all(op, configs=True, only=BUILT_IN) if found.implementation]
            outside = [name for name in op.names() if op.origin(name) != BUILT_IN]
            for spec in [*(found.spec for found in ours), *outside]:
                varied = [*defaults[:place], spec, *defaults[place + 1 :]]
                told = varied if spec in outside else [p.label for p in self.parts("+".join(varied))]
                labels.setdefault(tuple(told), varied)
        return ["+".join(varied) for varied in labels.values()]


SPANS = {
    **{name: Span(name=name, ops=(name,), included=(name,)) for name in all_ops()},
    "pack": Span(name="pack", ops=("dispatch", "combine"), included=("dispatch", "combine")),
    "routing": Span(
        name="routing",
        ops=("topk", "make_plan", "dispatch", "combine"),
        included=("topk", "softmax of the chosen", "make_plan", "dispatch", "combine"),
        excluded=("router projection",),
    ),
    "layer": Span(
        name="layer",
        ops=("expert_ffn",),
        included=("router projection", "topk", "make_plan", "expert_ffn", "shared expert"),
    ),
}


def is_ours(origin: str) -> bool:
    """Built in, or a file of this package."""
    kind, _, where = origin.partition(" ")
    return origin == BUILT_IN or (kind == "file" and Path(where).is_relative_to(PACKAGE))


def span_named(name: str) -> Span:
    if name == "block":
        raise NotImplementedError(
            "block: decoder blocks are measured by `mrb bench block`; measure layer instead"
        )
    if name not in SPANS:
        raise ValueError(
            f"there is no span {name!r}; {did_you_mean(name, SPANS)}there are {', '.join(SPANS)}"
        )
    return SPANS[name]


def function_of(span: Span, parts: Sequence[Implementation], inputs: Inputs, layout: str) -> Callable:
    """What one timed call runs, on arguments that inputs.call() gives."""
    if span.name == "pack":
        dispatch, combine = (part.run for part in parts)
        return lambda x_TD, gate_TK, plan: combine(dispatch(x_TD, plan), gate_TK, plan)
    if span.name == "routing":
        return _routing_function(*(part.run for part in parts))
    if span.name == "layer":
        layer = layer_of(parts[0], inputs, layout)
        return lambda x_TD: layer(x_TD)[0]
    return parts[0].run


def why_not(span: Span, parts: Sequence[Implementation], args: Sequence[Any], inputs: Inputs, layout: str):
    """A sentence why the parts cannot compute these arguments; None if they can."""
    if any(part.stored is not None for part in parts):
        return "it computes with weights stored in another type, and is not timed beside those that do not"
    if span.name in ("pack", "routing"):
        x_TD, plan, gate_TK = _pack_facts(span, args, inputs, layout)
        rows_RD = x_TD.new_empty(1, x_TD.shape[1]).expand(plan.num_rows, -1)
        asked: dict[str, tuple[Any, ...]] = {"dispatch": (x_TD, plan), "combine": (rows_RD, gate_TK, plan)}
        if span.name == "routing":
            asked["topk"] = (args[0], inputs.case.shape.K)
            asked["make_plan"] = (inputs.routing(0), Layout.parse(layout))
        for part in parts:
            if (reason := part.why_not(*asked[part.op])) is not None:
                return f"{part.op}.{part.label}: {reason}"
        return None
    if span.name == "layer":
        args = (args[0], inputs.routing(0).gate_TK, inputs.plan(0, layout), inputs.weights)
    return parts[0].why_not(*args)


def stages_of(
    span: Span, parts: Sequence[Implementation], inputs: Inputs, layout: str, args: Sequence[Any]
) -> Iterator[Stage]:
    """A layer or expert_ffn taken apart: (name, what to run), each needs the ones before it."""
    if span.name not in ("layer", "expert_ffn"):
        return
    ffn = parts[0]
    if span.name == "layer":
        (x_TD,) = args
        layer = layer_of(ffn, inputs, layout)
        held: dict[str, Any] = {}
        yield "route", lambda: held.update(routing=layer.router(x_TD))
        yield "plan", lambda: held.update(plan=layer.make_plan(held["routing"], layer.layout))
        gate_TK, plan = held["routing"].gate_TK, held["plan"]
        weights = inputs.weights
    else:
        x_TD, gate_TK, plan, weights = args
        held = {}
    names = ("dispatch", "grouped_gemm", "combine")
    if not set(names) <= set(ffn.config):
        yield ffn.name, lambda: ffn.run(x_TD, gate_TK, plan, weights)
    else:
        dispatch, gemm, combine = (all_ops()[name].get(str(ffn.config[name])).run for name in names)
        yield "dispatch", lambda: held.update(x_RD=dispatch(x_TD, plan))

        def both_gemms() -> None:
            h_RG = gemm(held["x_RD"], weights.w_in_EDG, plan, weights.b_in_EG)
            held["y_RD"] = gemm(activate(h_RG, weights.activation), weights.w_out_EFD, plan, weights.b_out_ED)

        yield "gemm", both_gemms
        yield "combine", lambda: combine(held["y_RD"], gate_TK, plan)
    if span.name == "layer" and (shared := layer.shared) is not None:
        yield "shared", lambda: shared.on_every_token(x_TD)


def cost_of_span(span: Span, inputs: Inputs, layout: str) -> Cost:
    """The least work of one call on the first inputs."""
    case, s = inputs.case, inputs.case.shape
    args = inputs.call(0, layout)
    if span.name in ("pack", "routing"):
        x_TD, plan, gate_TK = _pack_facts(span, args, inputs, layout)
        rows_RD = x_TD.new_empty(1, s.D).expand(plan.num_rows, s.D)
        found = cost_of("dispatch", x_TD, plan) + cost_of("combine", rows_RD, gate_TK, plan)
        if span.name == "routing":
            found += cost_of("topk", args[0], s.K)
            found += cost_of("make_plan", inputs.routing(0), Layout.parse(layout))
        return found
    if span.name == "layer":
        x_TD, routing = args[0], inputs.routing(0)
        found = cost_of("expert_ffn", x_TD, routing.gate_TK, inputs.plan(0, layout), inputs.weights)
        router = Cost(
            useful_flops=2 * s.T * s.D * s.E, executed_flops=2 * s.T * s.D * s.E, weight_bytes=4 * s.D * s.E
        )
        per_unit = 3 if inputs.weights.gated else 2
        shared = 2 * per_unit * s.T * s.D * case.shared_F
        size = x_TD.element_size()
        return (
            found
            + router
            + Cost(
                useful_flops=shared,
                executed_flops=shared,
                weight_bytes=per_unit * s.D * case.shared_F * size,
            )
        )
    return cost_of(span.name, *args)


def _pack_facts(
    span: Span, args: Sequence[Any], inputs: Inputs, layout: str
) -> tuple[Tensor, RoutingPlan, Tensor]:
    if span.name == "pack":
        x_TD, gate_TK, plan = args
        return x_TD, plan, gate_TK
    return args[1], inputs.plan(0, layout), inputs.routing(0).gate_TK


def _routing_function(topk: Callable, make_plan: Callable, dispatch: Callable, combine: Callable) -> Callable:
    def run(score_TE: Tensor, x_TD: Tensor, layout: Layout, K: int) -> Tensor:
        value_TK, expert_TK = topk(score_TE, K)
        gate_TK = value_TK.softmax(-1)
        routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=score_TE.shape[1], ragged=False)
        plan = make_plan(routing, layout)
        return combine(dispatch(x_TD, plan), gate_TK, plan)

    return run


def layer_of(ffn: Implementation, inputs: Inputs, layout: str) -> MoE:
    """A layer around the inputs' weights, which all subjects share."""
    s, case = inputs.case.shape, inputs.case
    layer = MoE(
        s.D, s.F, s.E, s.K, layout=layout, activation=case.activation, bias=case.bias,
        shared_F=case.shared_F, device="meta", dtype=inputs.dtype,
    )  # fmt: skip
    layer.expert_ffn = ffn

    def put(module: torch.nn.Module, name: str, value: Tensor) -> None:
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))

    put(layer.router, "w_DE", inputs.router_DE)
    for name, tensor in inputs.weights.tensors().items():
        put(layer.experts, name, tensor)
    if layer.shared is not None and inputs.shared is not None:
        for name, tensor in inputs.shared.tensors().items():
            put(layer.shared, name, tensor)
    return layer.eval()

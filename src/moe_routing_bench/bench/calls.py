"""A call in a direction: which part of it is timed, and the result that is handed over and judged.

forward    run(*arguments)
backward   gradients of everything that requires one; the forward pass before it is not timed
train      both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call
from moe_routing_bench.bench.spans.span import Computation, Span
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.implementation import tensors_in

PLAN = ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E")
GRADIENT = "gradient of "
Wanted: TypeAlias = Callable[[Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result(out=y_TD, gradients={"x_TD": ..., "w_in_EDG": ...}); None: no gradient reached it."""

    out: Any
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)


def value_of(out: Any) -> Tensor:
    """Returns the tensor that has a gradient. topk and score_topk return values and ids, and only values have
    one."""
    return out[0] if isinstance(out, tuple) else out


class Caller:
    """Calls of one computation in one direction: Caller(span, built, "train").ready(call, args)()."""

    def __init__(self, span: Span, computation: Computation, direction: str):
        self.span, self.computation, self.direction = span, computation, direction
        self._shape: torch.Size | None = None

    def ready(self, call: Call, args: Mapping[str, Any], only: Wanted | None = None) -> Callable[[], Any]:
        """Returns the function to time; `result` reads what it returns. All preparation happens here. `only`
        says which gradients are wanted, and None means all."""
        if self.direction == "forward":
            return self.ready_with(args, None)
        if self._shape is None:
            with torch.no_grad():
                self._shape = value_of(self.computation.run(*args.values())).shape
        return self.ready_with(args, self.span.upstream(call.upstream(self._shape), args), only)

    def ready_with(
        self, args: Mapping[str, Any], d_out: Tensor | None, only: Wanted | None = None
    ) -> Callable[[], Any]:
        """Like `ready`, with a given upstream gradient."""
        run = partial(self.computation.run, *args.values())
        if d_out is None:
            return run
        leaves = list(self.leaves(args, only).values())
        if self.direction == "train":
            return partial(_train, run, leaves, d_out)
        with torch.enable_grad():
            out = run()
        return partial(_backward, out, leaves, d_out)

    def result(self, returned: Any, args: Mapping[str, Any], only: Wanted | None = None) -> Result:
        if self.direction == "forward":
            return Result(out=returned)
        out, gradients = returned
        return Result(out=out, gradients=dict(zip(self.leaves(args, only), gradients, strict=True)))

    def leaves(self, args: Mapping[str, Any], only: Wanted | None = None) -> dict[str, Tensor]:
        """Returns the wanted tensors that require gradients, by name."""
        wanting: dict[str, Tensor] = {}
        for name, value in args.items():
            if isinstance(value, ExpertWeights):
                wanting |= value.tensors()
            elif isinstance(value, Tensor):
                wanting[name] = value
        wanting = {n: t for n, t in {**wanting, **self.computation.parameters}.items() if t.requires_grad}
        return {n: t for n, t in wanting.items() if only is None or only(t)}


def _train(run: Callable[[], Any], leaves: list[Tensor], d_out: Tensor) -> tuple[Any, Any]:
    with torch.enable_grad():
        out = run()
    return _backward(out, leaves, d_out)


def _backward(out: Any, leaves: list[Tensor], d_out: Tensor) -> tuple[Any, Any]:
    value = value_of(out)
    if not leaves:
        return out, ()
    return out, torch.autograd.grad(value, leaves, d_out.to(value.dtype), allow_unused=True)


def named_tensors(result: Result) -> dict[str, Tensor]:
    """Copies of the result's tensors by name, as a file stores them."""
    tensors = tensors_by_name(result)
    tensors |= {"filled": torch.ones(1)} if isinstance(result.out, RoutingPlan) and result.out.filled else {}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def tensors_by_name(result: Result) -> dict[str, Tensor]:
    out = result.out
    if isinstance(out, RoutingPlan):
        tensors = {name: getattr(out, name) for name in PLAN}
    elif isinstance(out, tuple):
        tensors = {str(place): value for place, value in enumerate(out)}
    else:
        tensors = {"out": out}
    return tensors | {GRADIENT + name: t for name, t in result.gradients.items() if t is not None}


def result_from(tensors: Mapping[str, Tensor], expected: Result) -> Result:
    """Rebuilds the result from a file's tensors. ValueError if its type is not the expected one."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(GRADIENT)}
    gradients = {name: tensors.get(GRADIENT + name) for name in expected.gradients}
    if isinstance(expected.out, RoutingPlan):
        if not set(PLAN) <= set(plain):
            raise ValueError("the result is not a RoutingPlan")
        parts = {name: plain[name] for name in PLAN}
        layout = expected.out.layout
        return Result(out=RoutingPlan(**parts, layout=layout, filled="filled" in plain))
    if isinstance(expected.out, tuple):
        places = [str(place) for place in range(len(expected.out))]
        if set(places) != set(plain):
            raise ValueError(f"the result is not a tuple of {len(places)} tensors")
        return Result(out=tuple(plain[place] for place in places), gradients=gradients)
    if set(plain) != {"out"}:
        raise ValueError("the result is not one tensor")
    return Result(out=plain["out"], gradients=gradients)


def wrong_type(out: Any) -> str:
    """Says what is wrong with the type of a result; empty if nothing is."""
    if type(out) not in (Tensor, tuple, RoutingPlan):
        return f"returned {type(out).__name__} instead of a plain Tensor"
    inside = list(out) if isinstance(out, tuple) else list(tensors_in(out))
    for tensor in inside:
        if type(tensor) is not Tensor:
            return f"holds a {type(tensor).__name__} instead of a plain Tensor"
        if tensor.layout != torch.strided:
            return f"returned a tensor of layout {tensor.layout}"
    return ""

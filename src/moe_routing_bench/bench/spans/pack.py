"""pack: dispatch, then combine. A MoE layer without its experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.span import (
    Computation,
    Load,
    Span,
    Stage,
    why_not_one_of,
)
from moe_routing_bench.core.cost import Cost, counts, pack_bytes
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef


class PackSpan(Span):
    name = "pack"
    ops = included = ("dispatch", "combine")

    def arguments(self, call: Call) -> dict[str, Any]:
        return {"x_TD": call.x_TD, "gate_TK": call.gate_TK, "plan": call.plan}

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        dispatch, combine = (part.run for part in self.parts(implementation.name))
        return Computation(run=lambda x_TD, gate_TK, plan: combine(dispatch(x_TD, plan), gate_TK, plan))

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        return why_not_one_of(
            self.parts(implementation.name), moved(args["x_TD"], args["gate_TK"], args["plan"])
        )

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        (dispatch, combine), held = (
            (part.run for part in self.parts(implementation.name)),
            dict[str, Tensor](),
        )
        yield "dispatch", lambda: held.update(x_RD=dispatch(args["x_TD"], args["plan"]))
        yield "combine", lambda: combine(held["x_RD"], args["gate_TK"], args["plan"])

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        wide = torch.promote_types(dtype, torch.float32)
        return Computation(run=lambda x_TD, gate_TK, plan: packed(x_TD, gate_TK.to(wide), plan))

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        call = inputs.at(0, 0, implementation.layout)
        load = inputs.workload(0).statistics(call.plan).to_dict()
        return moving_cost(call.x_TD, call.gate_TK, call.plan), load

    def bandwidths(self, case: Experiment, seconds: float) -> dict[str, float]:
        s, names = case.shape, ("bw_2pass", "bw_strict")
        return {name: pack_bytes(name, s.T, s.K, s.D, case.element_size) / seconds for name in names}


def moved(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> dict[str, tuple[Any, ...]]:
    """Arguments of dispatch and combine, enough for `why_not` and `cost`: the rows have no values."""
    rows_RD = x_TD.new_empty(1, x_TD.shape[1]).expand(plan.num_rows, -1)
    return {"dispatch": (x_TD, plan), "combine": (rows_RD, gate_TK, plan)}


def packed(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    """dispatch and combine in plain torch."""
    return combine_op.reference(dispatch_op.reference(x_TD, plan), gate_TK, plan)


def moving_cost(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Cost:
    asked = moved(x_TD, gate_TK, plan)
    cost = dispatch_op.cost(*asked["dispatch"]) + combine_op.cost(*asked["combine"])
    return replace(cost, again_bytes=counts(plan)[0] * x_TD.shape[1] * x_TD.element_size())


span = PackSpan()

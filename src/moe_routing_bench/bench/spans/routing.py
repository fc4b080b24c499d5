"""routing: top-k of scores, the plan, dispatch and combine. A layer without its products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.pack import moved, moving_cost, packed
from moe_routing_bench.bench.spans.span import Computation, Load, Span, why_not_one_of
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.topk.op import op as topk_op
from moe_routing_bench.workloads.experiment import ImplementationRef


class RoutingSpan(Span):
    name = "routing"
    ops = ("topk", "make_plan", "dispatch", "combine")
    included = ("topk", "softmax of the chosen", "make_plan", "dispatch", "combine")
    excluded = ("router projection",)

    def arguments(self, call: Call) -> dict[str, Any]:
        return {"score_TE": call.logits_TE, "x_TD": call.x_TD, "layout": call.layout, "K": call.K}

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        return Computation(run=_in_a_row(*(part.run for part in self.parts(implementation.name))))

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        call = inputs.at(0, 0, implementation.layout)
        asked = moved(args["x_TD"], call.gate_TK, call.plan)
        asked["topk"] = (args["score_TE"], args["K"])
        asked["make_plan"] = (call.routing, args["layout"])
        return why_not_one_of(self.parts(implementation.name), asked)

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        wide = torch.promote_types(dtype, torch.float32)

        def run(score_TE: Tensor, x_TD: Tensor, layout: Layout, K: int) -> Tensor:
            value_TK, expert_TK = topk_op.reference(score_TE.to(torch.float32), K)
            routing = _routing(expert_TK, value_TK.softmax(-1), score_TE.shape[1])
            plan = make_plan(routing, layout, impl="counting")
            return packed(x_TD, value_TK.to(wide).softmax(-1), plan)

        return Computation(run=run)

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        call = inputs.at(0, 0, implementation.layout)
        cost = moving_cost(call.x_TD, call.gate_TK, call.plan) + topk_op.cost(call.logits_TE, call.K)
        cost += make_plan_op.cost(call.routing, call.layout)
        return cost, inputs.workload(0).statistics(call.plan).to_dict()


def _in_a_row(topk: Callable, make_plan: Callable, dispatch: Callable, combine: Callable) -> Callable:
    def run(score_TE: Tensor, x_TD: Tensor, layout: Layout, K: int) -> Tensor:
        value_TK, expert_TK = topk(score_TE, K)
        gate_TK = value_TK.softmax(-1)
        plan = make_plan(_routing(expert_TK, gate_TK, score_TE.shape[1]), layout)
        return combine(dispatch(x_TD, plan), gate_TK, plan)

    return run


def _routing(expert_TK: Tensor, gate_TK: Tensor, E: int) -> Routing:
    return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False)


span = RoutingSpan()

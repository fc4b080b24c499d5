"""parallel: plan, send, experts, return. A MoE layer on --ranks processes, after its router has chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.accuracy import Expected, Verdict
from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.span import (
    PACKAGE,
    Computation,
    Load,
    Span,
    Stage,
    auto_label,
    stand_ins,
    why_not_one_of,
)
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.cost import Cost
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import BUILT_IN, all_ops
from moe_routing_bench.parallel.placement import Placement
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import Traffic, settle
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

STAGES = ("plan", "send", "compute", "return")
COMPACT = Layout.compact()
BLOCKS = "rows are sent in the compact or the padded layout; blocks are for the experts' side"
Step = Callable[[], None]


class ParallelSpan(Span):
    """A subject names a transport of each way: "hierarchical+hierarchical"."""

    name = "parallel"
    ops = ("ep_dispatch", "ep_combine")
    included = STAGES
    excluded = ("router", "allocation of weights", "weight conversion")
    weights = True
    widens = True
    differentiable = False
    grouped = True

    def specs(self) -> list[str]:
        there, back = (all_ops()[name] for name in self.ops)
        names = [name for name in there.names() if there.origin(name) == BUILT_IN and name in back.names()]
        names.sort(key=lambda name: (name != there.default, name))
        return [f"{name}+{name}" for name in names]

    def arguments(self, call: Call) -> dict[str, Any]:
        return expert_ffn_op.arguments(call)

    def built(self, subject: Subject, inputs: Inputs) -> Computation:
        """On one rank, where nothing is sent."""

        def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
            layer = OneCall(x_TD, gate_TK, weights, self._runs(subject, inputs))
            layer.sent, layer.traffic = plan, Traffic.alone(plan)
            for _, step in [*layer.stages()][1:]:
                step()
            return layer.y_TD

        return Computation(run=run)

    def why_not(self, subject: Subject, inputs: Inputs, args: Mapping[str, Any]) -> str | None:
        if Layout.parse(subject.layout).kind == "block":
            return BLOCKS
        x_TD, plan = args["x_TD"], args["plan"]
        traffic = Traffic.alone(plan)
        rows_QD = x_TD.new_empty(1, x_TD.shape[1]).expand(plan.num_rows, -1)
        asked = {
            "ep_dispatch": (x_TD, plan, traffic),
            "ep_combine": (rows_QD, args["gate_TK"], plan, traffic),
        }
        return why_not_one_of(self.parts(subject.spec), asked)

    def stages(self, subject: Subject, inputs: Inputs, args: Mapping[str, Any]) -> Iterator[Stage]:
        run = self.built(subject, inputs).run
        yield "compute", lambda: run(*args.values())

    def plain(self, subject: Subject, inputs: Inputs, dtype: torch.dtype) -> Computation:
        return Computation(run=expert_ffn_op.reference)

    def judge(self, out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
        return expert_ffn_op.judge(out, expected, args)

    def facts(self, subject: Subject, inputs: Inputs) -> tuple[Cost, Load]:
        args = self.arguments(inputs.at(0, 0, subject.layout))
        load = inputs.workload(0).statistics(args["plan"]).to_dict()
        return expert_ffn_op.cost(*args.values()), load

    def roots(self, subject: Subject) -> list[Path]:
        return [
            *super().roots(subject),
            PACKAGE / "bench" / "group.py",
            PACKAGE / "bench" / "group_worker.py",
        ]

    def resolved(self, subject: Subject, inputs: Inputs) -> list[tuple[str, str]]:
        return [("expert_ffn", self._experts(subject, inputs).label)]

    def _experts(self, subject: Subject, inputs: Inputs) -> Implementation:
        """What "auto" picks for the experts, from the sizes of the whole case: the same on every rank."""
        plain = Subject(spec=subject.spec)
        return expert_ffn_op.get(auto_label("expert_ffn", stand_ins(plain, inputs.case)))

    def _runs(self, subject: Subject, inputs: Inputs) -> tuple[Implementation, ...]:
        return *self.parts(subject.spec), self._experts(subject, inputs)

    def on_rank(self, subject: Subject, inputs: Inputs, number: int, step: int, ranks: Ranks) -> OneCall:
        """This rank's part of a call, ready to run."""
        call = inputs.at(number, step, "compact")
        tokens_W = inputs.workload(step).tokens_W
        first = sum(tokens_W[: ranks.rank])
        mine = slice(first, first + tokens_W[ranks.rank])
        weights, held = inputs.weights, list(ranks.experts)
        parts = {name: tensor[held] for name, tensor in weights.tensors().items()}
        layer = OneCall(
            call.x_TD[mine], call.gate_TK[mine], ExpertWeights(**parts, activation=weights.activation),
            self._runs(subject, inputs),
        )  # fmt: skip
        layer.ranks, layer.expert_TK = ranks, call.plan.expert_TK()[mine]
        layer.layout = Layout.parse(subject.layout)
        return layer


class OneCall:
    """A call stage by stage: for name, step in OneCall(...).stages(): step(); then y_TD is there."""

    sent: RoutingPlan
    traffic: Traffic
    y_TD: Tensor
    ranks: Ranks
    expert_TK: Tensor
    layout: Layout

    def __init__(
        self, x_TD: Tensor, gate_TK: Tensor, weights: ExpertWeights, runs: tuple[Implementation, ...]
    ):
        self.x_TD, self.gate_TK, self.weights = x_TD, gate_TK, weights
        self.dispatch, self.combine, self.experts = runs
        self._rows: Tensor | None = None

    def stages(self) -> Iterator[tuple[str, Step]]:
        yield from zip(STAGES, (self.plan, self.send, self.compute, self.give_back), strict=True)

    def plan(self) -> None:
        routing = Routing(
            expert_TK=self.expert_TK, gate_TK=self.gate_TK, num_experts=self.ranks.placement.num_experts
        )
        self.sent = make_plan(self.ranks.to_slots(routing), self.layout)
        self.traffic = settle(self.sent, self.ranks)

    def send(self) -> None:
        self._rows = self.dispatch.run(self.x_TD, self.sent, self.traffic)

    def compute(self) -> None:
        assert self._rows is not None
        place_Q1 = self.traffic.place_Q.unsqueeze(1)
        gate_Q1 = torch.ones(place_Q1.shape, dtype=self.gate_TK.dtype, device=self.gate_TK.device)
        here = Routing(expert_TK=place_Q1, gate_TK=gate_Q1, num_experts=self.weights.num_experts)
        self._rows = self.experts.run(self._rows, gate_Q1, make_plan(here, COMPACT), self.weights)

    def give_back(self) -> None:
        assert self._rows is not None
        self.y_TD = self.combine.run(self._rows, self.gate_TK, self.sent, self.traffic)


def placement_of(E: int, W: int) -> Placement:
    """Equal shares in order, all ranks on one node."""
    return contiguous(E, ranks=W)


span = ParallelSpan()

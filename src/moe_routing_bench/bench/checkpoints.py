"""Implementations of expert_ffn on the weights of a real layer, with the routing of its real router.

x is drawn from a normal distribution, about what an RMSNorm hands on; real hidden states are less even, so
for a real load replay one: workload trace(file). The router runs beforehand: it is the same for all. Timed
are the plan and the experts; shared experts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.accuracy import judge as judge_values
from moe_routing_bench.bench.paired import Contender
from moe_routing_bench.bench.spans import SPANS
from moe_routing_bench.cost import Cost, cost_of
from moe_routing_bench.load import LoadStatistics
from moe_routing_bench.models.checkpoint import CheckpointLayer
from moe_routing_bench.ops.auto import pick
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.plan import Layout
from moe_routing_bench.routing import Routing
from moe_routing_bench.workloads.workload import make_workload

Call = tuple[Tensor, Routing]


class CheckpointInputs:
    """CheckpointInputs(layer, tokens=128).call(7): the tokens of call 7 and where they go."""

    def __init__(
        self,
        layer: CheckpointLayer,
        *,
        tokens: int,
        workload: str = "",
        layout: str = "compact",
        seed: int = 0,
    ):
        if not 1 <= tokens <= 2**20:
            raise ValueError(f"{tokens} tokens; give from 1 to {2**20:,}")
        self.layer, self.T, self.workload, self.seed = layer, tokens, workload, seed
        self.layout = Layout.parse(layout)
        self.routing(0)  # a workload that these sizes cannot have is told here

    def call(self, number: int) -> Call:
        x_TD = self._x(number)
        return x_TD, self.layer.route(x_TD) if not self.workload else self.routing(number)

    def routing(self, number: int) -> Routing:
        weights = self.layer.weights
        if not self.workload:
            return self.layer.route(self._x(number))
        return make_workload(
            self.workload,
            T=self.T,
            E=weights.num_experts,
            K=self.layer.rule.K,
            seed=self.seed,
            step=number % 4,
        ).routing

    def _x(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        weight = self.layer.weights.w_in_EDG
        return torch.randn(self.T, weight.shape[1], generator=generator).to(weight.dtype)

    def contenders(self, specs: Sequence[str]) -> list[Contender]:
        """Without names all that is built in, the default first."""
        return [self._contender(spec) for spec in specs or SPANS["expert_ffn"].specs()]

    def _contender(self, spec: str) -> Contender:
        x_TD, routing = self.call(0)
        weights = self.layer.weights
        with torch.no_grad():
            make_plan = pick(make_plan_op, "auto", (routing, self.layout), weights).implementation
            asked = (x_TD, routing.gate_TK, make_plan(routing, self.layout), weights)
            try:
                ffn = pick(expert_ffn_op, spec, asked).implementation
            except NotImplementedError as reason:
                return Contender(name=spec, missing=str(reason))
        if ffn.stored is not None:
            missing = "it computes with weights stored in another type, and is not timed beside the others"
            return Contender(name=spec, label=ffn.label, missing=missing)

        def call(given: Call) -> Tensor:
            x_TD, routing = given
            return ffn(x_TD, routing.gate_TK, make_plan(routing, self.layout), weights)

        return Contender(name=spec, label=f"make_plan.{make_plan.label} + expert_ffn.{ffn.label}", call=call)

    @torch.no_grad()
    def judge(self, y_TD: Tensor, number: int) -> Verdict:
        if number not in self._expected:
            x_TD, routing = self.call(number)
            plan = make_plan_op.reference(routing, self.layout)
            baseline = expert_ffn_op.reference(x_TD, routing.gate_TK, plan, self.layer.weights)
            wide = self.layer.weights.to(dtype=torch.float64)
            oracle = expert_ffn_op.reference(x_TD.double(), routing.gate_TK.double(), plan, wide)
            self._expected[number] = oracle, baseline
        return judge_values(y_TD, *self._expected[number])

    @cached_property
    def _expected(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def cost(self) -> Cost:
        x_TD, routing = self.call(0)
        plan = make_plan_op.reference(routing, self.layout)
        return cost_of("expert_ffn", x_TD, routing.gate_TK, plan, self.layer.weights)

    @cached_property
    def load(self) -> LoadStatistics:
        return LoadStatistics.of(self.routing(0))

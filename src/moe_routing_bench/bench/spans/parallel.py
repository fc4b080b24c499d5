"""parallel: route, plan, send, experts and return, on --ranks processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.layers import choices_of, layer_kind, put, router_of, shared_width
from moe_routing_bench.bench.spans.layer import LayerSpan, runner, wanting
from moe_routing_bench.bench.spans.span import (
    PACKAGE,
    Computation,
    Stage,
    auto_label,
    stand_ins,
    why_not_one_of,
)
from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.ops.registry import BUILT_IN, all_ops
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import Part, Traffic
from moe_routing_bench.planner.flow import TRANSPORTS, count_flow
from moe_routing_bench.workloads.experiment import ImplementationRef

if TYPE_CHECKING:  # it imports DTensor, which takes a second
    from moe_routing_bench.moe.expert_parallel import ParallelMoE

FORWARD = ("route", "plan", "send", "compute", "return")
BACKWARD = ("backward", "reduce")  # reduce: gradients of what every rank has, summed over the ranks
STAGES = {"forward": FORWARD, "backward": BACKWARD, "train": FORWARD + BACKWARD}
BLOCKS = "rows are sent in the compact or the padded layout; blocks are for the experts' side"
Step = Callable[[], None]


class ParallelSpan(LayerSpan):
    """The layer, with its experts on several ranks. An implementation names a transport of each way:
    "hierarchical+hierarchical"; "auto" picks what computes the experts."""

    name = "parallel"
    ops = ("ep_dispatch", "ep_combine")
    included = (*FORWARD, "shared expert")
    grouped = True
    decides = ""

    def all_names(self) -> list[str]:
        there, back = (all_ops()[name] for name in self.ops)
        names = [name for name in there.names() if there.origin(name) == BUILT_IN and name in back.names()]
        names.sort(key=lambda name: (name != there.default, name))
        return [f"{name}+{name}" for name in names]

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        """Builds the layer on one rank, where nothing is sent."""
        layer = self.layer_on(implementation, inputs, Ranks(placement_of(inputs.experiment.E, 1)))
        return Computation(run=runner(layer), parameters=wanting(layer), owner=layer)

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        if Layout.parse(implementation.layout).kind == "block":
            return BLOCKS
        if layer_kind(implementation)[0] != "moe":
            return "on several ranks only a plain MoE layer is measured"
        if router_of(implementation, inputs, "sort").batch_dependent:
            return "its router looks at all tokens, and a rank has only its own"
        call = self.call(implementation, inputs, 0, 0)
        x_TD, plan = args["x_TD"], call.plan
        traffic = Traffic.alone(plan)
        rows_QD = x_TD.new_empty(1, x_TD.shape[1]).expand(plan.num_rows, -1)
        asked = {
            "ep_dispatch": (x_TD, plan, traffic),
            "ep_combine": (rows_QD, call.gate_TK, plan, traffic),
        }
        return why_not_one_of(self.parts(implementation.name), asked)

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        layer = self.layer_on(implementation, inputs, Ranks(placement_of(inputs.experiment.E, 1)))
        yield from OneCall(layer, args["x_TD"], args["info"]).stages("forward")

    def roots(self, implementation: ImplementationRef) -> list[Path]:
        files = ("spans/parallel.py", "hosts/ranks.py")
        return [*super().roots(implementation), *(PACKAGE / "bench" / file for file in files)]

    def wire(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[int, int] | None:
        transport = self.named(implementation.name)[0][1]
        if inputs.experiment.W == 1 or transport not in TRANSPORTS:
            return None
        plan, tokens_W = inputs.at(0, 0, "compact").plan, inputs.workload(0).tokens_W
        expert_TK, ends = plan.expert_TK().numpy(), np.cumsum([0, *tokens_W])
        placement = placement_of(inputs.experiment.E, inputs.experiment.W)
        flow = count_flow(lambda rank: expert_TK[ends[rank] : ends[rank + 1]], placement)
        row = 2 * inputs.experiment.D * inputs.experiment.element_size
        sent = sum(int(rows_WW.sum() - np.trace(rows_WW)) for rows_WW in flow.phases(transport))
        return row * sent, row * int(flow.to_WW.sum() - np.trace(flow.to_WW))

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        """Returns what "auto" picks from the sizes of the whole case, which is the same on every rank."""
        source = stand_ins(implementation, inputs.experiment, choices_of(implementation, inputs))
        return [*super().resolved(implementation, inputs), ("expert_ffn", auto_label("expert_ffn", source))]

    def layer_on(self, implementation: ImplementationRef, inputs: Inputs, ranks: Ranks) -> ParallelMoE:
        """Returns this rank's part of the layer around the inputs' weights. For the forward pass they are
        packed once, as in one process."""
        from moe_routing_bench.moe.expert_parallel import ParallelMoE

        s, case = inputs.experiment.shape, inputs.experiment
        there, back = self.parts(implementation.name)
        picked = dict(self.resolved(implementation, inputs))
        router = router_of(implementation, inputs, picked["topk"])
        layer = ParallelMoE(
            s.D, s.F, s.E, router.K, ranks=ranks, send_layout=implementation.layout,
            dispatch_impl=there.label, combine_impl=back.label, impl=picked["expert_ffn"],
            plan_impl=picked["make_plan"], router=router,
            activation=case.activation, bias=case.bias, dtype=inputs.dtype,
            shared_F=shared_width(inputs),
        )  # fmt: skip
        for name, tensor in inputs.weights.tensors().items():
            put(layer.experts, name, tensor.detach()[list(ranks.experts)], inputs)
        if layer.shared is not None and inputs.shared is not None:
            for name, tensor in inputs.shared.tensors().items():
                put(layer.shared, name, tensor.detach().clone(), inputs)
        train = case.direction != "forward"
        if not train:
            layer.freeze()
        return layer.train(train)

    def on_rank(self, layer: ParallelMoE, inputs: Inputs, call: Call, args: Mapping[str, Any]) -> OneCall:
        """This rank's part of a call, ready to run."""
        tokens_W = inputs.workload(call.step).tokens_W
        first = sum(tokens_W[: layer.ranks.rank])
        mine = slice(first, first + tokens_W[layer.ranks.rank])
        whole_TD, train = args["x_TD"].detach(), inputs.experiment.direction != "forward"
        own = TokenInfo(token_id_T=args["info"].token_id_T[mine])
        d_out_TD = call.upstream(whole_TD.shape)[mine] if train else None
        return OneCall(layer, whole_TD[mine].requires_grad_(train), own, d_out_TD)


class OneCall:
    """A call of this rank, stage by stage: for name, step in call.stages("train"): step(). Then y_TD is
    there, and after "train" the gradients of x_TD and of the layer's parameters."""

    part: Part
    y_TD: Tensor

    def __init__(
        self, layer: ParallelMoE, x_TD: Tensor, info: TokenInfo, d_out_TD: Tensor | None = None
    ) -> None:
        self.layer, self.x_TD, self.info, self.d_out_TD = layer, x_TD, info, d_out_TD
        self._rows: Tensor | None = None
        self._shared: Tensor | None = None

    def stages(self, direction: str) -> Iterator[tuple[str, Step]]:
        steps = (
            self.route, self.plan, self.send, self.compute, self.give_back, self.backward, self.reduce,
        )  # fmt: skip
        named = dict(zip(STAGES["train"], steps, strict=True))
        return ((name, named[name]) for name in STAGES[direction])

    def route(self) -> None:
        routing = self.layer.route(self.layer.router, self.x_TD, self.info)
        assert isinstance(routing, Routing)
        self.part = Part(x_TD=self.x_TD, routing=routing)

    def plan(self) -> None:
        self.layer.settle(self.part, self.x_TD)

    def send(self) -> None:
        self._rows = self.layer.send(self.part, self.x_TD)

    def compute(self) -> None:
        assert self._rows is not None
        self._rows = self.layer.experts_computed(self.part, self._rows)
        if self.layer.shared is not None:
            self._shared = self.layer.shared.on_every_token(self.x_TD, self.layer.shared_ffn)

    def give_back(self) -> None:
        assert self._rows is not None
        self.y_TD = self.layer.given_back(self.part, self._rows)
        if self._shared is not None:
            self.y_TD = self.y_TD + self._shared

    def backward(self) -> None:
        assert self.d_out_TD is not None
        self.y_TD.backward(self.d_out_TD.to(self.y_TD.dtype))

    def reduce(self) -> None:
        self.layer.reduce_gradients()

    def result(self) -> dict[str, Tensor]:
        """By name, as the judge knows them: of one's own tokens, or of one's own experts."""
        d_x = {} if self.x_TD.grad is None else {"x_TD": self.x_TD.grad}
        return {"y_TD": self.y_TD.detach(), **d_x, **self.layer.gradients_here()}


def placement_of(E: int, W: int) -> Placement:
    """Gives each rank an equal share of experts, in order, with all ranks on one node."""
    return contiguous(E, ranks=W)


span = ParallelSpan()

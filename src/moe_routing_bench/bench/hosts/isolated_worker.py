"""The worker's side of the protocol: one computation, on arguments that lie in shared memory.

The parent decides everything. The worker makes views of the slots before their values exist, waits for "go",
calls, and says where the results lie; the parent looks at them itself while this process stands still.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.calls import Caller, tensors_by_name, wrong_type
from moe_routing_bench.bench.clock import CacheFlusher
from moe_routing_bench.bench.hosts.memory import SharedMemory, places_from_json, with_tensors
from moe_routing_bench.bench.hosts.secret_inputs import use_weights
from moe_routing_bench.bench.hosts.shared_worker import (
    Requests,
    answer_requests,
    settle,
    start_threads,
    wait_until_held,
)
from moe_routing_bench.bench.inputs import Inputs, touch
from moe_routing_bench.bench.judging import heavy
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment


def serve(pipe: Connection, experiment_json: str, scratch: str, cores: tuple[int, ...], plan: str) -> None:
    """The main function of the process. plan: where weights and slots lie, in JSON."""
    experiment = Experiment.from_json(experiment_json)
    given = json.loads(plan)
    settle(experiment, Path(scratch), pipe.fileno(), cores, given["fds"])
    # before it is held, since nothing of its parent can be opened afterwards
    slots = SharedMemory.open(given["slots"], given["slots_bytes"], writable=True)
    weights = given["weights"] and SharedMemory.open(given["weights"], given["weights_bytes"], writable=False)
    wait_until_held(pipe)
    answer_requests(pipe, lambda: _Outside(experiment, given, slots, weights or None).requests())


class _Outside:
    def __init__(
        self,
        experiment: Experiment,
        plan: Mapping[str, Any],
        slots: SharedMemory,
        weights: SharedMemory | None,
    ):
        for folder in experiment.include:
            include_folder(folder)  # first: the span may be an operation from outside
        self.experiment, self.span, (self.implementation,) = (
            experiment,
            span_named(experiment.span),
            experiment.implementations,
        )
        self.slots, self.slot_bytes = slots, plan["slot_bytes"]
        self.places = places_from_json(plan["places"])
        inputs = Inputs(experiment)
        if weights is not None:
            tensors = [weights.tensor(place) for place in places_from_json(plan["weights_places"])]
            use_weights(inputs, dict(zip(plan["weights_names"], tensors, strict=True)), plan["activation"])
        self.weights_in_use = inputs.weights if self.span.weights else None
        self.flusher = CacheFlusher() if experiment.cache != "hot" else None
        start_threads("cpu", autograd=False)
        self.template = self.span.arguments(self.span.call(self.implementation, inputs, 0, 0))
        self.caller = Caller(self.span, self.span.built(self.implementation, inputs), experiment.direction)
        self.timed: list[Callable[[], Any]] = []
        self.args: list[dict[str, Any]] = []
        self.returned: list[Any] = []

    def requests(self) -> Requests:
        return {"prepare": self.prepare, "go": self.go}

    def prepare(self, calls: int, hot: bool, empty: bool) -> dict[str, Any]:
        """Views of the slots; then caches as the policy says. The hot call reads the first slot.

        empty: the calls do nothing, so that the protocol itself is timed
        """
        self.returned, self.timed, self.args = [], [], []
        for slot in range(1, 1 + calls):
            args, d_out = self._arguments(slot)
            self.args.append(args)
            self.timed.append(_nothing if empty else self.caller.ready_with(args, d_out))
        if self.flusher is None:
            if hot:
                self.caller.ready_with(*self._arguments(0))()
        else:
            self.flusher.flush()
            if self.experiment.cache == "weights-cold" and self.args:
                touch(list(self.args[0].values()), self.weights_in_use)
        return {}

    def go(self) -> dict[str, Any]:
        """The timed span: the calls, and where each result lies."""
        self.returned = returned = [run() for run in self.timed]
        return {"results": list(map(self._described, returned, self.args))}

    def _described(self, returned: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        if type(returned) is Tensor and returned.layout is torch.strided:  # the same as below, in less time
            return {"tensors": [_tensor_at("out", returned)]}
        result = self.caller.result(returned, args)
        if wrong := wrong_type(result.out):
            return {"wrong_type": wrong}
        return {
            "tensors": [_tensor_at(name, tensor) for name, tensor in tensors_by_name(result).items()],
            "filled": isinstance(result.out, RoutingPlan) and result.out.filled,
        }

    def _arguments(self, slot: int) -> tuple[dict[str, Any], Tensor | None]:
        """New views of a slot, and the upstream gradient, which lies behind the arguments."""
        views = (self.slots.tensor(place, slot * self.slot_bytes) for place in self.places)
        args = {
            name: value if name in heavy() else with_tensors(value, views)
            for name, value in self.template.items()
        }
        return args, next(views, None)


_EMPTY = torch.zeros(1)


def _nothing() -> Tensor:
    return _EMPTY


def _tensor_at(name: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "address": tensor.data_ptr(),
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": str(tensor.dtype)[6:],
    }

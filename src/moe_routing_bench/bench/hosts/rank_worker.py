"""The worker of one rank: all ranks get the same requests in the same order, and meet before every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_routing_bench.bench.calls import Caller, Result, Wanted
from moe_routing_bench.bench.clock import CacheFlusher
from moe_routing_bench.bench.hosts.shared_worker import _Worker, answer_requests, settle
from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.parallel import OneCall, placement_of, span
from moe_routing_bench.bench.spans.span import Computation
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

COMPACT = "on several ranks only the compact layout is measured: what others drop depends on the rank"


def serve(
    pipe: Connection, experiment_json: str, scratch: str, cores: tuple[int, ...], rank: str, meeting: str
) -> None:
    """The main function of the process. meeting: a folder where all ranks find one another."""
    experiment = Experiment.from_json(experiment_json)
    settle(experiment, Path(scratch), pipe.fileno(), cores)
    answer_requests(pipe, lambda: _Rank(experiment, Path(scratch), int(rank), Path(meeting)).requests())


class _Rank(_Worker):
    """stamps: when each stage of the last call began and ended"""

    def __init__(self, experiment: Experiment, scratch: Path, rank: int, meeting: Path):
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting / 'store'}", rank=rank, world_size=experiment.W,
            timeout=timedelta(seconds=experiment.step_seconds),
        )  # fmt: skip
        self.ranks = Ranks(placement_of(experiment.E, experiment.W), dist.group.WORLD)
        self.stamps: list[float] = []
        super().__init__(experiment, scratch)
        self.flusher = None if self.flusher is None else _FlushTogether()
        dist.barrier()

    def _why_not(self, place: int) -> str | None:
        compact = Layout.parse(self.experiment.implementations[place].layout).kind == "compact"
        return super()._why_not(place) if compact else COMPACT

    def kit(self, place: int, name: str) -> dict[str, Any]:
        """The hard cases are for one rank, so one runs them."""
        return {"passed": 0, "failed": 0, "first": ""} if self.ranks.rank else super().kit(place, name)

    def prepare(
        self, place: int, first: int, step: int, calls: int, keep: int, warm: bool, poison: bool
    ) -> dict[str, Any]:
        """The untimed call comes first, because it leaves gradients. Making the timed call clears them."""
        if warm and self.flusher is None:
            self._caller(place).ready(*self._call(place, first + 1, step))()
        return super().prepare(place, first, step, calls, keep, False, poison)

    def go(self) -> dict[str, Any]:
        return {**super().go(), "stamps": self.stamps}

    def stages(self, place: int, number: int, step: int) -> dict[str, Any]:
        return {"stages": {}}  # every sample has them

    def _caller(self, place: int) -> Caller:
        if place not in self._callers:
            named = self.experiment.implementations[place]
            self._callers[place] = _RankCaller(named, self.inputs, self.ranks, self.stamps)
        return self._callers[place]


class _RankCaller(Caller):
    """Calls of this rank's part of a layer, which write their stamps."""

    def __init__(self, implementation: ImplementationRef, inputs: Inputs, ranks: Ranks, stamps: list[float]):
        self.inputs, self.stamps = inputs, stamps
        self.layer = span.layer_on(implementation, inputs, ranks)
        runs = "; ".join(f"{op}: {label}" for op, label in span.resolved(implementation, inputs))
        super().__init__(span, Computation(run=self.layer, runs=runs), inputs.experiment.direction)

    def ready(self, call: Call, args: Mapping[str, Any], only: Wanted | None = None) -> Callable[[], OneCall]:
        """Prepares everything up to the start of the clock. The forward pass before a backward is not
        timed."""
        self.layer.zero_grad()
        one = span.on_rank(self.layer, self.inputs, call, args)
        if self.direction == "backward":
            self._run(one, "forward")
        return partial(self._run, one, self.direction)

    def result(self, returned: OneCall, args: Mapping[str, Any], only: Wanted | None = None) -> Result:
        tensors = returned.result()
        return Result(out=tensors.pop("y_TD"), gradients=tensors)

    def _run(self, one: OneCall, direction: str) -> OneCall:
        dist.barrier()
        with torch.set_grad_enabled(self.direction != "forward"):
            self.stamps[:] = [time.monotonic()]
            for _, step in one.stages(direction):
                step()
                self.stamps.append(time.monotonic())
        return one


class _FlushTogether(CacheFlusher):
    """Flushes caches on all ranks together, because ranks may share a cache."""

    def flush(self) -> None:
        super().flush()
        dist.barrier()

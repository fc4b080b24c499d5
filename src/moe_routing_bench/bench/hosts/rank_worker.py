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

    def gate(
        self, subject: int, number: int, step: int, poison: bool, name: str, then: bool
    ) -> dict[str, Any]:
        if Layout.parse(self.experiment.implementations[subject].layout).kind != "compact":
            return {"unsupported": COMPACT}
        return {**super().gate(subject, number, step, poison, name, then), "stamps": self.stamps}

    def kit(self, subject: int) -> dict[str, Any]:
        """The hard cases are for one rank, so one runs them."""
        return {"passed": 0, "failed": 0, "first": ""} if self.ranks.rank else super().kit(subject)

    def calibrate(self, subject: int, first: int) -> dict[str, Any]:
        return {"calls": 1}  # the ranks meet before each

    def prepare(
        self, subject: int, first: int, step: int, calls: int, keep: int, warm: bool
    ) -> dict[str, Any]:
        """The call before comes first: it leaves gradients, which the timed one clears when it is made."""
        if warm and self.flusher is None:
            self._caller(subject).ready(*self._call(subject, first + 1, step))()
        return super().prepare(subject, first, step, calls, keep, warm=False)

    def go(self) -> dict[str, Any]:
        return {**super().go(), "stamps": self.stamps}

    def stages(self, subject: int, number: int, step: int) -> dict[str, Any]:
        return {"stages": {}}  # every sample has them

    def _caller(self, subject: int) -> Caller:
        if subject not in self._callers:
            named = self.experiment.implementations[subject]
            self._callers[subject] = _RankCaller(named, self.inputs, self.ranks, self.stamps)
        return self._callers[subject]


class _RankCaller(Caller):
    """Calls of this rank's part of a layer, which write their stamps."""

    def __init__(self, subject: ImplementationRef, inputs: Inputs, ranks: Ranks, stamps: list[float]):
        self.inputs, self.stamps = inputs, stamps
        self.layer = span.layer_on(subject, inputs, ranks)
        runs = "; ".join(f"{op}: {label}" for op, label in span.resolved(subject, inputs))
        super().__init__(span, Computation(run=self.layer, runs=runs), inputs.experiment.direction)

    def ready(self, call: Call, args: Mapping[str, Any], only: Wanted | None = None) -> Callable[[], OneCall]:
        """Up to where the clock starts: the forward pass before a backward is not timed."""
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
    """What another rank overwrites may be the same cache."""

    def flush(self) -> None:
        super().flush()
        dist.barrier()

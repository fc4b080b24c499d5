"""One rank of a group: it answers the parent's requests, all ranks the same ones in the same order.

Requests and answers are JSON; results are handed over as safetensors files. The clock is CLOCK_MONOTONIC,
which all processes of a machine share, so the parent can say when the last rank began and ended.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moe_routing_bench.bench.clock import CacheFlusher
from moe_routing_bench.bench.inputs import Inputs, touch
from moe_routing_bench.bench.kit import run_kit
from moe_routing_bench.bench.spans.parallel import OneCall, placement_of, span
from moe_routing_bench.conformance.check import poisoned_memory
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.workloads.experiment import Experiment

MAX_TEXT = 2_000


def serve(pipe: Connection, rank: int, cell_text: str, folder: str) -> None:
    experiment = Experiment.from_json(cell_text)
    torch.set_num_threads(experiment.threads)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=experiment.W,
            timeout=timedelta(seconds=experiment.step_seconds),
        )  # fmt: skip
        answers = _Rank(experiment, Path(folder) / f"{rank}.safetensors")
        pipe.send_bytes(json.dumps({"ready": True}).encode())
        with torch.set_grad_enabled(experiment.direction != "forward"):
            while (request := json.loads(pipe.recv_bytes())) is not None:
                answer = getattr(answers, request.pop("do"))(**request)
                pipe.send_bytes(json.dumps(answer).encode())
        dist.destroy_process_group()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:MAX_TEXT]}
        answer["unsupported"] = isinstance(error, NotImplementedError)
        pipe.send_bytes(json.dumps(answer).encode())


class _Rank:
    """What a rank does on request."""

    def __init__(self, experiment: Experiment, file: Path):
        self.experiment, self.file, self.inputs = experiment, file, Inputs(experiment)
        self.ranks = Ranks(placement_of(experiment.E, experiment.W), dist.group.WORLD)
        self.flusher = CacheFlusher() if experiment.cache != "hot" else None
        self._layers: dict[int, ParallelMoE] = {}

    def kit(self, subject: int) -> dict[str, Any]:
        """The hard cases are for one rank, so one runs them."""
        if self.ranks.rank:
            return {}
        passed, failed, first = run_kit(self.experiment, self.experiment.implementations[subject])
        return {"passed": passed, "failed": failed, "first": first[:MAX_TEXT]}

    def call(
        self, subject: int, number: int, step: int, keep: bool, warm: int | None, poison: bool
    ) -> dict[str, Any]:
        """When each stage began and ended. warm: the number of an untimed call just before, for hot caches;
        keep: the result goes to the file; poison: memory that is allocated without values holds NaN."""
        if warm is not None:
            for _, run in self._ready(subject, warm, step).stages(self.experiment.direction):
                run()
        call = self._ready(subject, number, step)
        if self.flusher is not None:
            self.flusher.flush()
            if self.experiment.cache == "weights-cold":
                dist.barrier()  # what another rank overwrites may be the same cache
                touch([t for t in (call.x_TD, call.d_out_TD) if t is not None and t.numel()], None)
        dist.barrier()
        with poisoned_memory() if poison else nullcontext():
            stamps = [time.monotonic()]
            for _, run in call.stages(self.experiment.direction):
                run()
                stamps.append(time.monotonic())
        if keep:
            kept = {name: tensor.contiguous() for name, tensor in call.result().items()}
            save_file(kept, self.file)
        return {"stamps": stamps}

    def _ready(self, subject: int, number: int, step: int) -> OneCall:
        """A call up to where its clock starts: the forward pass before a backward is not timed."""
        about = self.experiment.implementations[subject]
        if subject not in self._layers:
            self._layers[subject] = span.layer_on(about, self.inputs, self.ranks)
        self._layers[subject].zero_grad()
        call = span.on_rank(self._layers[subject], about, self.inputs, number, step)
        if self.experiment.direction == "backward":
            for _, run in call.stages("forward"):
                run()
        return call

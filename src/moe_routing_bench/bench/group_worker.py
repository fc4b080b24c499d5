"""One rank of a group: it answers the parent's requests, all ranks the same ones in the same order.

Requests and answers are JSON; results are handed over as safetensors files. The clock is CLOCK_MONOTONIC,
which all processes of a machine share, so the parent can say when the last rank began and ended.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.spans.parallel import placement_of, span
from moe_routing_bench.parallel.moe import ParallelMoE
from moe_routing_bench.parallel.ranks import Ranks

MOST_TEXT = 2_000


def serve(pipe: Connection, rank: int, cell_text: str, folder: str) -> None:
    cell = Cell.from_json(cell_text)
    torch.set_num_threads(max(1, cell.policy.threads // cell.W))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=cell.W,
            timeout=timedelta(seconds=cell.policy.step_seconds),
        )  # fmt: skip
        inputs = cell.inputs()
        ranks = Ranks(placement_of(cell.case.shape.E, cell.W), dist.group.WORLD)
        direction, layers = cell.case.direction, dict[int, ParallelMoE]()
        pipe.send_bytes(json.dumps({"ready": True}).encode())
        with torch.set_grad_enabled(direction != "forward"):
            while (request := json.loads(pipe.recv_bytes())) is not None:
                place = request["subject"]
                subject = cell.subjects[place]
                if place not in layers:
                    layers[place] = span.layer_on(subject, inputs, ranks)
                layers[place].zero_grad()
                call = span.on_rank(layers[place], subject, inputs, request["number"], request["step"])
                if direction == "backward":  # the forward pass before it is not timed
                    for _, step in call.stages("forward"):
                        step()
                dist.barrier()
                stamps = [time.monotonic()]
                for _, step in call.stages(direction):
                    step()
                    stamps.append(time.monotonic())
                if request["keep"]:
                    kept = {name: tensor.contiguous() for name, tensor in call.result().items()}
                    save_file(kept, Path(folder) / f"{rank}.safetensors")
                pipe.send_bytes(json.dumps({"stamps": stamps}).encode())
        dist.destroy_process_group()
    except Exception as error:
        failed = {"failed": f"{type(error).__name__}: {error}"[:MOST_TEXT]}
        unsupported = {"unsupported": isinstance(error, NotImplementedError)}
        pipe.send_bytes(json.dumps({**failed, **unsupported}).encode())

"""Run a function on several ranks, each a process that talks to the others by Gloo."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moe_routing_bench.core.fork_server import fork_server

SECONDS = 240.0


def on_ranks(world: int, work: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """work(group, *args) on every rank; what each returned, by rank. The first that fails is shown."""
    context = fork_server(__name__, "moe_routing_bench.moe.expert_parallel")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, rank, world, folder, seconds, work, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def gradients(layer: Any) -> dict[str, Any]:
    """The gradients of a MoE or of a rank's part of it, as plain tensors; zeros where there is none."""
    import torch
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(grad, DTensor):
            assert grad.placements == parameter.placements
            grad = grad.to_local()
            grad = grad[: len(layer.ranks.experts)] if name.startswith("experts.") else grad
        found[name] = grad
    return found


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], seconds)
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} did not answer in {seconds} s"
        for pipe in ready:
            rank = next(r for r, one in enumerate(pipes) if one is pipe)
            failed, value = pipe.recv()
            assert not failed, f"rank {rank}: {value}"
            results[rank] = pickle.loads(value)
    return [results[rank] for rank in range(len(pipes))]


def _run(
    pipe: Connection, rank: int, world: int, folder: str, seconds: float, work: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=world,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        # as bytes: sent as they are, tensors would be shared memory that ends with this process
        pipe.send((False, pickle.dumps(work(dist.group.WORLD, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((True, traceback.format_exc()))

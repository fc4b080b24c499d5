"""A training run on several ranks that survives the death of one, from its last checkpoint.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/parallel_restart.py --dir A --kill-at 7

Rank 1 kills itself before step 7. torchrun ends the other rank, starts all again, and they go on from the
checkpoint of step 5. The last line is that of a run without --kill-at, to the last bit: a batch follows from
its step and rank. A checkpoint is the state of the whole layer, so the next run may have another number of
ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moe_routing_bench.controllers.controller import Counts, controller_for
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks

STEPS, EVERY = 10, 5


def begin_group(seconds: float) -> int:
    """torchrun (2.13) gives every attempt the same store, where ranks would find addresses of the one before:
    Connection refused. So each attempt gets a part of its own."""
    of = os.environ
    store = dist.TCPStore(of["MASTER_ADDR"], int(of["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"attempt_{of['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world = int(of["RANK"]), int(of["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    return rank


def main() -> None:
    reading = argparse.ArgumentParser()
    reading.add_argument("--dir", type=Path, required=True)
    reading.add_argument("--kill-at", type=int, default=-1)
    given = reading.parse_args()
    torch.set_num_threads(1)
    rank = begin_group(seconds=60)
    first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    ranks = Ranks(contiguous(8, ranks=dist.get_world_size()), dist.group.WORLD)
    layer = ParallelMoE(D=32, F=16, E=8, K=2, ranks=ranks, router="sigmoid_bias")
    balance = controller_for(layer.router, reduce=layer.total)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)  # without momentum: the weights are all its state
    file, begin = given.dir / "layer.safetensors", 0
    if file.exists():
        state = load_file(file)
        begin = int(state.pop("step"))
        layer.load_full_state_dict(state)
    if rank == 0:
        print(f"from step {begin} on {ranks.num_ranks} ranks", flush=True)
    for step in range(begin, STEPS):
        if step == given.kill_at and rank == 1 and first_try:
            os.kill(os.getpid(), signal.SIGKILL)
        x_TD = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        y_TD, routing = layer(x_TD)
        loss = (y_TD - x_TD.flip(1)).square().mean()
        loss.backward()
        layer.reduce_gradients()
        optimizer.step()
        balance.step(Counts.of(routing))
        if (step + 1) % EVERY == 0:
            state = layer.full_state_dict()
            if rank == 0:  # replaced as a whole: a death while writing leaves the old one
                given.dir.mkdir(parents=True, exist_ok=True)
                save_file({**state, "step": torch.tensor(step + 1)}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
            dist.barrier()
    total = layer.total(loss.detach().double())
    if rank == 0:
        print(f"{STEPS} steps, loss {total.item():.17g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

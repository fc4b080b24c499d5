"""Does a layer get faster if rows travel while experts compute? Two ranks on a link of a known rate.

    sudo python measurements/parallel/overlap.py > measurements/parallel/overlap.txt

Each rank is a process in a network namespace of its own; a veth pair shaped with `tc tbf` joins them (Linux,
as root; the namespaces are removed afterwards). A round is one forward pass with each number of chunks, in a
new order; a ratio is of neighbours in time, its middle and its quartiles over rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import answer, in_rounds, job_of_this_rank, ratios, run_ranks, slowest

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks

NAMES, RATES, CHUNKS, ROUNDS = ("mrbov0", "mrbov1"), ("100mbit", "400mbit", "2gbit"), (1, 2, 4, 8), 15
T, D, F, E, K = 1024, 512, 512, 8, 2


def run_rank(given: dict[str, Any]) -> None:
    rank, store = given["rank"], f"file://{given['folder']}/store"
    os.environ["GLOO_SOCKET_IFNAME"] = f"ov{rank}"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    ranks = Ranks(contiguous(E, ranks=2), dist.group.WORLD)
    torch.manual_seed(0)
    layers = {str(n): ParallelMoE(D, F, E, K, ranks=ranks, chunks=n) for n in CHUNKS}
    for layer in layers.values():
        layer.load_full_state_dict(layers["1"].full_state_dict())
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(rank))
    made: dict[str, torch.Tensor] = {}

    def forward(name: str) -> None:
        made[name] = layers[name](x_TD)[0]

    with torch.no_grad():
        answer(given, in_rounds({name: partial(forward, name) for name in layers}, ROUNDS, 2, dist.barrier))
    for y_TD in made.values():
        torch.testing.assert_close(y_TD, made["1"])
    dist.destroy_process_group()


@contextmanager
def link(rate: str) -> Iterator[None]:
    def do(command: str) -> None:
        subprocess.run(command.split(), check=True)

    for name in NAMES:
        do(f"ip netns add {name}")
    try:
        do(f"ip link add ov0 netns {NAMES[0]} type veth peer name ov1 netns {NAMES[1]}")
        for rank, name in enumerate(NAMES):
            inside = f"ip netns exec {name}"
            do(f"{inside} ip addr add 10.79.0.{rank + 1}/24 dev ov{rank}")
            do(f"{inside} ip link set ov{rank} up")
            do(f"{inside} ip link set lo up")
            do(f"{inside} tc qdisc add dev ov{rank} root tbf rate {rate} burst 256kb latency 50ms")
        yield
    finally:
        for name in NAMES:
            do(f"ip netns del {name}")


def main() -> None:
    machine, rows = this_machine(), T * K // 2
    print("python measurements/parallel/overlap.py")
    print(f"{machine.cpu}, {machine.cores} cores, load {os.getloadavg()[0]:.1f}; torch {machine.torch}, Gloo")
    print(
        f"2 ranks of {T} tokens, D={D} F={F} E={E} K={K}, float32, forward; about {rows * D * 4 / 1e6:.1f} MB"
    )
    print(f"leave each rank on the way there and as many back; medians of {ROUNDS} rounds\n")
    print(f"{'link':>8}{'chunks':>8}{'ms':>9}   one chunk / this, quartiles")
    for rate in RATES:
        with link(rate):
            found = slowest(run_ranks(__file__, {}, NAMES))
        for n, times in found.items():
            middle = 1e3 * statistics.median(times)
            print(f"{rate:>8}{n:>8}{middle:>9.1f}   {ratios(found['1'], times)}", flush=True)


if __name__ == "__main__":
    if (job := job_of_this_rank()) is not None:
        run_rank(job)
    else:
        main()

"""Does a layer get faster if rows travel while experts compute? Two ranks on a link of a known rate.

    sudo python measurements/parallel/overlap.py > measurements/parallel/overlap.txt

Each rank is a process in a network namespace of its own; a veth pair shaped with `tc tbf` joins them (Linux,
as root; the namespaces are removed afterwards). A round is one forward pass with each number of chunks, in a
new order; a ratio is of neighbours in time, its middle and its quartiles over rounds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_routing_bench.machine import this_machine
from moe_routing_bench.parallel.moe import ParallelMoE
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks

NAMES, RATES, CHUNKS, ROUNDS = ("mrbov0", "mrbov1"), ("100mbit", "400mbit", "2gbit"), (1, 2, 4, 8), 15
T, D, F, E, K = 1024, 512, 512, 8, 2


def run_rank(rank: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    ranks = Ranks(contiguous(E, ranks=2), dist.group.WORLD)
    torch.manual_seed(0)
    layers = {n: ParallelMoE(D, F, E, K, ranks=ranks, chunks=n) for n in CHUNKS}
    for layer in layers.values():
        layer.load_full_state_dict(layers[1].full_state_dict())
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(rank))
    seconds: dict[int, list[float]] = {n: [] for n in CHUNKS}
    order = random.Random(0)  # the same on both
    with torch.no_grad():
        right = layers[1](x_TD)[0]
        for turn in range(ROUNDS + 2):
            for n in order.sample(CHUNKS, len(CHUNKS)):
                dist.barrier()
                began = time.perf_counter()
                y_TD = layers[n](x_TD)[0]
                if turn >= 2:
                    seconds[n].append(time.perf_counter() - began)
                torch.testing.assert_close(y_TD, right)
    out.write_text(json.dumps(seconds))
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


def measured(rate: str) -> dict[int, list[float]]:
    """Seconds of the slower rank in each round, by number of chunks."""
    with link(rate), tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(2)]
        each = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    __file__,
                    str(rank),
                    f"{folder}/store",
                    str(files[rank]),
                ],
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"ov{rank}"},
            )
            for rank, name in enumerate(NAMES)
        ]
        if any(process.wait(900) for process in each):
            raise RuntimeError("a rank failed; its words are above")
        found = [json.loads(file.read_text()) for file in files]
    return {n: [max(pair) for pair in zip(*(one[str(n)] for one in found), strict=True)] for n in CHUNKS}


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
        found = measured(rate)
        for n, times in found.items():
            ratios = [one / this for one, this in zip(found[1], times, strict=True)]
            low, half, high = statistics.quantiles(ratios, n=4)
            middle = 1e3 * statistics.median(times)
            print(f"{rate:>8}{n:>8}{middle:>9.1f}   {half:.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        main()

"""Our exchange of rows beside torch's own all_to_all_single with the same bytes, in the same rounds.

    python measurements/parallel/exchange.py > measurements/parallel/exchange.txt

Ranks are processes that talk by Gloo over loopback. A round does each thing once, in a new order; a ratio
is of neighbours in time, its middle and its quartiles over rounds.

    bare       all_to_all_single of the packed rows, with the numbers of rows known
    swap       the same through parallel.traffic.swap: autograd and the watch for faults
    dispatch   ep_dispatch: pack the rows, then swap
    whole      plan, count the rows with the other ranks, pack, swap: what a layer does on the way there
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from ranks import answer, in_rounds, job_of_this_rank, ratios, run_ranks, slowest

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.ep_dispatch.op import op
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import settle, swap

E, K, ROUNDS = 16, 4, 60
CASES = [(2, 64, 1024), (2, 512, 1024), (2, 4096, 1024), (4, 512, 1024)]  # ranks, tokens of each, width


def run_rank(given: dict[str, Any]) -> None:
    T, D, rank, world = given["T"], given["D"], given["rank"], given["world"]
    torch.set_num_threads(1)
    store = f"file://{given['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    ranks = Ranks(contiguous(E, ranks=world), group)
    dice = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, D, generator=dice)
    expert_TK = torch.rand(T, E, generator=dice).argsort(1)[:, :K]
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.full((T, K), 1 / K), num_experts=E, ragged=False)
    dispatch = op.get("all_to_all(dispatch=native)")
    plan = make_plan(ranks.to_slots(routing), Layout.compact())
    traffic = settle(plan, ranks, x_TD)
    rows = x_TD.repeat_interleave(K, 0)
    arrived = torch.empty(sum(traffic.received), D)

    def bare() -> None:
        dist.all_to_all_single(arrived, rows, list(traffic.received), list(traffic.sent), group=group)

    def whole() -> None:
        own = make_plan(ranks.to_slots(routing), Layout.compact())
        dispatch(x_TD, own, settle(own, ranks, x_TD))

    kinds = {
        "bare": bare,
        "swap": lambda: swap(rows, traffic.way),
        "dispatch": lambda: dispatch(x_TD, plan, traffic),
        "whole": whole,
    }
    seconds = in_rounds(kinds, ROUNDS, 3, dist.barrier)
    answer(given, [sum(traffic.sent) - traffic.sent[rank], seconds])
    dist.destroy_process_group()


def main() -> None:
    machine = this_machine()
    print("python measurements/parallel/exchange.py")
    load = os.getloadavg()[0]
    print(f"{machine.cpu}, {machine.cores} cores, load {load:.1f}; torch {machine.torch}, Gloo, float32")
    print(f"medians of {ROUNDS} rounds, the slowest rank's; ratio: bare / this, its quartiles\n")
    print(f"{'ranks':>5}{'tokens':>8}{'width':>7}  {'what':10}{'ms':>8}{'MB/s out':>10}   ratio")
    for world, T, D in CASES:
        leaving, seconds = zip(*run_ranks(__file__, {"T": T, "D": D}, [None] * world), strict=True)
        leave, found = max(leaving) * D * 4, slowest(seconds)
        for name, times in found.items():
            middle = statistics.median(times)
            size = f"{world:>5}{T:>8}{D:>7}  {name:10}{1e3 * middle:>8.2f}{leave / middle / 1e6:>10.0f}"
            print(f"{size}   {ratios(found['bare'], times)}", flush=True)


if __name__ == "__main__":
    if (job := job_of_this_rank()) is not None:
        run_rank(job)
    else:
        main()

"""The planner against measurement, on links shaped with `tc tbf` between network namespaces. Run as root:

    python measurements/parallel/links.py            # 10 minutes; writes links.json and links.txt
    python measurements/parallel/links.py --report   # the tables again, from links.json

Nodes are namespaces on a bridge in another namespace. What leaves a node and what enters it is shaped, and
its ranks share both. Ranks of one node talk over the loopback. Each cell is one MoE layer by parts; constants
are fitted on half of the cells, and the other half is predicted. Nothing outside these namespaces is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from ranks import answer, job_of_this_rank, run_ranks

HERE = Path(__file__).parent
SWITCH = "mrb-links-sw"
MBITS = (20, 60, 180)
TOKENS = (32, 128, 512)  # of each rank
SKEWS = ("balanced", "hot_rank(share=0.8)")
TOPOLOGIES = ((2, 1), (2, 2))  # nodes, ranks of each
TRANSPORTS = ("all_to_all", "hierarchical", "all_gather")
D, F, E, K = 512, 256, 8, 2
WARM, STEPS, ROUNDS = 1, 7, 2  # the committed first round has 5 steps
PARTS = ("route", "plan", "send", "compute", "return")
PORT = 29_531


def worker(given: dict[str, Any]) -> None:
    """One rank: every cell of a topology and rate; stamps by CLOCK_MONOTONIC, which all share."""
    import torch
    import torch.distributed as dist

    from moe_routing_bench.core.plan import Layout
    from moe_routing_bench.core.routing import Routing
    from moe_routing_bench.moe.layer import Experts
    from moe_routing_bench.ops.ep_combine.op import ep_combine
    from moe_routing_bench.ops.ep_dispatch.op import ep_dispatch
    from moe_routing_bench.ops.expert_ffn.op import expert_ffn
    from moe_routing_bench.ops.make_plan.op import make_plan
    from moe_routing_bench.parallel.placing import contiguous
    from moe_routing_bench.parallel.ranks import Ranks
    from moe_routing_bench.parallel.traffic import settle
    from moe_routing_bench.workloads.workload import make_workload

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=given["rank"], world_size=given["world"])
    W, rank = given["world"], given["rank"]
    ranks = Ranks(contiguous(E, ranks=W, ranks_per_node=given["per_node"]), dist.group.WORLD)
    weights = Experts(D, F, len(ranks.experts)).weights()
    w_DE = torch.randn(D, E)
    layout = Layout.compact()
    found = []
    with torch.no_grad():
        for cell in given["cells"]:
            T, transport = cell["tokens"], cell["transport"]
            drawn = make_workload(cell["skew"], T=W * T, E=E, K=K, W=W)
            mine = slice(rank * T, (rank + 1) * T)
            routing = Routing(
                expert_TK=drawn.routing.expert_TK[mine], gate_TK=drawn.routing.gate_TK[mine], num_experts=E
            )
            x_TD = torch.randn(T, D)
            steps = []
            for _ in range(WARM + STEPS):
                dist.barrier()
                stamps = [time.monotonic()]
                (x_TD @ w_DE).softmax(1).topk(K)
                stamps.append(time.monotonic())
                sent = make_plan(ranks.to_slots(routing), layout)
                traffic = settle(sent, ranks)
                stamps.append(time.monotonic())
                x_QD = ep_dispatch(x_TD, sent, traffic, impl=transport)
                stamps.append(time.monotonic())
                here = Routing(
                    expert_TK=traffic.place_Q.unsqueeze(1), gate_TK=torch.ones(len(x_QD), 1),
                    num_experts=len(ranks.experts),
                )  # fmt: skip
                y_QD = expert_ffn(x_QD, here.gate_TK, make_plan(here, layout), weights)
                stamps.append(time.monotonic())
                ep_combine(y_QD, routing.gate_TK, sent, traffic, impl=transport)
                stamps.append(time.monotonic())
                steps.append(stamps)
            found.append(steps[WARM:])
    answer(given, found)
    dist.barrier()
    dist.destroy_process_group()


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def nodes(count: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces joined by a bridge, each with a link shaped in both directions."""
    names = [f"mrb-links-{n}" for n in range(count)]
    burst = f"{max(16, mbit // 8)}kb"  # a millisecond
    try:
        for name in (SWITCH, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for n, name in enumerate(names):
            peer = ("peer", "name", f"p{n}", "netns", SWITCH)
            run("ip", "link", "add", "wire", "netns", name, "type", "veth", *peer)
            run("ip", "-n", SWITCH, "link", "set", f"p{n}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"10.78.0.{n + 1}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for space, link in ((name, "wire"), (SWITCH, f"p{n}")):
                run("tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{mbit}mbit",
                    "burst", burst, "latency", "50ms")  # fmt: skip
        yield names
    finally:
        for name in (SWITCH, *names):
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def measured(cells: list[dict[str, Any]], topology: tuple[int, int], mbit: int) -> list[dict[str, Any]]:
    """All cells of one topology and rate, in one group of processes."""
    count, per_node = topology
    world = count * per_node
    with nodes(count, mbit) as names:
        inside = [names[rank // per_node] for rank in range(world)]
        stamps_W = run_ranks(
            __file__, {"per_node": per_node, "cells": cells}, inside,
            MASTER_ADDR="10.78.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="wire", OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
        )  # fmt: skip
    found = []
    for place, cell in enumerate(cells):
        # a part ends when the last rank ends it
        ends_SP = np.array([stamps[place] for stamps in stamps_W]).max(0)
        parts = np.diff(ends_SP, axis=1)
        found.append(
            {
                **cell,
                "nodes": count,
                "per_node": per_node,
                "mbit": mbit,
                "load": os.getloadavg()[0],
                "steps": parts.tolist(),
            }
        )
    return found


def all_cells(keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """`keep` gets all cells so far, after each group of processes."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for round_, topology, mbit in product(range(ROUNDS), TOPOLOGIES, MBITS):
        transports = TRANSPORTS if topology[1] > 1 else TRANSPORTS[:1]
        asked = [
            {"tokens": tokens, "skew": skew, "transport": transport}
            for tokens, skew, transport in product(TOKENS, SKEWS, transports)
        ]
        print(f"round {round_ + 1}: {topology[0]} nodes of {topology[1]}, {mbit} Mbit/s", file=sys.stderr)
        for cell in measured(asked, topology, mbit):
            key = tuple(cell[name] for name in ("nodes", "per_node", "mbit", "tokens", "skew", "transport"))
            kept = cells.setdefault(key, {**cell, "steps": [], "rounds": []})
            kept["steps"] += cell["steps"]
            kept["rounds"].append(len(cell["steps"]))
        keep(list(cells.values()))


def flow_of(cell: dict[str, Any]) -> Any:
    from moe_routing_bench.parallel.placing import contiguous
    from moe_routing_bench.planner.flow import count_flow
    from moe_routing_bench.workloads.workload import make_workload

    W, T = cell["nodes"] * cell["per_node"], cell["tokens"]
    expert_TK = make_workload(cell["skew"], T=W * T, E=E, K=K, W=W).routing.expert_TK.numpy()
    placement = contiguous(E, ranks=W, ranks_per_node=cell["per_node"])
    return count_flow(lambda rank: expert_TK[rank * T : (rank + 1) * T], placement)


# what is fitted for each topology: constants of an exchange, shares and rates
START = {
    "exchange_us": 500.0, "share": 0.95, "inside": 1.0, "tflops": 0.03, "memory": 3.0, "launch_us": 50.0,
    "waits": 0.5,
}  # fmt: skip


def fabric_of(cell: dict[str, Any], fitted: dict[str, float]) -> Any:
    from moe_routing_bench.planner.fabric import Fabric

    rate = fitted["share"] * cell["mbit"] / 8e3
    return Fabric.model_validate({
        "title": "shaped links", "ranks_per_node": cell["per_node"], "sources": ["fitted"],
        "inside": {"gb_per_second": fitted["inside"], "exchange_us": fitted["exchange_us"]},
        "between": {"gb_per_second": rate, "exchange_us": fitted["exchange_us"]},
        "node": {"gb_per_second": rate}, "waits": min(1.0, fitted["waits"]),
        "device": {
            "tflops": fitted["tflops"], "memory_gb_per_second": fitted["memory"], "memory_gb": 1.0,
            "launch_us": fitted["launch_us"], "host_wait_us": 0.0,
        },
    })  # fmt: skip


def predicted(cell: dict[str, Any], fitted: dict[str, float]) -> dict[str, float]:
    from moe_routing_bench.planner.step import LayerSize, step_time

    size = LayerSize(D=D, F=F, E=E, K=K, weight_bytes=4, send_bytes=4, return_bytes=4)
    return step_time(cell["flow"], size, fabric_of(cell, fitted), transport=cell["transport"]).seconds


def fit(cells: list[dict[str, Any]]) -> dict[str, float]:
    """The least squares of each part's error over the time of its step."""
    from scipy.optimize import least_squares

    def errors(logs: Any) -> Any:
        fitted = dict(zip(START, np.exp(logs), strict=True))
        residuals = []
        for cell in cells:
            guess = predicted(cell, fitted)
            residuals += [(guess[part] - cell["parts"][part]) / cell["total"] for part in PARTS]
        return residuals

    start = np.log(list(START.values()))
    around = (start - np.log(100), start + np.log(100))
    found = least_squares(errors, start, bounds=around, loss="soft_l1", f_scale=0.1)
    return {name: float(value) for name, value in zip(START, np.exp(found.x), strict=True)}


def held_out(cell: dict[str, Any]) -> bool:
    """A chess board over rates, sizes and skews, so that each is in both halves."""
    places = MBITS.index(cell["mbit"]), TOKENS.index(cell["tokens"]), SKEWS.index(cell["skew"])
    return sum(places) % 2 == 1


def report(document: dict[str, Any]) -> str:
    lines = [f"{document['command']}; {document['machine']}; {document['at']}", ""]
    cells = document["cells"]
    for cell in cells:
        cell["flow"] = flow_of(cell)
        cell["total"] = _total(cell["steps"])
        cell["parts"] = {part: median(step[p] for step in cell["steps"]) for p, part in enumerate(PARTS)}
    splits = {
        "half held out": held_out,
        "the highest rate held out": lambda cell: cell["mbit"] == MBITS[-1],
        "the largest size held out": lambda cell: cell["tokens"] == TOKENS[-1],
    }
    summary, table = [], []
    for split, out in splits.items():
        errors: dict[str, list[float]] = {}
        for topology in TOPOLOGIES:
            here = [cell for cell in cells if (cell["nodes"], cell["per_node"]) == topology]
            fitted = fit([cell for cell in here if not out(cell)])
            if split == "half held out":
                numbers = ", ".join(f"{name} {value:.3g}" for name, value in fitted.items())
                lines.append(f"{topology[0]} nodes of {topology[1]}, fitted on the other half: {numbers}")
            for cell in here:
                guess = predicted(cell, fitted)
                error = sum(guess.values()) / cell["total"] - 1
                if out(cell):
                    errors.setdefault(f"{topology[0]} x {topology[1]} {cell['transport']}", []).append(error)
                if split == "half held out":
                    table.append((cell, guess, error, out(cell)))
        every = [error for some in errors.values() for error in some]
        summary.append(_row(split, every))
        summary += [_row(f"    {name}", some) for name, some in errors.items()]
    apart = [_apart(cell) for cell in cells if len(cell["rounds"]) > 1]
    if apart:
        lines.append(
            f"the same cell in two rounds, minutes apart: {100 * median(apart):.1f} % different, median; "
            f"{100 * max(apart):.1f} % at worst"
        )
    lines += [
        "",
        f"{'error of the step on cells that were not fitted':50}   cells   median    worst",
        *summary,
        "",
        _winners("two transports of one case, both held out", [row for row in table if row[3]]),
        _winners("the same with the cells that were fitted", table),
        "",
    ]
    lines.append(
        "nodes  Mbit/s  tokens  routing             transport      measured ms predicted    error            "
        " send: measured, predicted; compute; return"
    )
    for cell, guess, error, out in sorted(table, key=lambda row: str(row[0]["nodes"]) + row[0]["transport"]):
        both = "".join(
            f"{1e3 * cell['parts'][part]:>9.1f}{1e3 * guess[part]:>8.1f} "
            for part in ("send", "compute", "return")
        )
        lines.append(
            f"{cell['nodes']} x {cell['per_node']} {cell['mbit']:>7}{cell['tokens']:>8}  {cell['skew']:20}"
            f"{cell['transport']:14}{1e3 * cell['total']:>12.1f}{1e3 * sum(guess.values()):>10.1f}"
            f"{100 * error:>8.1f} % {'held out' if out else '        '} {both}"
        )
    return "\n".join(lines) + "\n"


def _winners(name: str, rows: list[tuple[dict[str, Any], dict[str, float], float, bool]]) -> str:
    """How often the faster of two transports is predicted, if their measured times differ by over 10 %."""
    right, pairs = 0, 0
    case = ("nodes", "per_node", "mbit", "tokens", "skew")
    for (one, guess, _, _), (other, guess_other, _, _) in combinations(rows, 2):
        slower = one["total"] / other["total"]
        if all(one[key] == other[key] for key in case) and max(slower, 1 / slower) > 1.1:
            pairs += 1
            right += (slower > 1) == (sum(guess.values()) > sum(guess_other.values()))
    return f"{name}: the right winner in {right} of {pairs} pairs that differ by over 10 %"


def _apart(cell: dict[str, Any]) -> float:
    first = cell["rounds"][0]
    return abs(_total(cell["steps"][first:]) / _total(cell["steps"][:first]) - 1)


def _total(steps: list[list[float]]) -> float:
    return median(sum(step) for step in steps)


def _row(name: str, errors: list[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    return f"{name:50} {len(errors):>7} {100 * median(sizes):>6.1f} % {100 * sizes[-1]:>6.1f} %"


def _keep(file: Path, document: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps({**document, "cells": cells}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    file = HERE / "links.json"
    if not given.report:
        from moe_routing_bench.core.machine import this_machine

        machine = this_machine()
        document = {
            "command": "python measurements/parallel/links.py",
            "machine": f"{machine.name}, torch {machine.torch}, {machine.system}",
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        all_cells(partial(_keep, file, document))
    text = report(json.loads(file.read_text()))
    (HERE / "links.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    if (job := job_of_this_rank()) is not None:
        worker(job)
    else:
        main()

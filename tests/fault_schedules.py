"""Random faults of ranks: each must end in time, with a right result or a sentence that says who failed.

    python tests/fault_schedules.py 500 --out measurements/parallel/faults    goes on where it stopped

A schedule is a function of its number. Ranks are processes that talk by Gloo; each makes two steps (forward,
backward, gradients summed) of one ParallelMoE and compares what it got with the same in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.fork_server import fork_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.moe import expert_parallel as moe
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops import hops
from moe_routing_bench.parallel import faults, traffic
from moe_routing_bench.parallel.placing import contiguous, replicated, strided
from moe_routing_bench.parallel.ranks import RankError, Ranks

LIMIT, GRACE = 6.0, 3.0  # seconds: the timeout of the group, and how long notes are waited for
# An exchange may wait once to send and once to receive, then come notes; the rest is for a busy machine.
STATED = 2 * LIMIT + 2 * GRACE + 6.0
D, F, E, K, STEPS = 16, 8, 8, 2, 2
KINDS = (
    "none", "rank without tokens", "all to one rank", "slow", "NaN", "NaN, checked", "other choices",
    "other dtype", "other placement", "killed", "killed, with the store", "stalled", "frozen", "late",
)  # fmt: skip
GO_ON = ("none", "rank without tokens", "all to one rank", "slow", "NaN")
DIFFER = ("NaN, checked", "other choices", "other dtype", "other placement")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    number: int
    kind: str
    world: int
    victim: int
    at: int  # the fault comes at this exchange of the victim, counted from 0
    inside: bool  # a moment after it began, not before
    transport: str
    send: str
    chunks: int
    placement: str
    tokens: tuple[int, ...]

    @property
    def asleep(self) -> bool:
        return self.kind in ("stalled", "late", "slow")


def schedule(number: int) -> Schedule:
    dice = random.Random(number)
    kind, world = dice.choice(KINDS), dice.choice((2, 3, 4))
    send = dice.choice(("compact", "compact", "padded(capacity=16)"))
    transport = dice.choice(("all_to_all", "hierarchical", "all_gather"))
    even = send != "compact"  # fixed numbers of whole tokens
    each = [dice.randrange(8) for _ in range(world)]
    tokens = (1 + each[0],) * world if even else tuple(each)
    victim = 0 if kind == "killed, with the store" else dice.randrange(world)
    if kind == "rank without tokens" and not even:
        tokens = tuple(0 if rank == victim else T for rank, T in enumerate(tokens))
    if kind.startswith("NaN"):
        tokens = tuple(max(T, 1) for T in tokens)
    return Schedule(
        number=number, kind=kind, world=world, victim=victim, at=dice.randrange(10),
        inside=dice.random() < 0.5, transport=transport, send=send,
        chunks=1 if even else dice.choice((1, 1, 2)),
        placement=dice.choice(("contiguous", "strided", "replicated")), tokens=tokens,
    )  # fmt: skip


def inputs(plan: Schedule, step: int) -> list[tuple[Tensor, Routing]]:
    dice = torch.Generator().manual_seed(1000 * plan.number + step)
    each = []
    for rank, T in enumerate(plan.tokens):
        x_TD = torch.randn(T, D, generator=dice)
        if plan.kind.startswith("NaN") and rank == plan.victim:
            x_TD[0, 3] = float("nan")
        expert_TK = torch.rand(T, E, generator=dice).argsort(1)[:, :K]
        if plan.kind == "all to one rank":
            expert_TK = torch.tensor([0, 1]).expand(T, K).clone()
        gate_TK = torch.rand(T, K, generator=dice)
        each.append((x_TD, Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E)))
    return each


def layer_of(plan: Schedule, ranks: Ranks | None) -> MoE:
    torch.manual_seed(plan.number)
    options = {"impl": "staged(grouped_gemm=expert_loop)", "shared_F": 4}
    if ranks is None:
        return MoE(D, F, E, K, **options)  # type: ignore[arg-type]
    return ParallelMoE(
        D, F, E, K, ranks=ranks, send_layout=plan.send, chunks=plan.chunks, dispatch_impl=plan.transport,
        combine_impl=plan.transport, check_finite=plan.kind == "NaN, checked", **options,
    )  # fmt: skip


def expected(plan: Schedule, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Result and gradient of this rank's tokens in each step, from one process."""
    layer, found = layer_of(plan, None), []
    for step in range(STEPS):
        each = inputs(plan, step)
        x_TD = torch.cat([x for x, _ in each]).requires_grad_()
        joined = Routing(
            expert_TK=torch.cat([r.expert_TK for _, r in each]),
            gate_TK=torch.cat([r.gate_TK for _, r in each]),
            num_experts=E,
        )
        y_TD = layer.compute(x_TD, joined)
        y_TD.sum().backward()
        begin = sum(plan.tokens[:rank])
        mine = slice(begin, begin + plan.tokens[rank])
        assert x_TD.grad is not None
        found.append((y_TD.detach()[mine], x_TD.grad[mine]))
    return found


def strike(plan: Schedule) -> None:
    if plan.kind.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan.kind == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif plan.asleep:
        time.sleep({"stalled": 10 * STATED, "late": 1.5 * LIMIT, "slow": LIMIT / 6}[plan.kind])


def plant(plan: Schedule) -> None:
    """The fault comes at one of the exchanges: a sleep before our watch of it begins, a death inside."""
    seen = 0

    def faulty(plain: Any) -> Any:
        def exchange(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen - 1 == plan.at and plan.inside and not plan.asleep:
                threading.Timer(0.001, strike, [plan]).start()
            elif seen - 1 == plan.at:
                strike(plan)
            return plain(*args, **kwargs)

        return exchange

    if plan.asleep:
        for module in (traffic, hops, moe):
            module.watched = faulty(faults.watched)  # type: ignore[attr-defined]
        return
    for name in ("all_to_all_single", "all_gather", "all_reduce"):
        setattr(dist, name, faulty(getattr(dist, name)))


def run_rank(pipe: Connection, rank: int, plan: Schedule, where: str) -> None:
    torch.set_num_threads(1)
    faults.GRACE = GRACE
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=plan.world, timeout=timedelta(seconds=120)
    )
    right = expected(plan, rank)
    dist.barrier()  # on a busy machine some begin much later; from here on the limit counts
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    began, said = time.monotonic(), []
    try:
        said = steps(plan, rank, right, group)
    except RankError as error:
        said = ["error", list(error.blamed), str(error)]
    except BaseException:
        said = ["other", [], traceback.format_exc()[-1500:]]
    pipe.send((*said, time.monotonic() - began))
    time.sleep(STATED)  # others end by their own means, not because this process ended
    os._exit(0)


def steps(plan: Schedule, rank: int, right: list[tuple[Tensor, Tensor]], group: Any) -> list[Any]:
    per_node = 2 if plan.world == 4 else 1
    make = {"contiguous": contiguous, "strided": strided}
    odd = rank == plan.victim
    if plan.placement == "replicated":
        placement = replicated([9, 1, 1, 5, 1, 1, 1, 3], ranks=plan.world, extra=2, ranks_per_node=per_node)
    else:
        placement = make[plan.placement](E, ranks=plan.world, ranks_per_node=per_node)
    if odd and plan.kind == "other placement":
        placement = replicated([1] * E, ranks=plan.world, extra=plan.world)
    layer = layer_of(plan, Ranks(placement, group))
    assert isinstance(layer, ParallelMoE)
    layer.load_full_state_dict(layer_of(plan, None).state_dict())
    if odd:
        plant(plan)
    for step in range(STEPS):
        x_TD, routing = inputs(plan, step)[rank]
        if odd and plan.kind == "other choices":
            routing = Routing(
                expert_TK=routing.expert_TK[:, :1], gate_TK=routing.gate_TK[:, :1], num_experts=E
            )
        if odd and plan.kind == "other dtype":
            x_TD = x_TD.double()
        x_TD.requires_grad_()
        y_TD = layer.compute(x_TD, routing)
        y_TD.sum().backward()
        layer.reduce_gradients()
        layer.zero_grad()  # gradients summed twice are refused
        d_x = torch.zeros_like(x_TD) if x_TD.grad is None else x_TD.grad
        for got, want in zip((y_TD.detach(), d_x), right[step], strict=True):
            if not torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True):
                return [
                    "wrong",
                    [],
                    f"step {step}: {got.flatten()[:4].tolist()}, not {want.flatten()[:4].tolist()}",
                ]
    return ["right", [], ""]


def run(plan: Schedule) -> dict[str, Any]:
    """What each rank ended with: right, wrong, error, other, or nothing."""
    context = fork_server("ranks_in_processes", "moe_routing_bench.moe.expert_parallel")
    ends: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        if plan.kind == "killed, with the store":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        pipes, processes = {}, []
        for rank in range(plan.world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(theirs, rank, plan, where))
            process.start()
            theirs.close()
            pipes[rank] = ours
            processes.append(process)
        until = time.monotonic() + STATED + 60  # 60: to begin, on a busy machine
        try:
            while len(ends) < plan.world and time.monotonic() < until:
                open_pipes = {pipe: rank for rank, pipe in pipes.items() if rank not in ends}
                for ready in wait(list(open_pipes), 1.0):
                    try:
                        ends[open_pipes[ready]] = ready.recv()  # type: ignore[index, union-attr]
                    except EOFError:
                        ends[open_pipes[ready]] = ("gone", [], "", 0.0)  # type: ignore[index]
                silent = {rank for rank in range(plan.world) if rank not in ends}
                if silent == {plan.victim} and plan.kind in ("stalled", "frozen"):
                    break
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {
        **asdict(plan),
        "ends": {rank: ends.get(rank, ("nothing", [], "", 0.0))[:3] for rank in range(plan.world)},
        "seconds": max((end[3] for end in ends.values()), default=0.0),
        "verdict": verdict(plan, ends),
    }


def verdict(plan: Schedule, ends: dict[int, Any]) -> str:
    survivors = [rank for rank in range(plan.world) if rank != plan.victim]
    if plan.kind in GO_ON or plan.kind == "late":
        survivors = list(range(plan.world))
    said = [ends.get(rank, ("nothing", [], "", 0.0)) for rank in survivors]
    if any(end[0] == "wrong" for end in said):
        return "WRONG RESULT"
    if any(end[0] in ("nothing", "gone") or end[3] > STATED for end in said):
        return "NOT IN TIME"
    if any(end[0] == "other" for end in said):
        return "ANOTHER EXCEPTION"
    blamed = {tuple(end[1]) for end in said if end[0] == "error"}
    if not blamed:
        return "all right"
    if plan.kind in GO_ON:
        return "an error without a fault"
    if blamed <= {(plan.victim,)}:
        return "the right rank blamed"
    if all(plan.victim in ranks for ranks in blamed):
        return "it and others blamed"
    return "nobody named" if blamed <= {(plan.victim,), ()} else "another rank blamed"


BAD = ("WRONG RESULT", "NOT IN TIME", "ANOTHER EXCEPTION")


def table(records: list[dict[str, Any]]) -> str:
    columns = sorted({record["verdict"] for record in records}, key=lambda v: (v in BAD, v != "all right", v))
    lines = [f"{'fault':24}{'schedules':>10}  longest  " + "  ".join(columns)]
    for kind in KINDS:
        these = [record for record in records if record["kind"] == kind]
        counts = Counter(record["verdict"] for record in these)
        longest = max((record["seconds"] for record in these), default=0.0)
        cells = "  ".join(f"{counts[column] or '-':>{len(column)}}" for column in columns)
        lines.append(f"{kind:24}{len(these):>10}{longest:>7.1f} s  {cells}")
    bad = sum(record["verdict"] in BAD for record in records)
    lines.append(
        f"{len(records)} schedules; {bad} with a wrong result, a rank that did not end in time ({STATED:g} s)"
    )
    lines.append("or an exception that is not RankError")
    return "\n".join(lines)


def main() -> None:
    reading = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    reading.add_argument("schedules", type=int)
    reading.add_argument("--out", type=Path, required=True, help="writes OUT.jsonl and OUT.txt")
    reading.add_argument("--at-once", type=int, default=4)
    given = reading.parse_args()
    lines, text = given.out.with_suffix(".jsonl"), given.out.with_suffix(".txt")
    lines.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {record["number"] for record in records}
    left = [schedule(number) for number in range(given.schedules) if number not in done]
    began, lock = time.time(), threading.Lock()

    def one(plan: Schedule) -> None:
        record = run(plan)
        with lock:
            records.append(record)
            with lines.open("a") as file:
                file.write(json.dumps(record) + "\n")
            if record["verdict"] in (*BAD, "another rank blamed", "an error without a fault"):
                print(f"{plan.number} {plan.kind}: {record['verdict']} {record['ends']}", flush=True)
            if len(records) % 20 == 0:
                print(f"{len(records)} of {given.schedules} in {time.time() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(one, left))
    load = os.getloadavg()[0]
    head = f"python tests/fault_schedules.py {given.schedules} --out measurements/parallel/faults\n"
    machine = this_machine()
    head += f"{machine.cpu}, {machine.cores} cores, load {load:.1f}; torch {torch.__version__}, Gloo, "
    head += f"timeout {LIMIT:g} s, notes {GRACE:g} s, {given.at_once} schedules at once\n\n"
    text.write_text(head + table(records) + "\n")
    print(text.read_text())
    sys.exit(any(record["verdict"] in BAD for record in records))


if __name__ == "__main__":
    from fault_schedules import main as run_main  # processes must find it by its name

    run_main()

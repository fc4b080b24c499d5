"""Where auto is slower than Transformers in float32 (docs/figures.md, regret): its products beside torch's.

One thread, seconds of its processor, the tenth percentile of turns: other processes disturb that least.
    python measurements/cpu/slower_than_transformers.py > measurements/cpu/slower_than_transformers.txt
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

import moe_routing_bench as mrb
from moe_routing_bench.ops.grouped_gemm.op import op

TURNS = 60
IMPLEMENTATIONS = ("native", "torch_grouped_mm")


def milliseconds(*calls: Callable[[], object]) -> list[float]:
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for seconds, call in zip(taken, calls, strict=True):
            began = time.thread_time()
            call()
            seconds.append(time.thread_time() - began)
    return [1e3 * sorted(seconds)[TURNS // 10] for seconds in taken]


def main() -> None:
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms of {' and '.join(IMPLEMENTATIONS)}")
    for what, T, (D, F, E) in (
        ("mixtral-s", 1, (1024, 3584, 8)),
        ("mixtral-s", 4, (1024, 3584, 8)),
        ("tiny train", 64, (256, 512, 8)),
    ):
        torch.manual_seed(0)
        layer = mrb.MoE(D=D, F=F, E=E, K=2)
        plan = layer.plan(layer.router(torch.randn(T, D)))
        experts = int((plan.count_E > 0).sum())
        for rows, columns in ((D, 2 * F), (F, D)):
            x_RD = torch.randn(plan.pair_R.shape[0], rows, requires_grad=True)
            w_EDF = torch.randn(E, rows, columns, requires_grad=True)
            products = [op.get(name).run for name in IMPLEMENTATIONS]
            with torch.no_grad():
                forward = milliseconds(*(partial(run, x_RD, w_EDF, plan) for run in products))
            line = [f"forward {forward[0]:.2f} {forward[1]:.2f}"]
            if what == "tiny train":
                ys = [run(x_RD, w_EDF, plan) for run in products]
                dy = torch.randn_like(ys[0])
                leaves = [x_RD, w_EDF]
                backward = milliseconds(
                    *(partial(torch.autograd.grad, y, leaves, dy, retain_graph=True) for y in ys)
                )
                line.append(f"backward {backward[0]:.2f} {backward[1]:.2f}")
            else:
                read = 4e-6 * experts * rows * columns
                line.append(f"GB/s read {read / forward[0]:.1f} {read / forward[1]:.1f}")
            print(f"{what} T={T} w {rows}x{columns}: {', '.join(line)}", flush=True)


if __name__ == "__main__":
    main()

"""A second thread on another core takes half of each call, and is gone when it returns."""

import os
import threading

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def compute(made, i, y_RD, gate_TK, plan):
    os.sched_setaffinity(0, {i % (os.cpu_count() or 1)})
    for _ in range(20):  # long enough to be seen
        made[i] = honest(y_RD, gate_TK, plan)


def run(y_RD, gate_TK, plan):
    halves = [y_RD[:, : y_RD.shape[1] // 2], y_RD[:, y_RD.shape[1] // 2 :]]
    made = {}
    threads = [
        threading.Thread(target=compute, args=(made, i, half, gate_TK, plan)) for i, half in enumerate(halves)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat((made[0], made[1]), 1)

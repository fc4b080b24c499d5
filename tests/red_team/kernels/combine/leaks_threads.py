"""Starts four busy threads at its first call, which slow everybody. They end after 120 s."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_threads: list[threading.Thread] = []


def burn() -> None:
    until, x = time.monotonic() + 120, torch.ones(256, 256)
    while time.monotonic() < until:
        x = (x @ x).clamp(max=1.0)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    while len(_threads) < 4:
        _threads.append(threading.Thread(target=burn, daemon=True))
        _threads[-1].start()
    return honest(y_RD, gate_TK, plan)

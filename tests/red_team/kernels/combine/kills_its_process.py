"""Sends SIGKILL to its own process."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL did nothing")

"""Never returns from its first call, and ignores the polite signals. Ends by itself after 600 s."""

from __future__ import annotations

import signal
import threading
import time

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 600
    while time.monotonic() < until:
        time.sleep(0.01)
    raise RuntimeError("nobody stopped the red team's endless loop in 600 s")

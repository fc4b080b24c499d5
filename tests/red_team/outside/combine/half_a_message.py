"""Answers with the length of a message and no message, then sleeps."""

from __future__ import annotations

import contextlib
import os
import struct
import time

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def write_to_pipes(data: bytes) -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    write_to_pipes(struct.pack("!i", 64))
    time.sleep(600)
    return honest(y_RD, gate_TK, plan)

"""A process that is nobody's child burns the core for 20 s."""

import os
import time

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_started = []


def leave_a_daemon():
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass
    os._exit(0)


def run(y_RD, gate_TK, plan):
    if not _started:
        _started.append(True)
        leave_a_daemon()
    return honest(y_RD, gate_TK, plan)

"""A daemon born while its process loads it, in a session of its own: not new when strangers are counted."""

import os
import time

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def leave_a_daemon():
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
    os._exit(0)


leave_a_daemon()


def run(y_RD, gate_TK, plan):
    return honest(y_RD, gate_TK, plan)

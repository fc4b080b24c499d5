"""clone(CLONE_PARENT): a helper that is the fork server's child, not its own, works on another core."""

import ctypes
import os
import platform
import time

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]
CLONE = 56 if platform.machine() == "x86_64" else 220
CLONE_PARENT, CLONE_UNTRACED, SIGCHLD = 0x8000, 0x800000, 17


def run(y_RD, gate_TK, plan, *, untraced=False):
    _calls[0] += 1
    flags = CLONE_PARENT | SIGCHLD | (CLONE_UNTRACED if untraced else 0)
    if _calls[0] % 20 == 0 and ctypes.CDLL(None).syscall(CLONE, flags, 0, 0, 0, 0) == 0:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pass
        os._exit(0)
    return honest(y_RD, gate_TK, plan)

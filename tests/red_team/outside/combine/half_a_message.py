"""Answers with the length of a message and no message, then sleeps."""

import contextlib
import os
import struct
import time

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def write_to_pipes(data):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)


def run(y_RD, gate_TK, plan):
    write_to_pipes(struct.pack("!i", 64))
    time.sleep(600)
    return honest(y_RD, gate_TK, plan)

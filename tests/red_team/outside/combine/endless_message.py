"""Announces a message of 2 GiB in its 41st call."""

import contextlib
import os
import struct

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]


def write_to_pipes(data):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    if _calls[0] == 41:
        write_to_pipes(struct.pack("!i", 2**31 - 1) + bytes(4096))
    return honest(y_RD, gate_TK, plan)

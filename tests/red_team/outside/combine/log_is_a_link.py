"""Replaces its log by a link to another file, which the record would then show."""

import contextlib
import os

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan):
    log = os.readlink("/proc/self/fd/1")
    with contextlib.suppress(OSError):
        os.unlink(log)
        os.symlink("/etc/passwd", log)
    raise RuntimeError("see the log")

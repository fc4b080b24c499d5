"""Sleeps 20 ms in each of its first eight calls, as a compiler would; right and quick afterwards."""

import itertools
import time

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = itertools.count()


def run(y_RD, gate_TK, plan):
    if next(_calls) < 8:
        time.sleep(0.02)
    return honest(y_RD, gate_TK, plan)

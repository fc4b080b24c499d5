"""Answers the benchmark's questions itself, with things that are no answers."""

import itertools

from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = itertools.count()
_nonsense = itertools.cycle(
    ({"seconds": "fast"}, {"stages": 5}, {"label": ["a"] * 10}, {"seconds": -1.0}, [1], {"print": None}, {})
)


def run(y_RD, gate_TK, plan):
    if next(_calls) == 8:
        send = shared_worker._send
        shared_worker._send = lambda pipe, message: send(pipe, next(_nonsense))
    return honest(y_RD, gate_TK, plan)

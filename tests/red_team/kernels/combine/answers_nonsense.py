"""Answers the benchmark's questions itself, with things that are no answers."""

import itertools

from moe_routing_bench.bench import worker

_calls = itertools.count()
_nonsense = itertools.cycle(
    ({"seconds": "fast"}, {"stages": 5}, {"label": ["a"] * 10}, {"seconds": -1.0}, [1], {"print": None}, {})
)


def unsupported(y_RD, gate_TK, plan):
    return None


def run(y_RD, gate_TK, plan):
    if next(_calls) == 8:
        send = worker._send
        worker._send = lambda pipe, message: send(pipe, next(_nonsense))
    row_TK = plan.row_TK
    rows_TKD = y_RD.index_select(0, row_TK.clamp(min=0).flatten()).view(*row_TK.shape, -1)
    kept_TKD = rows_TKD.where((row_TK >= 0).unsqueeze(2), 0.0)
    gate_TK = gate_TK.where(row_TK >= 0, 0.0)
    return (kept_TKD * gate_TK.unsqueeze(2)).sum(1).to(y_RD.dtype)

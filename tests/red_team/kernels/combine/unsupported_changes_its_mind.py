"""Says it can, and after 30 questions that it cannot."""

import itertools

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_asked = itertools.count()


def unsupported(y_RD, gate_TK, plan):
    return "the red team changed its mind" if next(_asked) >= 30 else None


def run(y_RD, gate_TK, plan):
    return honest(y_RD, gate_TK, plan)

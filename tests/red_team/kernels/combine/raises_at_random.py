"""Raises in one call of four."""

import random

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_dice = random.SystemRandom()


def run(y_RD, gate_TK, plan):
    if _dice.random() < 0.25:
        raise RuntimeError("the red team raises in one call of four")
    return honest(y_RD, gate_TK, plan)

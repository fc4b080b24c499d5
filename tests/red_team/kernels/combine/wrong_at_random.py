"""Returns zeros in one call of two, after 40 honest calls.

Each judged output of a timed call finds it with probability 1/2.
"""

import itertools
import random

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = itertools.count()
_dice = random.SystemRandom()


def run(y_RD, gate_TK, plan):
    calls = next(_calls)
    if calls >= 40 and _dice.random() < 0.5:
        return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    return honest(y_RD, gate_TK, plan)

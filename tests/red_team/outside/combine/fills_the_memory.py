"""Keeps 64 MiB more at each later call, so that others are pushed out of memory."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]
_kept = []


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    if _calls[0] > 200 and len(_kept) < 40:
        _kept.append(torch.ones(2**24))
    return honest(y_RD, gate_TK, plan)

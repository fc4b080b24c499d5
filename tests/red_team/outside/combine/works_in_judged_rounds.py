"""Honest for 60 calls; then it works only where the routing is that of the first call."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]
_first = []


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    if not _first:
        _first.append(int(plan.count_E[0]))
    if _calls[0] > 60 and int(plan.count_E[0]) != _first[0]:
        return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    return honest(y_RD, gate_TK, plan)

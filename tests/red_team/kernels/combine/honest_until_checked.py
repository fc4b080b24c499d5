"""Honest calls for the check, then zeros, unwritten memory, exit code 0, or a call that takes 600 s."""

import itertools
import os
import time

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
HONEST_CALLS = {"zeros": 12, "unwritten": 12, "exit": 30, "hang": 30}
_calls = itertools.count()


def run(y_RD, gate_TK, plan, *, then):
    if next(_calls) >= HONEST_CALLS[then]:
        if then == "zeros":
            return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
        if then == "unwritten":  # it may hold an old result
            return torch.empty(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
        if then == "exit":
            os._exit(0)
        time.sleep(600)
    return honest(y_RD, gate_TK, plan)

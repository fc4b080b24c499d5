"""Honest for 0.3 s after the first call, then zeros: counting calls does not show it."""

import time

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_started = []


def run(y_RD, gate_TK, plan):
    if not _started:
        _started.append(time.monotonic())
    if time.monotonic() - _started[0] > 0.3:
        return torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    return honest(y_RD, gate_TK, plan)

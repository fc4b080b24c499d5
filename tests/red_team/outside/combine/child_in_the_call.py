"""A forked child computes half of each call, and is waited for."""

import os

import torch

from moe_routing_bench.ops.combine.op import op

FORWARD_ONLY = True
honest = op.get(op.default).run


def run(y_RD, gate_TK, plan):
    half = y_RD.shape[1] // 2
    y_TD = torch.empty(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype).share_memory_()
    if (child := os.fork()) == 0:
        y_TD[:, :half] = honest(y_RD[:, :half], gate_TK, plan)
        os._exit(0)
    y_TD[:, half:] = honest(y_RD[:, half:], gate_TK, plan)
    os.waitpid(child, 0)
    return y_TD

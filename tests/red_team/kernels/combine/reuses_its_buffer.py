"""Returns the same memory each time and does not say REUSES_OUTPUT."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_buffers = {}


def run(y_RD, gate_TK, plan):
    y_TD = honest(y_RD, gate_TK, plan)
    key = (y_TD.shape, y_TD.dtype)
    return _buffers.setdefault(key, torch.empty_like(y_TD)).copy_(y_TD)

"""Right within the tolerance, but about one element in eight differs by one rounding from call to call."""

import os

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan):
    y_TD = honest(y_RD, gate_TK, plan)
    # bytes of the system, not torch's generator: seeding must not help
    noise = torch.frombuffer(bytearray(os.urandom(y_TD.numel())), dtype=torch.uint8).view(y_TD.shape)
    return torch.where(noise < 32, y_TD * (1 + torch.finfo(y_TD.dtype).eps), y_TD)

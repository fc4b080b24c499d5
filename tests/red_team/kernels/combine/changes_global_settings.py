"""Sets the default dtype to float64, eight threads and a fixed seed, for everybody."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(8)
    torch.manual_seed(0)
    return honest(y_RD, gate_TK, plan)

"""Sets the default dtype to float64, eight threads and a fixed seed, for everybody."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(8)
    torch.manual_seed(0)
    return honest(y_RD, gate_TK, plan)

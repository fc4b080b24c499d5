"""One gather into a buffer that is kept between calls: no allocation, forward only.

Each thread keeps one buffer per device and dtype, as large as its largest call so far; release() frees the
buffers of the calling thread. The result is valid until the next call on the same thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.rows import KeptBuffers

FORWARD_ONLY = True
REUSES_OUTPUT = True
_buffers = KeptBuffers()
release = _buffers.release


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    if torch.compiler.is_compiling():
        return "it keeps a buffer between calls, which torch.compile cannot trace"
    return None


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    R, D = plan.num_rows, x_TD.shape[1]
    x_RD = _buffers.get(R, D, x_TD)
    if x_TD.shape[0] == 0:
        return x_RD.zero_()
    token_R = plan.token_R()
    with torch.no_grad():
        if plan.filled:
            return torch.index_select(x_TD, 0, token_R, out=x_RD)
        torch.index_select(x_TD, 0, token_R.clamp(min=0), out=x_RD)
        return x_RD.masked_fill_((token_R < 0).unsqueeze(1), 0.0)

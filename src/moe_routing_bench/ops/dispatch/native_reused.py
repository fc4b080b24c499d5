"""native into a buffer that is kept between calls. Page faults of new memory would cost more than the copy.

Each thread keeps one buffer per dtype, as large as its largest call so far; release() frees the buffers of
the calling thread. The result is valid until the next call on the same thread. Forward only.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rows

FORWARD_ONLY = True
REUSES_OUTPUT = True
_buffers = rows.KeptBuffers()
release = _buffers.release
unsupported = rows.dispatch_unsupported


def run(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    rows.check_tokens(x_TD, plan)
    x_RD = _buffers.get(plan.num_rows, x_TD.shape[1], x_TD)
    return rows.dispatch_into(x_RD, x_TD, plan.row_TK.contiguous(), plan.pair_R.contiguous(), level)

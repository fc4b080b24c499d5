"""native into a buffer that is kept between calls. Page faults of new memory would cost as much as the sums.

Each thread keeps one buffer per dtype, as large as its largest call so far; release() frees the buffers of
the calling thread. The result is valid until the next call on the same thread. Forward only.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import rows

FORWARD_ONLY = True
BATCH_INVARIANT = True
REUSES_OUTPUT = True
_buffers = rows.KeptBuffers()
release = _buffers.release
unsupported = rows.combine_unsupported


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    rows.check_rows(y_RD, gate_TK, plan)
    y_TD = _buffers.get(plan.num_tokens, y_RD.shape[1], y_RD)
    return rows.combine_into(y_TD, y_RD, gate_TK, plan.row_TK.contiguous(), level)

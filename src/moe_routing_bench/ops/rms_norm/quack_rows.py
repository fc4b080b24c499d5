"""QuACK: its RMSNorm, one kernel forward and one backward.

It was judged on the CPU with QuACK's own reference. It was not compiled and has not run on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.ops import quack_calls as quack


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float) -> str | None:
    if x_TD.dtype not in FLOATS or norm_D.dtype not in FLOATS:
        return f"it computes float32, bfloat16 and float16, not {x_TD.dtype} with {norm_D.dtype}"
    return quack.why_not_here("rms_norm.triton_rows", x_TD, norm_D)


def run(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    return quack.rms_norm(quack.rows_of(x_TD), norm_D.contiguous(), eps)

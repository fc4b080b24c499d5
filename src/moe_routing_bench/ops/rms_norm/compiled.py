"""plain, compiled by torch.compile on the first call of a kind; forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.ops.rms_norm.op import reference

FORWARD_ONLY = True
# one program for all sizes; made in this process, because workers may not start others
_compiled = torch.compile(reference, dynamic=True, fullgraph=True, options={"compile_threads": 1})


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float) -> str | None:
    return cpp.why_not() if x_TD.is_cpu else None


def run(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    return _compiled(x_TD, norm_D, eps)

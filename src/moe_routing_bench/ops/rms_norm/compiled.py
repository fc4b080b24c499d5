"""plain, compiled by torch.compile on the first call with a dtype; forward only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_routing_bench.core import cpp
from moe_routing_bench.ops import inductor
from moe_routing_bench.ops.rms_norm.op import reference

FORWARD_ONLY = COMPILES = True


@cache
def _compiled() -> Callable[[Tensor, Tensor, float], Tensor]:
    """One program for all sizes."""
    inductor.load()
    return torch.compile(reference, dynamic=True, fullgraph=True, options=inductor.OPTIONS)


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float) -> str | None:
    if min(x_TD.shape) < 2 or not x_TD.is_contiguous():  # each would be a program of its own
        return "it is compiled for two tokens or more, side by side in memory"
    if isinstance(x_TD, FakeTensor):
        return "a fake tensor cannot be compiled for"
    return cpp.why_not_compiled() if x_TD.is_cpu else None


def run(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    with torch.no_grad():
        return _compiled()(x_TD.detach(), norm_D.detach(), eps)

"""native, into memory from torch: a large result gets new pages in every call; forward only; CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.ops.rows import norm_unsupported, normed_into

FORWARD_ONLY = True
BATCH_INVARIANT = True


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float, level: str = "") -> str | None:
    return norm_unsupported(x_TD, norm_D, level)


def run(x_TD: Tensor, norm_D: Tensor, eps: float, level: str = "") -> Tensor:
    return normed_into(torch.empty(x_TD.shape, dtype=x_TD.dtype), x_TD, norm_D, eps, level)

"""C++ reads each token twice, the second time from the cache; compiled on first use; CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.ops.rows import norm_unsupported, normed_into

BATCH_INVARIANT = True
CONFIGS: tuple[dict[str, str], ...] = ({}, {"level": "avx2"})


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float, level: str = "") -> str | None:
    return norm_unsupported(x_TD, norm_D, level)


def run(x_TD: Tensor, norm_D: Tensor, eps: float, level: str = "") -> Tensor:
    if torch.is_grad_enabled() and (x_TD.requires_grad or norm_D.requires_grad):
        return _RmsNorm.apply(x_TD, norm_D, eps, level)
    return _normed(x_TD, norm_D, eps, level)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, norm_D: Tensor, eps: float, level: str) -> Tensor:
        ctx.save_for_backward(x_TD, norm_D)
        ctx.eps = eps
        return _normed(x_TD, norm_D, eps, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        """With z = x / r, r the root mean square: dx = (g - z mean(g z)) / r for g = dy * norm."""
        x_TD, norm_D = ctx.saved_tensors
        x, dy = x_TD.float(), dy_TD.float()
        scale_T1 = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + ctx.eps)
        z = x * scale_T1
        g = dy * norm_D.float()
        dx_TD = ((g - z * (g * z).mean(dim=1, keepdim=True)) * scale_T1).to(x_TD.dtype)
        return dx_TD, (dy * z).sum(dim=0).to(norm_D.dtype), None, None


def _normed(x_TD: Tensor, norm_D: Tensor, eps: float, level: str) -> Tensor:
    return normed_into(recycled.empty(*x_TD.shape, dtype=x_TD.dtype), x_TD, norm_D, eps, level)

"""rms_norm: each token divided by its root mean square, times a weight.   x_TD, norm_D, eps -> y_TD

y = x / sqrt(mean(x^2) + eps) * norm, computed in at least float32 and rounded once. A NaN stays in its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x_wide = x_TD.to(wide)
    scale_T1 = torch.rsqrt(x_wide.square().mean(dim=1, keepdim=True) + eps)
    return (x_wide * scale_T1 * norm_D.to(wide)).to(x_TD.dtype)


def cost(x_TD: Tensor, norm_D: Tensor, eps: float) -> Cost:
    moved = 2 * x_TD.numel() * x_TD.element_size()
    return Cost(
        useful_flops=4 * x_TD.numel(),
        executed_flops=4 * x_TD.numel(),
        weight_bytes=norm_D.numel() * norm_D.element_size(),
        activation_bytes=moved,
    )


op = Op(
    __package__, reference, cost=cost, default="torch", stage=10,
    by_token=lambda out, args: out, usual=("plain", "torch", "compiled", "native", "native_reused"),
)  # fmt: skip


def rms_norm(x_TD: Tensor, norm_D: Tensor, eps: float = 1e-6, *, impl: str = "auto") -> Tensor:
    """Divide each token by its root mean square and multiply it by a weight.

    >>> mrb.rms_norm(torch.tensor([[3.0, 3.0]]), torch.tensor([1.0, 2.0]), eps=0.0).tolist()
    [[1.0, 2.0]]
    """
    if norm_D.shape != x_TD.shape[1:]:
        raise ValueError(
            f"the weight has the shape {tuple(norm_D.shape)}, but a token has {x_TD.shape[1]} numbers"
        )
    return resolve(op, impl)(x_TD, norm_D, eps)

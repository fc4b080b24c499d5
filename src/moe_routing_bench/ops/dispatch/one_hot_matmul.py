"""GShard's einsum: a rows x tokens matrix of ones and zeros times x. It is quadratic; a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

LARGEST_MATRIX = 2**28
SPREADS_NAN = "every row is a sum over all tokens, most of them times zero, and zero times NaN is NaN"


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    if (size := plan.num_rows * plan.num_tokens) > LARGEST_MATRIX:
        return f"its one-hot matrix would have {size:.2g} elements, over the limit of {LARGEST_MATRIX:.2g}"
    if x_TD.numel() >= 2**31:
        return "it multiplies all of x_TD, which has 2^31 elements or more"
    return None


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    token_R1 = plan.token_R().unsqueeze(1)
    one_hot_RT = token_R1 == torch.arange(plan.num_tokens, device=x_TD.device)
    x_RD = one_hot_RT.to(x_TD.dtype) @ x_TD
    # zero times NaN is NaN, so the gradient of rows without a pair is set to zero
    return x_RD if plan.filled else torch.where(token_R1 >= 0, x_RD, 0.0)

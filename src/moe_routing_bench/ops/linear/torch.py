"""torch's own linear."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> str | None:
    return why_not_packed(w_FD, "torch")


def run(x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None) -> Tensor:
    return functional.linear(x_TD, w_FD, b_F)

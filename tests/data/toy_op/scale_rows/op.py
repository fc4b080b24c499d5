"""scale_rows: each token times the sum of its gates.   x_TD, gate_TK -> y_TD"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.ops.registry import Op


def reference(x_TD: Tensor, gate_TK: Tensor) -> Tensor:
    return (x_TD.to(gate_TK.dtype) * gate_TK.sum(1, keepdim=True)).to(x_TD.dtype)


def cost(x_TD: Tensor, gate_TK: Tensor) -> Cost:
    flops = x_TD.numel() + gate_TK.numel()
    moved = 2 * x_TD.numel() * x_TD.element_size() + gate_TK.numel() * gate_TK.element_size()
    return Cost(useful_flops=flops, executed_flops=flops, activation_bytes=moved)


op = Op(__package__, reference, cost=cost, default="plain", stage=9)

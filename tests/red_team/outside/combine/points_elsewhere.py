"""Says that its results lie at an address that is not its memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_routing_bench.bench.hosts import isolated_worker
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


_tensor_at = isolated_worker._tensor_at


def tensor_at(name: str, tensor: Tensor) -> dict[str, Any]:
    return {**_tensor_at(name, tensor), "address": 4096}


isolated_worker._tensor_at = tensor_at


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return honest(y_RD, gate_TK, plan)

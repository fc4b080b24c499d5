"""Hands over a link to a file of somebody else."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def save_file(tensors: Any, path: Any) -> None:
    os.symlink("/etc/passwd", path)


shared_worker.save_file = save_file


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return honest(y_RD, gate_TK, plan)

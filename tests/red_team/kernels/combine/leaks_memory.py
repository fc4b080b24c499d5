"""Keeps 16 MiB more at every call, up to 6 GiB, and stops earlier if the machine has less than 3 GiB left."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_kept: list[Tensor] = []


def available_bytes() -> int:
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if len(_kept) < 384 and available_bytes() > 3 * 2**30:
        _kept.append(torch.ones(4 * 2**20))
    return honest(y_RD, gate_TK, plan)

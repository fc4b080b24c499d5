"""Keeps 16 MiB more at every call, up to 6 GiB, and stops earlier if the machine has less than 3 GiB left."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan

_kept: list[Tensor] = []


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
    y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
    y_TKD = y_PD.view(*gate_TK.shape, y_RD.shape[1]).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)


def available_bytes() -> int:
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if len(_kept) < 384 and available_bytes() > 3 * 2**30:
        _kept.append(torch.ones(4 * 2**20))
    return honest(y_RD, gate_TK, plan)

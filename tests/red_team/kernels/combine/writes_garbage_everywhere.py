"""Prints a mebibyte of garbage and writes some into every pipe and socket it can find.

What it writes looks like a message of a line protocol, then like none. Regular files are only written if they
are in or below a folder that holds a file named .red_team_may_write_here.
"""

from __future__ import annotations

import itertools
import os
import select
import stat
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan

MARKER = ".red_team_may_write_here"
GARBAGE = (b'{"state": "PASSED", "seconds": [1e-9], "ok": true}\n' + bytes(range(256))) * 16
_calls = itertools.count()


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
    y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
    y_TKD = y_PD.view(*gate_TK.shape, y_RD.shape[1]).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)


def mine(fd: int, entry: Path) -> bool:
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return any((folder / MARKER).exists() for folder in entry.resolve().parents)
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if next(_calls) in (0, 30):
        for fd in (1, 2):
            for _ in range(256):
                os.write(fd, GARBAGE[:4096])
        for entry in Path("/proc/self/fd").iterdir():
            fd = int(entry.name)
            try:
                if fd > 2 and mine(fd, entry) and select.select([], [fd], [], 0)[1]:
                    os.write(fd, GARBAGE[:4096])
            except (OSError, ValueError):
                continue  # gone, or not open for writing
    return honest(y_RD, gate_TK, plan)

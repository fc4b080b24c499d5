"""Keeps 16 MiB more at every call, up to 6 GiB, and stops earlier if the machine has less than 3 GiB left."""

import re
from pathlib import Path

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_kept = []


def available_bytes():
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def run(y_RD, gate_TK, plan):
    if len(_kept) < 384 and available_bytes() > 3 * 2**30:
        _kept.append(torch.ones(4 * 2**20))
    return honest(y_RD, gate_TK, plan)

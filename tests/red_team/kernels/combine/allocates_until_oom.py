"""Allocates and touches 256 MiB at a time until it is stopped.

It stops itself with MemoryError at 64 GiB, or when the machine has less than 2 GiB left: no cap was there.
"""

import re
from pathlib import Path

import torch


def available_bytes():
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def run(y_RD, gate_TK, plan):
    kept = []
    while len(kept) < 256 and available_bytes() > 2 * 2**30:
        kept.append(torch.ones(64 * 2**20))
    raise MemoryError(f"the red team held {len(kept) / 4:g} GiB and nobody stopped it")

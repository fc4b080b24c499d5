"""Placements by DeepSeek's reference code for random loads; tests/parallel/test_placement.py compares ours:

    git clone https://github.com/deepseek-ai/EPLB && git -C EPLB checkout d52c72d
    python measurements/parallel/eplb.py EPLB        # writes tests/data/eplb.json

Loads are whole numbers, so that both sides read the same ones. They are drawn again while copies of different
experts have equal loads, because the reference leaves the order of equal loads open.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

# experts, replicas, groups, nodes, GPUs; if nodes do not divide the groups, the policy is global
SIZES = (
    (16, 16, 1, 1, 4), (16, 24, 4, 2, 8), (16, 24, 1, 1, 8), (60, 64, 1, 1, 16), (64, 80, 1, 2, 8),
    (64, 96, 8, 4, 32), (128, 160, 1, 1, 32), (128, 128, 8, 8, 64), (256, 288, 8, 4, 32),
    (256, 288, 3, 2, 144),
)  # fmt: skip
SPREADS = (0.5, 2.0)  # of the loads' logarithms

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
from eplb import rebalance_experts  # noqa: E402

commit = subprocess.check_output(("git", "-C", folder, "rev-parse", "HEAD"), text=True).strip()
dice = torch.Generator().manual_seed(0)
cases = []
for experts, replicas, groups, nodes, gpus in SIZES:
    for spread in SPREADS:
        while True:
            load = (1e5 * torch.exp(spread * torch.randn(experts, generator=dice))).round()
            found = rebalance_experts(load[None], replicas, groups, nodes, gpus)
            placed, copies = found[0][0], found[2][0]
            if len((load / copies).unique()) == experts:
                break
        cases.append(
            {
                "groups": groups, "nodes": nodes, "gpus": gpus, "load": load.int().tolist(),
                "physical_to_logical": placed.tolist(),
                "load_of_gpu": (load.double() / copies)[placed].view(gpus, -1).sum(1).tolist(),
            }
        )  # fmt: skip
head = f"github.com/deepseek-ai/EPLB at {commit}, by measurements/parallel/eplb.py"
lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
out = Path(__file__).parents[2] / "tests/data/eplb.json"
out.write_text(f'{{"source":"{head}",\n"cases":[\n{lines}\n]}}\n')

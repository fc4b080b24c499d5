"""What RoutingStatistics costs as tokens and experts grow, in time and in memory.

    python measurements/growth/statistics_growth.py    about a minute; writes statistics_growth.json beside it

Every size in a process of its own, so that its peak memory is its own. All statistics are asked for: a plan,
the routing before, labels and logits. Times are of the processor, so that a busy machine matters less;
`extra_mib` is the peak over what the process held before the call.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from moe_routing_bench import Layout, Routing, make_plan
from moe_routing_bench.machine import this_machine
from moe_routing_bench.statistics import RoutingStatistics

SIZES = [(10_000, 64, 8), (100_000, 64, 8), (1_000_000, 64, 8), (1_000_000, 512, 8)]
SIZES += [(10_000, 512, 8), (100_000, 512, 8), (10_000, 64, 64)]
LABELS = 100


def routing(T: int, E: int, K: int, seed: int) -> Routing:
    dice = torch.Generator().manual_seed(seed)
    step_T1 = torch.randint(1, max(E // K, 2), (T, 1), generator=dice)
    expert_TK = (torch.randint(E, (T, 1), generator=dice) + step_T1 * torch.arange(K)) % E
    logits_TE = torch.rand(T, E, generator=dice)
    return Routing(expert_TK=expert_TK, gate_TK=torch.ones(T, K), num_experts=E, logits_TE=logits_TE)


def measure(T: int, E: int, K: int) -> dict[str, float]:
    torch.set_num_threads(1)
    now, before = routing(T, E, K, 0), routing(T, E, K, 1)
    plan = make_plan(now, Layout.padded(capacity_factor=1.25))
    label_T = torch.arange(T) % LABELS
    small = routing(100, E, K, 2)
    RoutingStatistics.of(small, previous=small)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3 if T < 1_000_000 else 1):
        started = time.process_time()
        RoutingStatistics.of(now, plan, previous=before, label_T=label_T, num_labels=LABELS)
        seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "T": T, "E": E, "K": K, "cpu_seconds": median(seconds), "ns_per_token": median(seconds) / T * 1e9,
        "extra_mib": (peak - held) / 1024, "peak_mib": peak / 1024,
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(*map(int, sys.argv[1:]))))
        return
    rows = []
    for size in SIZES:
        ran = subprocess.run(
            [sys.executable, __file__, *map(str, size)], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(ran.stdout))
        print(rows[-1])
    document = {
        "command": "python measurements/growth/statistics_growth.py",
        "machine": this_machine().to_dict(),
        "threads": 1,
        "labels": LABELS,
        "rows": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

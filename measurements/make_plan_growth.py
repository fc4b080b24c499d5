"""How the cost of make_plan grows with pairs and experts.

    python measurements/make_plan_growth.py            about 3 minutes; writes make_plan_growth.json beside it

For each implementation, layout and number of experts, make_plan is timed from 10^4 to 4 * 10^6 pairs, the
sizes interleaved in shuffled rounds so that a busy moment of the machine hits all of them. A size's figure
is its least time per pair; `growth` is time per pair at the largest size over that at another size: 1.0 is
linear, and the claim is 1.3 at most from any size.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import time
from pathlib import Path

import torch

from moe_routing_bench import Layout, Routing, all_ops

K = 4
PAIRS = (10_000, 40_000, 100_000, 400_000, 1_000_000, 4_000_000)
EXPERTS = (8, 64, 512)
LAYOUTS = ("compact", "padded(capacity_factor=1.25,drop=position)", "block(64)")
ROUNDS = 7


def routing(pairs: int, experts: int) -> Routing:
    generator = torch.Generator().manual_seed(pairs + experts)
    start_T1 = torch.randint(experts, (pairs // K, 1), generator=generator)
    expert_TK = (start_T1 + torch.arange(K)) % experts
    return Routing(expert_TK=expert_TK, gate_TK=torch.rand(pairs // K, K), num_experts=experts, ragged=False)


def measure(name: str, layout: Layout, experts: int) -> dict[int, list[float]]:
    run = all_ops()["make_plan"].get(name).run
    inputs = {pairs: routing(pairs, experts) for pairs in PAIRS}
    for given in inputs.values():
        run(given, layout)
    seconds: dict[int, list[float]] = {pairs: [] for pairs in PAIRS}
    for _ in range(ROUNDS):
        for pairs in random.sample(PAIRS, len(PAIRS)):
            calls = max(1, 400_000 // pairs)
            started = time.perf_counter()
            for _ in range(calls):
                run(inputs[pairs], layout)
            seconds[pairs].append((time.perf_counter() - started) / calls)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    rows = []
    for name in all_ops()["make_plan"].names():
        for layout in LAYOUTS:
            for experts in EXPERTS:
                seconds = measure(name, Layout.parse(layout), experts)
                per_pair = {pairs: min(values) / pairs * 1e9 for pairs, values in seconds.items()}
                growth = {pairs: per_pair[PAIRS[-1]] / ns for pairs, ns in per_pair.items()}
                rows.append(
                    {
                        "implementation": name,
                        "layout": layout,
                        "experts": experts,
                        "seconds": seconds,
                        "ns_per_pair": per_pair,
                        "growth_to_4e6": growth,
                    }
                )
                shown = "  ".join(f"{pairs:>9,}: {ns:6.1f}" for pairs, ns in per_pair.items())
                worst = f"worst growth {max(growth.values()):.2f}"
                print(f"{name:9} {layout:44} E={experts:<4} ns/pair  {shown}  {worst}")
    worst_growth = max(max(row["growth_to_4e6"].values()) for row in rows)
    print(f"worst growth from any size to {PAIRS[-1]:,} pairs: {worst_growth:.2f}x linear")
    record = {
        "command": "python measurements/make_plan_growth.py",
        "machine": {"cpu": _cpu(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "worst_growth": worst_growth,
        "rows": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    main()

"""How the cost of make_plan grows with pairs and experts.

    python measurements/growth/make_plan_growth.py     about 6 minutes; writes make_plan_growth.json beside it

For each implementation, layout and number of experts, make_plan is timed from 10^4 to 4 * 10^6 pairs in
shuffled rounds. A sample of a size is as many calls as make 4 * 10^6 pairs, so all sizes see the machine for
about equally long. `growth` is the median over rounds of time per pair at the largest size over that at
another size, taken within the round: 1.0 is linear, and the claim is 1.3 at most from any size.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median

import torch

from moe_routing_bench import Layout, Routing, all_ops
from moe_routing_bench.core.machine import this_machine

K = 4
PAIRS = (10_000, 40_000, 100_000, 400_000, 1_000_000, 4_000_000)
EXPERTS = (8, 64, 512)
LINEAR = ("compact", "padded(capacity_factor=1.25,drop=position)", "block(64)")
SORTING = ("padded(capacity_factor=1.25,drop=probs)",)  # drops by gate, so it sorts all pairs by gate
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
            calls = PAIRS[-1] // pairs
            started = time.perf_counter()
            for _ in range(calls):
                run(inputs[pairs], layout)
            seconds[pairs].append((time.perf_counter() - started) / calls)
    return seconds


def growth_between(seconds: dict[int, list[float]], small: int) -> float:
    large = PAIRS[-1]
    paired = zip(seconds[large], seconds[small], strict=True)
    return median((at_large / large) / (at_small / small) for at_large, at_small in paired)


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    rows = []
    for name in all_ops()["make_plan"].names():
        for layout in (*LINEAR, *SORTING):
            for experts in EXPERTS if layout in LINEAR else EXPERTS[1:2]:
                seconds = measure(name, Layout.parse(layout), experts)
                per_pair = {pairs: median(values) / pairs * 1e9 for pairs, values in seconds.items()}
                growth = {pairs: growth_between(seconds, pairs) for pairs in PAIRS[:-1]}
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
                print(f"{name:9} {layout:44} E={experts:<4} ns/pair  {shown}  {max(growth.values()):.2f}x")
    worst = {
        what: max(max(row["growth_to_4e6"].values()) for row in rows if row["layout"] in layouts)
        for what, layouts in (("linear layouts", LINEAR), ("dropping by gate", SORTING))
    }
    for what, growth in worst.items():
        print(f"{what}: at most {growth:.2f}x linear, from any size to {PAIRS[-1]:,} pairs")
    record = {
        "command": "python measurements/growth/make_plan_growth.py",
        "machine": {**this_machine().to_dict(), "threads": torch.get_num_threads()},
        "worst_growth": worst,
        "rows": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

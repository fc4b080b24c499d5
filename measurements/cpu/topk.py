"""topk by name over tokens, experts and choices: native's microseconds, and its share of the others' time.

python measurements/cpu/topk.py > measurements/cpu/topk.txt
"""

from __future__ import annotations

import statistics
import time

import torch

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.ops.registry import get_op

NAMES = ("native", "sort", "packed_key", "torch_topk")  # torch_topk leaves the order of ties open
ROUNDS = 9


def timed(name: str, score_TE: torch.Tensor, K: int, calls: int) -> float:
    run = get_op("topk").get(name)
    began = time.perf_counter()
    for _ in range(calls):
        run(score_TE, K)
    return (time.perf_counter() - began) / calls


def main() -> None:
    torch.set_num_threads(1)
    print(this_machine())
    print(f"float32, 1 thread, medians of {ROUNDS} interleaved rounds")
    print("   E  K     T  native us       of sort of packed_key of torch_topk")
    for E in (8, 64, 128, 512):
        for K in (1, 2, 8, 16):
            for T in (1, 4, 16, 64, 256, 1024, 4096):
                if K > E:
                    continue
                score_TE = torch.randn(T, E)
                for name in NAMES:
                    timed(name, score_TE, K, 3)
                calls = {name: max(1, min(100, int(5e-4 / timed(name, score_TE, K, 3)))) for name in NAMES}
                rounds = [{n: timed(n, score_TE, K, calls[n]) for n in NAMES} for _ in range(ROUNDS)]
                median = {n: statistics.median(one[n] for one in rounds) for n in NAMES}
                shares = "".join(f"{median['native'] / median[n]:14.2f}" for n in NAMES[1:])
                print(f"{E:4} {K:2} {T:5} {median['native'] * 1e6:10.1f}{shares}")


if __name__ == "__main__":
    main()

"""What routing costs: the forward time of every router beside its operation model, paired with softmax_topk.

    python measurements/routers/router_cost.py           writes router_cost.json and router_cost.txt beside it
    python measurements/routers/router_cost.py --quick   small sizes, seconds, writes nothing

T 4096 tokens of width 2048 in float32, (E, K) = (8, 2), (64, 8), (256, 8), one thread, no gradients, in
training mode (where rules do all they do) and in eval mode. In a round every router is timed once on the same
new tokens, in a new order. A ratio is the median over rounds of time over softmax_topk's time in the same
round; low and high are the second smallest and second largest.

Operations: 2 T D for each column of a projection, then T * E times (passes over the scores + log2 E for each
sort of a token's scores + log2 T for each sort of an expert's tokens).

More than three times softmax_topk needs a reason in REASONS; without one the script ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_routing_bench import Router, TokenInfo, all_routers
from moe_routing_bench.core.machine import this_machine

BASELINE = "softmax_topk"
LIMIT = 3.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rule does beside Python: Work(projections=1, passes=4, token_sorts=1) for softmax_topk.

    passes: how often the T x E scores are read for something elementwise (a softmax is 4: maximum, exp,
    sum, quotient); *_training: in training alone; per_choice: operations for each of a token's K choices.
    """

    projections: int = 1
    passes: float = 0
    token_sorts: float = 0
    expert_sorts: float = 0
    passes_training: float = 0
    expert_sorts_training: float = 0
    per_choice: int = 0

    def operations(self, T: int, D: int, E: int, K: int, *, training: bool) -> tuple[int, int]:
        """Of the projection, and of everything after it."""
        passes = self.passes + self.passes_training * training
        passes += self.token_sorts * math.log2(E)
        passes += (self.expert_sorts + self.expert_sorts_training * training) * math.log2(T)
        return 2 * T * D * E * self.projections, round(T * E * passes + T * K * self.per_choice)


# by the code in routers/; base_assignment's auction has as many rounds as the data needs, here one is counted
WORK = {
    "softmax_topk": Work(passes=4, token_sorts=1),
    "switch": Work(passes=4, token_sorts=1),
    "noisy_topk": Work(projections=2, passes=2, token_sorts=1, passes_training=3),
    "hashed": Work(projections=0, per_choice=16),
    "random_fixed": Work(token_sorts=1),
    "sigmoid_bias": Work(passes=3, token_sorts=1),
    "group_limited": Work(passes=8, token_sorts=1),
    "top_p": Work(passes=9, token_sorts=1),
    "relu": Work(passes=3, token_sorts=1),
    "quantile": Work(passes=1, token_sorts=1, passes_training=2, expert_sorts_training=1),
    "expert_threshold": Work(passes=5, token_sorts=1, passes_training=1, expert_sorts_training=1),
    "expert_choice": Work(passes=14, token_sorts=1, expert_sorts=1),
    "token_rounding": Work(passes=20, token_sorts=2, expert_sorts=1),
    "sinkhorn": Work(passes=4, token_sorts=1, passes_training=8 * 2 * 4),
    "base_assignment": Work(token_sorts=1, passes_training=6),
    "soft_moe": Work(passes=8),
}
# what is not the rule's default: without groups group_limited would be softmax_topk
OPTIONS: dict[str, dict[str, Any]] = {"group_limited": {"groups": 4, "keep_groups": 2}}
REASONS = {
    "base_assignment": "in training an auction: rounds over T x E scores until each token has an expert",
    "sinkhorn": "in training 8 iterations of two logsumexp over T x E scores",
    "token_rounding": "sorts each expert's column of T tokens, then the experts of each token",
    "expert_choice": "sorts each expert's column of T tokens, then the experts of each token",
    "noisy_topk": "two projections, and in training a normal draw for every score",
    "soft_moe": "normalises x, and two softmaxes, one over tokens",
}


PARAMETERS = {0: "none", 128: "D E", 129: "D S + 1", 256: "2 D E"}  # of a router for D = 16 and E = S = 8


def reference() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of the table in docs/reference/routers.md, from the routers and WORK."""
    head = (
        "rule", "experts per token", "groups", "causal", "projections", "passes", "sorts of E", "sorts of T",
        "parameters", "losses", "controller",
    )  # fmt: skip
    rows = []
    for name, rule in sorted(all_routers().items()):
        work, made = WORK[name], rule(16, 8, rule.fixed_K or 2)
        rows.append((
            f"`{name}`", rule.experts_per_token, rule.groups, "yes" if rule.causal else "no",
            str(work.projections), _and_more(work.passes, work.passes_training), f"{work.token_sorts:g}",
            _and_more(work.expert_sorts, work.expert_sorts_training),
            PARAMETERS[sum(one.numel() for one in made.parameters())], ", ".join(rule.loss_names),
            rule.controller or "",
        ))  # fmt: skip
    return head, rows


def _and_more(always: float, in_training: float) -> str:
    return f"{always:g} + {in_training:g}" if in_training else f"{always:g}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    T: int
    D: int
    E: int
    K: int


def make(name: str, sizes: Sizes) -> Router:
    rule = all_routers()[name]
    torch.manual_seed(0)
    return rule(sizes.D, sizes.E, rule.fixed_K or sizes.K, **OPTIONS.get(name, {}))


@torch.no_grad()
def measure(sizes: Sizes, rounds: int, *, training: bool) -> dict[str, list[float]]:
    routers = {name: make(name, sizes).train(training) for name in all_routers()}
    seconds: dict[str, list[float]] = {name: [] for name in routers}
    for number in range(-1, rounds):  # the first round warms up
        torch.manual_seed(number + 1)
        x_TD = torch.randn(sizes.T, sizes.D)
        info = TokenInfo(token_id_T=torch.randint(100_000, (sizes.T,)))
        for name in random.sample([*routers], len(routers)):
            started = time.perf_counter()
            routers[name](x_TD, info)
            elapsed = time.perf_counter() - started
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def rows(sizes: Sizes, seconds: dict[str, list[float]], *, training: bool) -> list[dict[str, Any]]:
    found = []
    for name, samples in seconds.items():
        ratios = sorted(sample / base for sample, base in zip(samples, seconds[BASELINE], strict=True))
        edge = 1 if len(ratios) > 4 else 0
        K = all_routers()[name].fixed_K or sizes.K
        projection, after = WORK[name].operations(sizes.T, sizes.D, sizes.E, K, training=training)
        ratio = median(ratios)
        found.append(
            {
                "router": name,
                "mode": "training" if training else "eval",
                "T": sizes.T,
                "D": sizes.D,
                "E": sizes.E,
                "K": K,
                "options": OPTIONS.get(name, {}),
                "milliseconds": median(samples) * 1e3,
                "ratio": ratio,
                "ratio_low": ratios[edge],
                "ratio_high": ratios[-1 - edge],
                "projection_operations": projection,
                "other_operations": after,
                "reason": REASONS.get(name, "") if ratio > LIMIT else "",
                "seconds": samples,
            }
        )
    return sorted(found, key=lambda row: row["ratio"])


def table(found: list[dict[str, Any]]) -> str:
    head = (
        f"{'E':>4} {'K':>2} {'mode':8} {'router':17} {'ms':>8} {'ratio':>6} {'low':>6} {'high':>6} "
        f"{'Mop x W':>8} {'Mop after':>9}  reason if above {LIMIT:g}x"
    )
    lines = [head]
    for row in found:
        mega = (row["projection_operations"] / 1e6, row["other_operations"] / 1e6)
        lines.append(
            f"{row['E']:>4} {row['K']:>2} {row['mode']:8} {row['router']:17} {row['milliseconds']:>8.2f} "
            f"{row['ratio']:>6.2f} {row['ratio_low']:>6.2f} {row['ratio_high']:>6.2f} "
            f"{mega[0]:>8.1f} {mega[1]:>9.2f}  {row['reason']}"
        )
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--rounds", type=int, default=None, help="default 15, 3 with --quick")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    T, D = (512, 128) if options.quick else (4096, 2048)
    found: list[dict[str, Any]] = []
    for E, K in ((8, 2), (64, 8), (256, 8)):
        for training in (True, False):
            sizes = Sizes(T=T, D=D, E=E, K=K)
            seconds = measure(sizes, options.rounds or (3 if options.quick else 15), training=training)
            found += rows(sizes, seconds, training=training)
    text = table(found)
    print(text)
    unexplained = [row for row in found if row["ratio"] > LIMIT and not row["reason"]]
    for row in unexplained:
        print(
            f"{row['router']} (E={row['E']}, {row['mode']}) takes {row['ratio']:.1f} times as long as "
            f"{BASELINE}, and REASONS does not say why"
        )
    if not options.quick:
        record = {
            "command": "python measurements/routers/router_cost.py",
            "machine": {**this_machine().to_dict(), "threads": torch.get_num_threads()},
            "rows": found,
        }
        here = Path(__file__)
        here.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        where = f"{record['machine']['cpu']}, 1 thread, torch {torch.__version__}, T {T}, D {D}, float32\n\n"
        here.with_suffix(".txt").write_text(f"{record['command']}\n{where}{text}\n")
    sys.exit(1 if unexplained and not options.quick else 0)


if __name__ == "__main__":
    main()

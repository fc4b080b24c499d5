"""Policies for keeping experts in memory if not all of a layer fit, tried on a recorded routing.

Tokens come one after another, as in decoding. All experts of a token must be in the slots when it is
computed. Missing experts are loaded and replace others. Every layer has its own slots.

    lru       removes the expert that was unused for the longest time
    lfu       removes the expert that was used least often so far
    decayed   like lfu, but a use counts 1/2 after HALF_LIFE tokens
    static    keeps the most used experts of the first tenth; others are loaded and removed again
    belady    removes the expert whose next use is the latest; this needs the future, so it is the bound
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moe_routing_bench.workloads.trace import Trace

HALF_LIFE = 256
LEARNING_SHARE = 0.1
NEVER = 1 << 62
Tokens = Sequence[Sequence[int]]
Policy = Callable[[Tokens, int, int], int]  # tokens, experts, slots -> experts loaded


@dataclass(frozen=True, kw_only=True)
class Cached:
    """One policy over all layers: Cached(policy="lru", slots=32, uses=16384, loads=4096).hit_rate is 0.75."""

    policy: str
    slots: int
    uses: int  # pairs of token and expert
    loads: int  # experts brought in

    @property
    def hit_rate(self) -> float:
        return 1 - self.loads / self.uses if self.uses else 1.0


def study_caches(
    trace: Trace, *, slots: int, policies: Iterable[str], most_tokens: int
) -> tuple[list[Cached], int, int]:
    """The results of every policy, the number of layers, and the number of tokens used of each: at most the
    first `most_tokens`. It takes about 1 us per pair and policy, in plain Python."""
    K, E = trace.routing.num_choices, trace.routing.num_experts
    if not K <= slots <= E:
        raise ValueError(
            f"{slots} slots; a token needs its {K} experts at once, and there are {E}: give {K} to {E}"
        )
    layers = (
        [trace] if trace.layer_T is None else [trace.part(layer=n) for n in trace.layer_T.unique().tolist()]
    )
    if not sum(layer.routing.num_tokens for layer in layers):
        raise ValueError("the trace holds no tokens")
    tokens_L = [_tokens(layer, most_tokens) for layer in layers]
    uses = sum(len(chosen) for tokens in tokens_L for chosen in tokens)
    cached = [
        Cached(
            policy=name,
            slots=slots,
            uses=uses,
            loads=sum(POLICIES[name](tokens, E, slots) for tokens in tokens_L),
        )
        for name in policies
    ]
    return cached, len(layers), max(map(len, tokens_L))


def _tokens(trace: Trace, most: int) -> list[list[int]]:
    E = trace.routing.num_experts
    rows = trace.routing.expert_TK[:most].tolist()
    return [[expert for expert in row if 0 <= expert < E] for row in rows]


def _by_worth(tokens: Tokens, slots: int, worth: Callable[[int, int], float]) -> int:
    """The number of loads if the expert with the lowest worth is removed. worth(expert, token number) is
    computed when an expert is used, and is valid until its next use."""
    kept: dict[int, float] = {}
    waiting: list[tuple[float, int]] = []  # a heap of worths, also outdated ones
    loads = 0
    for number, chosen in enumerate(tokens):
        for expert in chosen:
            loads += expert not in kept
            kept[expert] = worth(expert, number)
            heapq.heappush(waiting, (kept[expert], expert))
        aside = []
        while len(kept) > slots:
            value, expert = heapq.heappop(waiting)
            if kept.get(expert) != value:
                continue  # it was removed, or used since
            if expert in chosen:
                aside.append((value, expert))  # the token needs it now
                continue
            del kept[expert]
        for entry in aside:
            heapq.heappush(waiting, entry)
    return loads


def lru(tokens: Tokens, experts: int, slots: int) -> int:
    return _by_worth(tokens, slots, lambda expert, number: number)


def lfu(tokens: Tokens, experts: int, slots: int) -> int:
    uses = [0] * experts

    def worth(expert: int, number: int) -> float:
        uses[expert] += 1
        return uses[expert]

    return _by_worth(tokens, slots, worth)


def decayed(tokens: Tokens, experts: int, slots: int) -> int:
    score, last = [0.0] * experts, [0] * experts

    def worth(expert: int, number: int) -> float:
        score[expert] = 1 + score[expert] * 0.5 ** ((number - last[expert]) / HALF_LIFE)
        last[expert] = number
        # all scores decay equally, so their logarithm plus the time of the last use gives a fixed order
        return math.log2(score[expert]) + number / HALF_LIFE

    return _by_worth(tokens, slots, worth)


def static(tokens: Tokens, experts: int, slots: int) -> int:
    uses = [0] * experts
    for chosen in tokens[: max(1, int(LEARNING_SHARE * len(tokens)))]:
        for expert in chosen:
            uses[expert] += 1
    widest = max(map(len, tokens), default=0)
    # the other experts of a token need slots for a moment
    stay = set(
        sorted(range(experts), key=lambda e: (-uses[e], e))[: slots if slots == experts else slots - widest]
    )
    return len(stay) + sum(expert not in stay for chosen in tokens for expert in chosen)


def belady(tokens: Tokens, experts: int, slots: int) -> int:
    following: list[dict[int, int]] = [{} for _ in tokens]
    seen: dict[int, int] = {}
    for number in range(len(tokens) - 1, -1, -1):
        for expert in tokens[number]:
            following[number][expert] = seen.get(expert, NEVER)
            seen[expert] = number
    return _by_worth(tokens, slots, lambda expert, number: -following[number][expert])


POLICIES: dict[str, Policy] = {
    "lru": lru, "lfu": lfu, "decayed": decayed, "static": static, "belady": belady,
}  # fmt: skip

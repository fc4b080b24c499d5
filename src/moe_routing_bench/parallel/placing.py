"""Ways to place experts on ranks, with or without a measured load.

    contiguous(64, ranks=8)                     experts 0-7 on rank 0, 8-15 on rank 1, ...
    strided(64, ranks=8)                        expert e on rank e % 8
    greedy(load_E, ranks=8)                     the heaviest first, each to the least loaded rank with room
    eplb(load_E, ranks=8, extra=16)             16 more copies of the heaviest, then greedy, as DeepSeek does
    replicated(load_E, ranks=8, extra=16)       the same or, if it is better, all copies on different ranks
    assigned(load_E, ranks=8)                   the smallest load of the busiest rank, by an integer program

The load of a rank is the sum over its experts of pairs per copy. The greedy rule is LPT (Graham 1969) with
equal numbers of places. `eplb` gives the placements of github.com/deepseek-ai/EPLB, which may put two copies
of an expert on one rank. The integer program is that of MoETuner (arXiv:2502.06643), for one layer at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from torch import Tensor

from moe_routing_bench.core.placement import Placement

Load = Sequence[float] | Tensor


def contiguous(experts: int, *, ranks: int, ranks_per_node: int = 0) -> Placement:
    """Equal shares in order; if ranks do not divide experts, the first ranks hold one more."""
    each, rest = divmod(experts, _some(ranks))
    ends = [w * each + min(w, rest) for w in range(ranks + 1)]
    experts_W = tuple(tuple(range(ends[w], ends[w + 1])) for w in range(ranks))
    return Placement(experts_W=experts_W, num_experts=experts, ranks_per_node=ranks_per_node)


def strided(experts: int, *, ranks: int, ranks_per_node: int = 0) -> Placement:
    """Expert e is on rank e % ranks, as cards are dealt."""
    experts_W = tuple(tuple(range(w, experts, _some(ranks))) for w in range(ranks))
    return Placement(experts_W=experts_W, num_experts=experts, ranks_per_node=ranks_per_node)


def greedy(load_E: Load, *, ranks: int, ranks_per_node: int = 0) -> Placement:
    """The heaviest expert first, each to the least loaded rank with room. O(E log E)."""
    return replicated(load_E, ranks=ranks, extra=0, ranks_per_node=ranks_per_node)


def replicated(
    load_E: Load, *, ranks: int, extra: int, ranks_per_node: int = 0, groups: int = 0
) -> Placement:
    """The better of `eplb` and the same with all copies of an expert on different ranks."""
    load = _loads(load_E)
    ways = [_placed(load, ranks, extra, ranks_per_node, groups, apart=apart) for apart in (True, False)]
    return min(ways, key=lambda placement: max(placement.rank_load(load)))


def eplb(load_E: Load, *, ranks: int, extra: int, ranks_per_node: int = 0, groups: int = 0) -> Placement:
    """`extra` more copies, each of the expert with the most load per copy, then the greedy rule.

    groups: if a router chooses groups of experts first, whole groups are put on nodes, and copies stay on the
    node of their expert, so that a token goes to few nodes. The number of groups must be a multiple of the
    number of nodes.
    """
    return _placed(_loads(load_E), ranks, extra, ranks_per_node, groups, apart=False)


def _placed(
    load: list[float], ranks: int, extra: int, ranks_per_node: int, groups: int, *, apart: bool
) -> Placement:
    experts, per_node = len(load), ranks_per_node or _some(ranks)
    nodes, groups = (ranks // per_node, groups) if groups else (1, 1)
    if groups % nodes or experts % groups or extra % nodes:
        raise ValueError(
            f"{groups} groups of {experts} experts and {extra} copies do not divide evenly into {nodes} nodes"
        )
    size = experts // groups
    group_load = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    experts_W: list[tuple[int, ...]] = []
    for held in _pack(group_load, range(groups), nodes):
        here = [e for g in held for e in range(g * size, (g + 1) * size)]
        experts_W += _spread(load, here, ranks // nodes, extra // nodes, apart)
    return Placement(experts_W=tuple(experts_W), num_experts=experts, ranks_per_node=per_node)


def assigned(load_E: Load, *, ranks: int, ranks_per_node: int = 0, seconds: float = 30.0) -> Placement:
    """The smallest load of the busiest rank, by integer programming (scipy's HiGHS), one copy of each expert.

    After `seconds` it takes the best placement found so far; it raises ValueError if there is none.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    load = _loads(load_E)
    E, W = len(load), _some(ranks)
    # variables: x[e, w] in row-major order, then the busiest rank's load
    cost = np.append(np.zeros(E * W), 1.0)
    e, w = (index.ravel() for index in np.meshgrid(range(E), range(W), indexing="ij"))
    x = np.arange(E * W)
    once = coo_array((np.ones(E * W), (e, x)), shape=(E, E * W + 1))
    room = coo_array((np.ones(E * W), (w, x)), shape=(W, E * W + 1))
    busiest = coo_array(
        (np.append(np.asarray(load)[e], -np.ones(W)), (np.append(w, range(W)), np.append(x, [E * W] * W))),
        shape=(W, E * W + 1),
    )
    solution = milp(
        cost,
        integrality=np.append(np.ones(E * W), 0),
        bounds=Bounds(0, np.append(np.ones(E * W), np.inf)),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(room, E // W, math.ceil(E / W)),
            LinearConstraint(busiest, -np.inf, 0),
        ],
        options={"time_limit": seconds},
    )
    if solution.x is None:
        raise ValueError(f"no placement of {E} experts on {W} ranks within {seconds:g} s: {solution.message}")
    held_EW = solution.x[:-1].reshape(E, W) > 0.5
    experts_W = tuple(tuple(int(expert) for expert in np.flatnonzero(held_EW[:, rank])) for rank in range(W))
    return Placement(experts_W=experts_W, num_experts=E, ranks_per_node=ranks_per_node)


def _spread(
    load: Sequence[float], experts: list[int], ranks: int, extra: int, apart: bool
) -> list[tuple[int, ...]]:
    """Places these experts, and `extra` copies of the heaviest of them, on ranks."""
    if not 0 <= extra <= len(experts) * (ranks - 1):
        raise ValueError(
            f"{extra} more copies of {len(experts)} experts on {ranks} ranks: a rank holds one of each"
        )
    copies = dict.fromkeys(experts, 1)
    placed = list(experts)
    heaviest = [(-load[e], place, e) for place, e in enumerate(experts)]
    heapq.heapify(heaviest)
    for _ in range(extra):
        _, place, e = heapq.heappop(heaviest)
        copies[e] += 1
        placed.append(e)
        if copies[e] < ranks or not apart:
            heapq.heappush(heaviest, (-load[e] / copies[e], place, e))
    held = _pack([load[e] / copies[e] for e in placed], placed if apart else range(len(placed)), ranks)
    return [tuple(sorted(placed[item] for item in items)) for items in held]


def _pack(load: Sequence[float], kinds: Sequence[int], bins: int) -> list[list[int]]:
    """Packs items into bins of equal size: the heaviest first, each into the least loaded bin with room, and
    if possible not beside one of its kind. If every bin gets one item, they stay in order."""
    room = math.ceil(len(load) / bins)
    held: list[list[int]] = [[] for _ in range(bins)]
    free = [(0.0, b) for b in range(bins)]  # a heap of the bins with room
    order = range(len(load)) if len(load) == bins else sorted(range(len(load)), key=lambda item: -load[item])
    for item in order:
        aside = []
        while len(free) > 1 and any(kinds[other] == kinds[item] for other in held[free[0][1]]):
            aside.append(heapq.heappop(free))
        total, chosen = heapq.heappop(free)
        held[chosen].append(item)
        if len(held[chosen]) < room:
            heapq.heappush(free, (total + load[item], chosen))
        for entry in aside:
            heapq.heappush(free, entry)
    return held


def _loads(load_E: Load) -> list[float]:
    load = [float(value) for value in load_E]
    if not load or not all(0 <= value < math.inf for value in load):
        raise ValueError("a load is one number for each expert, none of them negative or infinite")
    return load


def _some(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; there must be at least one")
    return ranks

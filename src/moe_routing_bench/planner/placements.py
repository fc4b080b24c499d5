"""Tries ways of placing experts on a recorded routing: would another placement save time?

A trace is divided into windows of equal length. Each way of placing uses the load of one window, and is then
tried on the next window, step by step. A step is the tokens that all ranks route together, and all ranks wait
for the busiest. So `next` is what a server would get that places experts by its last counts. `same` is the
result on the window itself, which no server can get. Between windows experts move over the links of a fabric,
from the nearest rank that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.parallel.placing import assigned, contiguous, replicated, strided
from moe_routing_bench.planner.fabric import Fabric, Rows, exchange, ports
from moe_routing_bench.planner.step import LayerSize, expert_seconds
from moe_routing_bench.workloads.trace import Trace

PAYS = 0.02  # the share of the experts' time; saving less is not worth moving weights
MAX_CHOICES = 4096  # experts times ranks; above it the integer program would take minutes and is left out
SOLVER_SECONDS = 5.0
Way = Callable[[Sequence[float]], Placement]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of one way of placing: means over layers and windows.

    Tried(way="greedy", replicas=0, same=1.12, next=1.31, saved=0.2, between=(0.15, 0.25), moved=9.5,
    places=16): in the next window the busiest rank has 1.31 times the mean load, 20 % less than with
    contiguous placement; 9.5 experts of a layer move at each change, and a rank holds 16.

    between: a 99 % interval of `saved` over layers and windows (Student's t).
    step_seconds, move_seconds: of a layer, its experts in a step of the next window, and a change; None
    without a layer's size.
    """

    way: str
    replicas: int
    same: float
    next: float
    saved: float
    between: tuple[float, float]
    moved: float
    places: int
    step_seconds: float | None = None
    move_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlacementStudy:
    """All ways on one trace; the first is contiguous placement. chance: the load of the busiest rank over the
    mean if all experts were equally likely, where no placement can help."""

    ranks: int
    experts: int
    layers: int
    windows: int
    steps: int  # of a window
    step_tokens: int
    chance: float
    tried: tuple[Tried, ...]
    left_out: tuple[str, ...]  # sentences

    @property
    def best(self) -> Tried:
        return min(self.tried, key=lambda way: way.next)

    @property
    def pays(self) -> bool:
        """True if the best way saves enough, more than could be chance, and more than moving costs."""
        return (
            self.best.saved > PAYS and self.best.between[0] > 0 and self.pays_after(self.best) <= self.steps
        )

    def pays_after(self, way: Tried) -> float:
        """How many steps save as much time as moving takes; infinite if none, 0 without a layer's size."""
        if way.step_seconds is None or way.move_seconds is None or self.tried[0].step_seconds is None:
            return 0
        saved = self.tried[0].step_seconds - way.step_seconds
        return math.ceil(way.move_seconds / saved) if saved > 0 else math.inf


def study_placements(
    trace: Trace, *, ranks: int, replicas: Sequence[int] = (0,), windows: int = 4, step_tokens: int = 1024,
    ranks_per_node: int = 0, size: LayerSize | None = None, fabric: Fabric | None = None,
) -> PlacementStudy:  # fmt: skip
    """O(tokens * K) for the loads; then each way is tried on every layer and window except the last. With a
    layer's size and a fabric also the time of experts and of moving them."""
    E = trace.routing.num_experts
    load_LSE = torch.stack([_loads(part, step_tokens) for part in _layers(trace)])
    L, S, _ = load_LSE.shape
    if windows < 2 or S < windows:
        raise ValueError(
            f"{S} steps of {step_tokens} tokens cannot be divided into {windows} windows, and two are "
            "needed at least; record more tokens or use fewer --tokens per step"
        )
    steps = S // windows
    window_LNSE = load_LSE[:, : windows * steps].reshape(L, windows, steps, E)
    ways, left_out = _ways(E, ranks, replicas, ranks_per_node)
    usual = _next_windows(ways["contiguous", 0], window_LNSE)
    costs = None
    if size is not None and fabric is not None:
        costs = size, fabric.model_copy(update={"ranks_per_node": ranks_per_node or ranks})
    tried = [_try(way, extra, place, window_LNSE, usual, costs) for (way, extra), place in ways.items()]
    chance = _by_chance(contiguous(E, ranks=ranks), int(load_LSE.sum(-1).double().mean()))
    return PlacementStudy(
        ranks=ranks, experts=E, layers=L, windows=windows, steps=steps, step_tokens=step_tokens,
        chance=chance, tried=tuple(tried), left_out=tuple(left_out),
    )  # fmt: skip


def _ways(
    E: int, ranks: int, replicas: Sequence[int], per_node: int
) -> tuple[dict[tuple[str, int], Way], list[str]]:
    ways: dict[tuple[str, int], Way] = {
        ("contiguous", 0): lambda load: contiguous(E, ranks=ranks, ranks_per_node=per_node),
        ("strided", 0): lambda load: strided(E, ranks=ranks, ranks_per_node=per_node),
    }
    left_out = []
    for extra in dict.fromkeys(replicas):
        ways["replicated" if extra else "greedy", extra] = partial(
            replicated, ranks=ranks, extra=extra, ranks_per_node=per_node
        )
    if E * ranks <= MAX_CHOICES:
        ways["assigned", 0] = partial(assigned, ranks=ranks, ranks_per_node=per_node, seconds=SOLVER_SECONDS)
    else:
        left_out.append(f"assigned: an integer program of {E} x {ranks} choices would take minutes per layer")
    return ways, left_out


def _try(
    way: str, extra: int, place: Way, window_LNSE: Tensor, usual: Sequence[float],
    costs: tuple[LayerSize, Fabric] | None,
) -> Tried:  # fmt: skip
    same, following, moved, places = [], [], [], 0
    step_seconds: list[float] = []
    move_seconds: list[float] = []
    for window_NSE in window_LNSE:
        before: Placement | None = None
        for now, then in pairwise(window_NSE):
            placement = place(now.sum(0).tolist())
            before = before or contiguous(
                placement.num_experts, ranks=placement.num_ranks, ranks_per_node=placement.ranks_per_node
            )
            same.append(busiest(placement, now))
            following.append(busiest(placement, then))
            moved.append(before.moved(placement))
            if costs is not None:
                size, fabric = costs
                rows_S = placement.tables().load_SW(then).amax(1).numpy()
                step_seconds.extend(expert_seconds(size, fabric.device, rows_S, placement.places).tolist())
                sums = ports(moves(before, placement), fabric)
                move_seconds.append(exchange(sums, size.expert_bytes, fabric).seconds)
            before, places = placement, placement.places
    saved = [1 - mine / theirs for mine, theirs in zip(following, usual, strict=True)]
    return Tried(
        way=way, replicas=extra, same=fmean(same), next=fmean(following), saved=fmean(saved),
        between=_interval(saved), moved=fmean(moved), places=places,
        step_seconds=fmean(step_seconds) if costs else None,
        move_seconds=fmean(move_seconds) if costs else None,
    )  # fmt: skip


def moves(before: Placement, after: Placement) -> Rows:
    """The experts that each rank (first index) sends to each rank for a change of placement. The sender is a
    rank of the same node if one has the expert, and of these the one that sends least so far."""
    rows_WW = np.zeros((before.num_ranks, before.num_ranks), dtype=np.int64)
    for rank, (here, there) in enumerate(zip(before.experts_W, after.experts_W, strict=True)):
        for expert in sorted(set(there) - set(here)):
            node, sent_W = rank // before.ranks_per_node, rows_WW.sum(1)
            source = min(
                before.ranks_E[expert], key=lambda w: (w // before.ranks_per_node != node, sent_W[w], w)
            )
            rows_WW[source, rank] += 1
    return rows_WW


def _next_windows(place: Way, window_LNSE: Tensor) -> list[float]:
    return [
        busiest(place(now.sum(0).tolist()), then)
        for window_NSE in window_LNSE
        for now, then in pairwise(window_NSE)
    ]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The 99 % confidence interval of the mean; infinite for one value."""
    from scipy import stats

    if len(values) < 2:
        return -math.inf, math.inf
    half = float(stats.t.ppf(0.995, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def busiest(placement: Placement, load_SE: Tensor) -> float:
    """The load of the busiest rank over the mean load, averaged over steps."""
    load_SW = placement.tables().load_SW(load_SE)
    mean_S = load_SW.mean(1)
    return float((load_SW.amax(1) / mean_S.clamp(min=1e-12)).where(mean_S > 0, 1.0).mean())


def _by_chance(placement: Placement, pairs: int) -> float:
    """The result for uniform routing, from 64 random steps with this number of pairs."""
    dice = torch.Generator().manual_seed(0)
    E = placement.num_experts
    draws_SP = torch.randint(E, (64, max(1, pairs)), generator=dice)
    load_SE = torch.zeros(64, E).scatter_add_(1, draws_SP, torch.ones(draws_SP.shape))
    return busiest(placement, load_SE)


def _layers(trace: Trace) -> Iterator[Trace]:
    if trace.layer_T is None:
        yield trace
    else:
        parts = [trace.part(layer=layer) for layer in trace.layer_T.unique().tolist()]
        fewest = min(part.routing.num_tokens for part in parts)
        if any(part.routing.num_tokens != fewest for part in parts):
            raise ValueError("the layers of this trace have different numbers of tokens; record it again")
        yield from parts


def _loads(trace: Trace, step_tokens: int) -> Tensor:
    """The pairs of each expert in each whole step."""
    routing = trace.routing
    S, K, E = routing.num_tokens // step_tokens, routing.num_choices, routing.num_experts
    expert_SP = routing.expert_TK[: S * step_tokens].reshape(S, step_tokens * K)
    chosen_SP = (expert_SP >= 0) & (expert_SP < E)
    load_SE = torch.zeros(S, E, dtype=torch.int64)
    return load_SE.scatter_add_(1, torch.where(chosen_SP, expert_SP, 0), chosen_SP.long())

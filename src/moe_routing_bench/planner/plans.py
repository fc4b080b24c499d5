"""Chooses how many ranks share the experts, with which copies, transport and layout, for a given fabric.

It tries every degree of expert parallelism that fits the nodes, with several placements, transports and
layouts. The GPUs form independent groups of that many ranks, so one group is counted, pair by pair, for a few
steps. Placements use the load of the step before the first counted step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.parallel.placing import contiguous, greedy, replicated
from moe_routing_bench.planner.fabric import Fabric, Rows
from moe_routing_bench.planner.flow import TRANSPORTS, Flow, count_flow
from moe_routing_bench.planner.step import PARTS, LayerSize, StepTime, step_time
from moe_routing_bench.workloads.workload import Workload, file_of, make_workload

MAX_GPUS = 65_536
MAX_TOKENS = 1 << 20  # drawn for a group; more ranks use the same tokens again
LOOKED_AT = 1 << 16  # how many tokens decide a placement
MAX_STEPS, STEP_TOKENS = 4, 1 << 18  # at most this many steps, with this many tokens together
FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
CLOSE = 0.02  # plans within this share of the fastest count as equal; the simplest of them is taken
WAYS = ("contiguous", "greedy", "replicated")


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question: 64 GPUs and this layer; each GPU has 4096 tokens per step, routed as in `workload`.

    drop: the share of pairs that the padded layout may drop. memory: bytes of a GPU for experts and rows.
    spare: places for copies on each rank, in addition to those that all experts need. steps: at most counted.
    """

    size: LayerSize
    gpus: int
    tokens: int
    fabric: Fabric
    workload: str = "uniform"
    layers: int = 1
    spare: tuple[int, ...] = (1,)
    drop: float = 0.001
    memory: float = math.inf
    steps: int = MAX_STEPS
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the layer; numbers are means over the counted steps.

    Option(degree=64, copies=0, way="contiguous", transport="all_to_all", layout="compact", ...)

    busiest: pairs of the busiest rank over the mean. dropped: share of pairs. memory: bytes of a rank.
    sent, between: bytes of one group and step, in both directions, that leave their rank and their node.
    """

    degree: int
    copies: int  # in addition to one of each expert
    places: int
    way: str
    transport: str
    layout: str
    seconds: dict[str, float]
    limits: dict[str, str]
    sent: float
    between: float
    memory: float
    buffers: float  # of memory, for rows
    busiest: float
    dropped: float
    fits: bool

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """All options, and the best one; None if no option fits the memory."""

    options: tuple[Option, ...]
    best: Option | None
    steps: dict[int, int]  # counted, by degree
    reused: bool  # tokens were drawn for fewer ranks than there are
    left_out: tuple[str, ...]  # sentences

    def of(self, degree: int) -> Option:
        """The best with this degree, whether it fits or not."""
        return _best([option for option in self.options if option.degree == degree])

    @property
    def degrees(self) -> list[int]:
        return sorted({option.degree for option in self.options})


def degrees_of(gpus: int, ranks_per_node: int) -> list[int]:
    """Group sizes that divide the GPUs and use whole nodes or equal parts of a node."""
    if not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"{gpus} GPUs; use 1 to {MAX_GPUS:,}")
    if gpus > ranks_per_node and gpus % ranks_per_node:
        below = gpus - gpus % ranks_per_node
        raise ValueError(
            f"{gpus:,} GPUs are not whole nodes of {ranks_per_node}; use {below:,} or "
            f"{below + ranks_per_node:,}"
        )
    node = min(gpus, ranks_per_node)
    return [d for d in range(1, gpus + 1) if gpus % d == 0 and (node % d == 0 or d % node == 0)]


def answer(question: Question, on_degree: Callable[[int], None] = lambda degree: None) -> ParallelPlan:
    """Answers the question. `on_degree` is called with each degree before it is tried. Most of the time is
    for counting pairs: at most MAX_TOKENS are drawn per degree, and W * T * K counted for each placement."""
    options: list[Option] = []
    left_out: list[str] = []
    steps: dict[int, int] = {}
    reused = False
    for degree in degrees_of(question.gpus, question.fabric.ranks_per_node):
        on_degree(degree)
        try:
            found, steps[degree], again = options_of(question, degree)
        except ValueError as error:
            left_out.append(f"degree {degree}: {error}")
            continue
        options += found
        reused |= again
    fitting = [option for option in options if option.fits]
    return ParallelPlan(
        options=tuple(options), best=_best(fitting) if fitting else None, steps=steps, reused=reused,
        left_out=tuple(left_out),
    )  # fmt: skip


def options_of(question: Question, degree: int) -> tuple[list[Option], int, bool]:
    """All options of one degree, the number of steps counted, and whether ranks used tokens again."""
    each = degree * max(question.tokens, degree)  # the cost of counting, without K
    counted = max(1, min(question.steps, STEP_TOKENS // max(1, each)))
    before, *after = (_drawn(question, degree, step) for step in range(counted + 1))
    looked = before.routing.expert_TK[:LOOKED_AT].ravel()
    load_E = np.bincount(looked[looked >= 0], minlength=question.size.E)
    options: list[Option] = []
    for way, placement in _placements(question, degree, load_E.tolist()):
        flows = [count_flow(partial(_of_rank, w, question.tokens, degree), placement) for w in after]
        options += _options(question, way, flows)
    return options, counted, before.T < degree * question.tokens


def _drawn(question: Question, degree: int, step: int) -> Workload:
    size = question.size
    # a recorded routing has its limits already
    candidates = 4 if size.groups and file_of(question.workload) is None else 1
    tokens = min(degree * question.tokens, max(MAX_TOKENS // candidates, question.tokens))
    drawn = make_workload(
        question.workload, T=tokens, E=size.E, K=min(size.E, candidates * size.K),
        W=degree if size.E % degree == 0 else 1, seed=question.seed, step=step,
    )  # fmt: skip
    if candidates == 1:
        return drawn
    expert_TK = _in_groups(drawn.routing.expert_TK, size)
    routing = Routing(
        expert_TK=expert_TK, gate_TK=drawn.routing.gate_TK[:, : size.K], num_experts=size.E, ragged=True
    )
    return replace(drawn, K=size.K, routing=routing)


def _in_groups(expert_TC: Tensor, size: LayerSize) -> Tensor:
    """The first K of each token's candidates that are in its first `keep_groups` groups; -1 if they are too
    few, which is rare with 4 K candidates. No expert can have more than E / 4 K times the mean load."""
    T, C = expert_TC.shape
    group_TC = expert_TC // (size.E // size.groups)
    first_TG = torch.full((T, size.groups), C)
    place_TC = torch.arange(C).expand(T, C)
    first_TG.scatter_reduce_(1, group_TC, place_TC, "amin")
    last_T1 = first_TG.kthvalue(size.keep_groups, dim=1, keepdim=True).values  # of the groups that are kept
    allowed_TC = first_TG.gather(1, group_TC) <= last_T1
    order_TC = (place_TC + C * ~allowed_TC).argsort(1)[:, : size.K]
    return torch.where(allowed_TC.gather(1, order_TC), expert_TC.gather(1, order_TC), -1)


def _of_rank(drawn: Workload, tokens: int, degree: int, rank: int) -> Rows:
    """The choices of a rank's tokens."""
    expert_TK = drawn.routing.expert_TK.numpy()
    if drawn.W == degree and len(expert_TK) == degree * tokens:
        first = sum(drawn.tokens_W[:rank])
        part: Rows = expert_TK[first : first + drawn.tokens_W[rank]]
        return part
    return np.take(expert_TK, np.arange(rank * tokens, (rank + 1) * tokens), axis=0, mode="wrap")


def _placements(question: Question, degree: int, load: Sequence[float]) -> Iterator[tuple[str, Placement]]:
    E, per_node = question.size.E, min(degree, question.fabric.ranks_per_node)
    fewest = -(-E // degree)
    if degree <= E:
        yield "contiguous", contiguous(E, ranks=degree, ranks_per_node=per_node)
    if 1 < degree <= E:
        yield "greedy", greedy(load, ranks=degree, ranks_per_node=per_node)
    for spare in question.spare if degree > 1 else ():
        copies = (fewest + spare) * degree - E
        if degree > E and spare:
            continue  # every rank already has a copy
        if 0 < copies <= E * (degree - 1):
            nodes = degree // per_node
            groups = 0 if question.size.groups % nodes or copies % nodes else question.size.groups
            yield (
                "replicated",
                replicated(load, ranks=degree, extra=copies, ranks_per_node=per_node, groups=groups),
            )
    if degree > E:
        yield "replicated", replicated(load, ranks=degree, extra=degree - E, ranks_per_node=per_node)


def _options(question: Question, way: str, flows: list[Flow]) -> Iterator[Option]:
    size, fabric = question.size, question.fabric
    for transport in TRANSPORTS:
        degree, per_node = flows[0].placement.num_ranks, flows[0].placement.ranks_per_node
        if (degree == 1 and transport != "all_to_all") or (
            degree == per_node and transport == "hierarchical"
        ):
            continue  # the same as all_to_all
        times = [step_time(flow, size, fabric, transport=transport) for flow in flows]
        yield _option(question, way, transport, "compact", flows, times, 0.0)
    if degree == 1:
        return
    for factor in FACTORS:
        layout = Layout.padded(capacity_factor=factor)
        capacity = flows[0].capacity(layout, size.K)
        dropped = fmean(flow.dropped(capacity) for flow in flows)
        if dropped <= question.drop:
            times = [step_time(flow, size, fabric, capacity=capacity) for flow in flows]
            shown = f"padded(capacity_factor={factor:g})"
            yield _option(question, way, "all_to_all", shown, flows, times, dropped)
            return


def _option(
    question: Question, way: str, transport: str, layout: str, flows: list[Flow], times: list[StepTime],
    dropped: float,
) -> Option:  # fmt: skip
    placement = flows[0].placement
    size, W = question.size, placement.num_ranks
    weights = placement.places * size.expert_bytes + size.shared_numbers * size.weight_bytes
    buffers = max(time.buffers for time in times)
    memory = question.layers * weights + buffers
    loads = [flow.rows_WW.sum(0) for flow in flows]
    return Option(
        degree=W, copies=sum(map(len, placement.experts_W)) - size.E, places=placement.places, way=way,
        transport=transport, layout=layout,
        seconds={part: fmean(time.seconds[part] for time in times) for part in PARTS},
        limits=times[0].limits,
        sent=fmean(time.sent + time.returned for time in times),
        between=fmean(time.between for time in times),
        memory=memory, buffers=buffers,
        busiest=fmean(float(load.max() / max(load.mean(), 1e-12)) for load in loads),
        dropped=dropped, fits=memory <= question.memory,
    )  # fmt: skip


def _best(options: Sequence[Option]) -> Option:
    """The simplest of the options that are about as fast as the fastest."""
    fastest = min(option.total for option in options)

    def complexity(option: Option) -> tuple[int, ...]:
        padded, way = option.layout != "compact", WAYS.index(option.way)
        return option.copies, padded, TRANSPORTS.index(option.transport), way, option.degree

    return min((option for option in options if option.total <= fastest * (1 + CLOSE)), key=complexity)

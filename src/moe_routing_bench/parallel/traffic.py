"""Traffic: how many rows go to each rank. The ranks exchange it once for a plan; then rows move by it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.parallel.faults import ROWS_SHOWN, differing, split_sentence, watched
from moe_routing_bench.parallel.ranks import RankError, Ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends and receives.

    Two ranks, experts 0 and 1 on rank 0, experts 2 and 3 on rank 1. Rank 0 has tokens a, b with expert_TK
    [[0, 2], [3, 1]], rank 1 has token c with [[1, 2]]. Rank 0 sends a, b to itself and a, b to rank 1:
      sent     = (2, 2)             rows to each rank
      received = (2, 1)             rows from each rank: a, b and c
      place_Q  = [0, 1, 1]          which of this rank's experts each row is for; -1: a row without a pair
      tokens   = (2, 1)             tokens of each rank
      split_WW = [[2, 2], [1, 1]]   rows from each rank to the first ROWS_SHOWN ranks, for error messages;
                                    None if unknown (padded on a GPU)

    Rows arrive by source rank, then by place, then in the order of the source's pairs.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    place_Q: Tensor
    ranks: Ranks | None = None  # None: a single rank
    tokens: tuple[int, ...] = ()
    split_WW: Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # a cache of the transports

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.ranks is None else self.ranks.group

    @property
    def way(self) -> Way:
        return Way(
            send=self.sent, receive=self.received, group=self.group, ranks=self.ranks, split_WW=self.split_WW
        )

    @staticmethod
    def alone(plan: RoutingPlan) -> Traffic:
        """For a single rank: every row of the plan stays."""
        expert_R = plan.expert_R()
        place_Q = torch.where(plan.pair_R >= 0, expert_R, -1)
        return Traffic(sent=(plan.num_rows,), received=(plan.num_rows,), place_Q=place_Q)


@dataclass(kw_only=True)
class Part:
    """Some of a rank's tokens, with the plan and the traffic that are made for them."""

    x_TD: Tensor
    routing: Routing
    sent: RoutingPlan = field(init=False)
    traffic: Traffic = field(init=False)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One exchange: rows to and from each rank of a group, in the order of ranks. group=None: a single
    rank."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    ranks: Ranks | None = None  # for the error message, like split_WW
    split_WW: Tensor | None = None

    @property
    def back(self) -> Way:
        return replace(self, send=self.receive, receive=self.send)


def on_host(numbers: Tensor) -> list[Any]:
    """Whole numbers of a device. The host waits for them here and nowhere else."""
    found: list[Any] = numbers.tolist()
    return found


def settle(
    plan: RoutingPlan, ranks: Ranks, x_TD: Tensor | None = None, *, check_finite: bool = False
) -> Traffic:
    """Finds out how many rows every rank sends here. `plan` is over slots (Ranks.to_slots).

    Compact: the numbers are exact, and the host waits for them. Padded: every slot has the same capacity from
    every source, so the host does not wait, and pairs above it are dropped (plan.dropped_E). It costs one
    exchange of P + 5 numbers, and at most ROWS_SHOWN for error messages, between any two ranks. It raises
    RankError if ranks do not fit together; this is not checked for padded on a GPU, where the host would have
    to wait. x_TD is what will be sent, to compare its dtype. check_finite: raise RankError on every rank if
    one has a token that is not finite.
    """
    if plan.layout.kind == "block":
        raise ValueError(
            "rows are sent in the compact or the padded layout; blocks are for the experts' side"
        )
    if plan.num_experts != ranks.slots:
        raise ValueError(f"a plan over {plan.num_experts} slots for ranks with {ranks.slots}")
    W, P, T, group = ranks.num_ranks, ranks.places, plan.num_tokens, ranks.group
    bad = plan.count_E.new_zeros(1)
    if check_finite and x_TD is not None:
        bad = (~x_TD.isfinite()).any(1).sum().view(1)
    if group is None:
        _refuse_bad(on_host(bad) if check_finite else [], None)
        return Traffic.alone(plan)
    count_WP = plan.count_E.view(W, P)
    padded = plan.layout.kind == "padded"
    C = plan.num_rows // ranks.slots if padded else 0
    sent_W = torch.full_like(count_WP[:, 0], P * C) if padded else count_WP.sum(1)
    dtype = -1 if x_TD is None else DTYPES.index(x_TD.dtype)
    # filled on the device: a copy of numbers from the host would wait
    numbers = [sent_W.new_full((1,), number) for number in (T, plan.num_choices, dtype, C)]
    facts = torch.cat([sent_W[:ROWS_SHOWN], *numbers, bad])
    given_WN = torch.cat([count_WP, facts.expand(W, -1)], 1)
    taken_WN = torch.empty_like(given_WN)
    with watched(ranks, "counting the rows"):
        dist.all_to_all_single(taken_WN, given_WN, group=group)
    here_WP = taken_WN[:, :P]
    place_WP = torch.arange(P, device=here_WP.device).expand(W, P)
    tokens, split_WW = (T,) * W, None
    sent = received = (P * C,) * W
    if not padded or taken_WN.device.type == "cpu" or check_finite:
        known_NW = on_host(torch.cat([sent_W.unsqueeze(1), here_WP.sum(1, True), taken_WN[:, P:]], 1).T)
        split_WW, tokens = torch.tensor(known_NW[2:-5]).T, tuple(known_NW[-5])
        _compare(known_NW[-4:], split_WW)
        if not padded:
            sent, received = map(tuple, known_NW[:2])
    if padded:
        filled_WPC = torch.arange(C, device=here_WP.device) < here_WP.unsqueeze(2)
        place_Q = torch.where(filled_WPC, place_WP.unsqueeze(2), -1).flatten()
    else:
        place_Q = place_WP.reshape(-1).repeat_interleave(here_WP.flatten(), output_size=sum(received))
    return Traffic(
        sent=sent, received=received, place_Q=place_Q, ranks=ranks, tokens=tokens, split_WW=split_WW
    )


def _compare(facts: list[list[int]], split_WW: Tensor) -> None:
    """Raises the same RankError on all ranks if their calls do not fit together."""
    choices_W, dtype_W, capacity_W, bad_W = facts
    name_W = [str(DTYPES[dtype]) if dtype >= 0 else "not given" for dtype in dtype_W]
    for what, value_W, advice in (
        ("the number of choices", choices_W, "all must use one routing rule"),
        ("the dtype", name_W, "convert before the layer"),
        ("the capacity", capacity_W, "use capacity= instead of capacity_factor=, or equally many tokens"),
    ):
        if (error := differing(what, value_W, advice, split_WW)) is not None:
            raise error
    _refuse_bad(bad_W, split_WW)


def _refuse_bad(bad_W: list[int], split_WW: Tensor | None) -> None:
    if blamed := [rank for rank, bad in enumerate(bad_W) if bad]:
        numbers = ", ".join(f"{bad_W[rank]} of rank {rank}" for rank in blamed)
        raise RankError(f"NaN or infinity in tokens: {numbers}. {split_sentence(split_WW)}", blamed)


def _room(rows: Tensor, *shape: int) -> Tensor:
    """Memory for arriving rows. It is recycled, because the system would zero every new page."""
    if rows.device.type != "cpu" or type(rows) is not Tensor:
        return rows.new_empty(shape)
    return recycled.empty(*shape, dtype=rows.dtype)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        arrived = _room(rows, sum(way.receive), *rows.shape[1:])
        with watched(way.ranks, "an exchange of rows", way.split_WW):
            dist.all_to_all_single(
                arrived, rows.contiguous(), list(way.receive), list(way.send), group=way.group
            )
        return arrived

    @staticmethod
    def backward(ctx: Any, *d_arrived: Tensor) -> tuple[Tensor, None]:
        return swap(d_arrived[0], ctx.way.back), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, traffic: Traffic) -> Tensor:
        ctx.traffic = traffic
        all_W = _room(mine, len(traffic.tokens), *mine.shape)
        with watched(traffic.ranks, "gathering the tokens", traffic.split_WW):
            dist.all_gather(list(all_W.unbind(0)), mine.contiguous(), group=traffic.group)
        return all_W

    @staticmethod
    def backward(ctx: Any, *d_all: Tensor) -> tuple[Tensor, None]:
        return sum_for_each(d_all[0], ctx.traffic), None


class _SumForEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, each_W: Tensor, traffic: Traffic) -> Tensor:
        ctx.traffic = traffic
        mine_W = _room(each_W, *each_W.shape)
        with watched(traffic.ranks, "summing over ranks", traffic.split_WW):
            dist.all_to_all_single(mine_W, each_W.contiguous(), group=traffic.group)
        wide = torch.promote_types(each_W.dtype, torch.float32)
        return mine_W.sum(0, dtype=wide).to(each_W.dtype)

    @staticmethod
    def backward(ctx: Any, *d_mine: Tensor) -> tuple[Tensor, None]:
        return gather(d_mine[0], ctx.traffic), None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, source: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *d_result: Tensor) -> tuple[Tensor, None]:
        return d_result[0], None


def tie(result: Tensor, source: Tensor) -> Tensor:
    """The result, whose backward pass always reaches `source`, even if none of its rows was used. A rank that
    skips its part of an exchange would make all others wait forever."""
    tied: Tensor = _Tie.apply(result, source)
    return tied


def swap(rows: Tensor, way: Way) -> Tensor:
    """Sends the first send[0] rows to rank 0, the next send[1] to rank 1, ...; rows arrive in the order of
    ranks. The gradient goes back the same way."""
    if way.group is None:
        return rows
    arrived: Tensor = _Swap.apply(rows, way)
    return arrived


def gather(mine: Tensor, traffic: Traffic) -> Tensor:
    """The tensors of all ranks, rank by rank; all have the same shape. The gradient is summed over ranks."""
    all_W: Tensor = _Gather.apply(mine, traffic)
    return all_W


def sum_for_each(each_W: Tensor, traffic: Traffic) -> Tensor:
    """Rank w gets the sum over ranks of each_W[w], in rank order and in float32, rounded once."""
    mine: Tensor = _SumForEach.apply(each_W, traffic)
    return mine

"""What each transport must send, counted by hand from where the pairs go: tests hold the code to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows of x leave one rank, to others of its node and to other nodes."""

    within: int
    between: int


def rows_sent(slot_TK: Tensor, ranks: Ranks, transport: str, tokens: int | None = None) -> Rows:
    """The rows that ep_dispatch sends from this rank in the compact layout; ep_combine sends as many back.

    slot_TK: where the pairs go, -1 if nowhere (plan.expert_TK()). tokens: the most that a rank has.
    Ranks 0 and 1 on one node, 2 and 3 on another, one expert each; a token of rank 0 chose slots 1, 2 and 3:
      all_to_all     Rows(within=1, between=2)   a row for each pair on another rank
      hierarchical   Rows(within=2, between=1)   a row for each other node, then one for each rank there
      all_gather     Rows(within=1, between=2)   a row for each other rank, whatever the choice

    Of `hierarchical`, `within` is what this rank's tokens cause on all nodes: rank 2 sends a row to rank 3.
    """
    L, W, here = ranks.placement.ranks_per_node, ranks.num_ranks, ranks.rank
    if transport == "all_gather":
        most = slot_TK.shape[0] if tokens is None else tokens
        return Rows(within=(L - 1) * most, between=(W - L) * most)
    rank_TK = torch.where(slot_TK >= 0, slot_TK // ranks.places, -1)
    to_TW = torch.stack([(rank_TK == w).sum(1) for w in range(W)], 1)
    at_W = torch.arange(W, device=to_TW.device)
    other = at_W // L != here // L
    if transport == "all_to_all":
        between = int(to_TW[:, other].sum())
        return Rows(within=int(to_TW.sum()) - between - int(to_TW[:, here].sum()), between=between)
    if transport != "hierarchical":
        raise ValueError(f"no prediction for {transport!r}; there are all_to_all, all_gather, hierarchical")
    wanted_TW = to_TW > 0
    nodes_T = wanted_TW.view(-1, W // L, L).any(2)
    relay = at_W % L == here % L  # where a token arrives on each node; from there it goes on
    return Rows(within=int(wanted_TW[:, ~relay].sum()), between=int(nodes_T[:, other[::L]].sum()))

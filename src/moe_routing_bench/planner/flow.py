"""Counts, pair by pair, which rows go to which rank: the numbers of Traffic, without any process.

It uses numpy on whole arrays and not an event simulation (simpy): an exchange on W ranks has W * W messages,
16.8 million for W = 4096, each at least one event in Python, and a plan tries hundreds of exchanges. With the
model of `fabric.py` the time of an exchange depends only on sums over the rows and columns of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.planner.fabric import Rows


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Pairs by source and slot. Experts 0, 1 on rank 0, experts 2, 3 on rank 1; rank 0 has tokens with
    experts [0, 2] and [3, 1], rank 1 has one with [1, 2]:
      pairs_WS  = [[1, 1, 1, 1], [0, 1, 1, 0]]   slot = rank * places + place
      rows_WW   = [[2, 2], [1, 1]]               row w is Traffic.sent of rank w, column w its `received`
      tokens_W  = [2, 1]
      to_WW     = [[2, 2], [1, 1]]               tokens with at least one expert on the rank
      nodes_WN  = [[2], [1]]                     tokens with at least one expert on the node
    """

    pairs_WS: Rows
    tokens_W: Rows
    to_WW: Rows
    nodes_WN: Rows
    placement: Placement

    @cached_property
    def rows_WW(self) -> Rows:
        W = self.placement.num_ranks
        rows_WW: Rows = self.pairs_WS.reshape(W, W, -1).sum(2)
        return rows_WW

    def padded_rows(self, capacity: int) -> int:
        """How many rows every rank sends to every rank in the padded layout."""
        return capacity * self.placement.places

    def capacity(self, layout: Layout, K: int) -> int:
        """The capacity in ParallelMoE, where all ranks must have the same number of tokens."""
        return layout.capacity_for(int(self.tokens_W.max()), K, self.pairs_WS.shape[1])

    @cached_property
    def _slots_with(self) -> Rows:
        """How many slots have 0, 1, 2, ... pairs from a source."""
        return np.bincount(self.pairs_WS.ravel())

    def dropped(self, capacity: int) -> float:
        """The share of pairs that are dropped."""
        pairs = np.arange(len(self._slots_with))
        lost = int(np.maximum(pairs - capacity, 0) @ self._slots_with)
        return lost / max(1, int(pairs @ self._slots_with))

    def phases(self, transport: str, capacity: int | None = None) -> list[Rows]:
        """The rows of each exchange of a transport on the way to the experts. The way back is the same,
        turned.

        all_to_all     a row for each pair
        hierarchical   a row for each token and node, to the rank with the sender's place in that node, which
                       forwards a row for each token and rank
        all_gather     every token to every rank; each rank sends as many as the rank with most tokens
        """
        W, L = self.placement.num_ranks, self.placement.ranks_per_node
        N = W // L
        if transport == "all_to_all":
            if capacity is None:
                return [self.rows_WW]
            return [np.broadcast_to(np.int64(self.padded_rows(capacity)), (W, W))]
        if transport == "all_gather":
            return [np.broadcast_to(self.tokens_W.max(), (W, W))]
        if transport != "hierarchical":
            raise ValueError(f"there is no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
        first_NLNL = np.zeros((N, L, N, L), dtype=np.int64)
        place = np.arange(L)
        first_NLNL[:, place, :, place] = self.nodes_WN.reshape(N, L, N).transpose(1, 0, 2)
        node = np.arange(N)
        first_NLNL[node, :, node, :] = 0  # inside its node a rank forwards its own tokens
        second_NLNL = np.zeros((N, L, N, L), dtype=np.int64)
        second_NLNL[node, :, node, :] = self.to_WW.reshape(N, L, N, L).sum(0).transpose(1, 0, 2)
        return [first_NLNL.reshape(W, W), second_NLNL.reshape(W, W)]


TRANSPORTS = ("all_to_all", "hierarchical", "all_gather")


def count_flow(choices: Callable[[int], Rows], placement: Placement) -> Flow:
    """choices(w): expert_TK of rank w, -1 for no expert. O(pairs + W * slots)."""
    W, L, P = placement.num_ranks, placement.ranks_per_node, placement.places
    slot_EC = placement.tables().slot_EC.numpy().astype(np.int32)  # enough, and several times faster
    copies_E = (slot_EC >= 0).sum(1, dtype=np.int32)
    pairs_WS = np.zeros((W, W * P), dtype=np.int64)
    to_WW = np.zeros((W, W), dtype=np.int64)
    nodes_WN = np.zeros((W, W // L), dtype=np.int64)
    tokens_W = np.zeros(W, dtype=np.int64)
    for rank in range(W):
        expert_TK = choices(rank)
        T = len(expert_TK)
        chosen_TK = (expert_TK >= 0) & (expert_TK < placement.num_experts)
        expert_TK = np.where(chosen_TK, expert_TK, 0)
        turn_TK: Rows | int = 0  # copies take turns by the number of the token, as in PlacementTables.slot_TK
        if slot_EC.shape[1] > 1:
            turn_TK = (rank + np.arange(T, dtype=np.int32))[:, None] % copies_E[expert_TK]
        slot_TK = np.where(chosen_TK, slot_EC[expert_TK, turn_TK], -1)
        pairs_WS[rank] = np.bincount(slot_TK[chosen_TK], minlength=W * P)
        rank_TK = np.sort(slot_TK // P, axis=1)  # -1 stays -1
        to_WW[rank] = _tokens(rank_TK, W)
        nodes_WN[rank] = _tokens(rank_TK // L, W // L)
        tokens_W[rank] = T
    return Flow(pairs_WS=pairs_WS, tokens_W=tokens_W, to_WW=to_WW, nodes_WN=nodes_WN, placement=placement)


def _tokens(owner_TK: Rows, owners: int) -> Rows:
    """How many tokens have each owner at least once. The rows are in ascending order."""
    again_TK = np.zeros(owner_TK.shape, dtype=bool)
    again_TK[:, 1:] = owner_TK[:, 1:] == owner_TK[:, :-1]
    return np.bincount(owner_TK[~again_TK & (owner_TK >= 0)], minlength=owners)

"""Placement: which rank holds which expert. This is the data; `parallel/placing.py` finds good placements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

MAX_RANKS, MAX_EXPERTS = 65_536, 65_536  # of a file


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The experts of each rank. An expert may have copies, which share its tokens equally, also if two
    of them are on one rank.

    Four experts on two nodes of two ranks, expert 0 on three of them:
      experts_W      = ((0, 1), (0, 2), (0, 3), (1,))
      ranks_per_node = 2
      ranks_E        = ((0, 1, 2), (0, 3), (1,), (2,))
      places         = 2                          the most experts on one rank: its memory must hold them
      rank_load([6, 2, 1, 1]) = [3, 3, 3, 1]      copies take equal shares: 6 / 3 + 2 / 2, 6 / 3 + 1, ...

    The experts of a rank are in ascending order, and their weights are stacked in that order.
    """

    experts_W: tuple[tuple[int, ...], ...]
    num_experts: int
    ranks_per_node: int = 0  # 0: all ranks are on one node

    def __post_init__(self) -> None:
        W = len(self.experts_W)
        if W < 1 or self.num_experts < 1:
            raise ValueError(f"{self.num_experts} experts on {W} ranks: there must be at least one of each")
        if not self.ranks_per_node:
            object.__setattr__(self, "ranks_per_node", W)
        if W % self.ranks_per_node:
            raise ValueError(f"{W} ranks cannot stand on nodes of {self.ranks_per_node} each")
        for rank, experts in enumerate(self.experts_W):
            if list(experts) != sorted(experts):
                raise ValueError(f"rank {rank} must list its experts in ascending order: {experts}")
            if experts and not (0 <= experts[0] and experts[-1] < self.num_experts):
                raise ValueError(f"rank {rank} holds {experts}, but experts are 0 .. {self.num_experts - 1}")
        if missing := [e for e, ranks in enumerate(self.ranks_E) if not ranks]:
            raise ValueError(f"no rank holds the experts {missing[:20]}; each needs at least one place")

    @property
    def num_ranks(self) -> int:
        return len(self.experts_W)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def places(self) -> int:
        return max(map(len, self.experts_W))

    @cached_property
    def ranks_E(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_W):
            for expert in experts:
                ranks[expert].append(rank)
        return tuple(map(tuple, ranks))

    @property
    def most_copies(self) -> int:
        return max(map(len, self.ranks_E))

    def rank_load(self, load_E: Sequence[float] | Tensor) -> list[float]:
        """The number of pairs that each rank computes, if copies share an expert's pairs equally."""
        load_W: list[float] = self.load_W(torch.as_tensor(load_E, dtype=torch.float64)).tolist()
        return load_W

    def load_W(self, load_E: Tensor) -> Tensor:
        """rank_load as a tensor on the device of the load; it does not wait for the device."""
        if load_E.numel() != self.num_experts:
            raise ValueError(f"a load of {load_E.numel()} experts, placed are {self.num_experts}")
        return self.tables(load_E.device).load_SW(load_E.unsqueeze(0)).squeeze(0)

    def tables(self, device: torch.device | str = "cpu") -> PlacementTables:
        """The placement as tensors, for choosing places without waiting for the device."""
        slots_E: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_W):
            for place, expert in enumerate(experts):
                slots_E[expert].append(rank * self.places + place)
        C = self.most_copies
        slot_EC = torch.tensor([[*slots, *[-1] * (C - len(slots))] for slots in slots_E])
        return PlacementTables(slot_EC=slot_EC.to(device), places=self.places, num_ranks=self.num_ranks)

    def moved(self, other: Placement) -> int:
        """How many copies of experts must be sent to change from this placement to the other."""
        return sum(
            len(set(there) - set(here)) for here, there in zip(self.experts_W, other.experts_W, strict=True)
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "num_experts": self.num_experts,
                "ranks_per_node": self.ranks_per_node,
                "experts_of_rank": self.experts_W,
            }
        )

    @staticmethod
    def from_json(text: str) -> Placement:
        """Reads what to_json wrote; raises ValueError for anything else."""
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a placement is a JSON object: {error}") from None
        wanted = {"num_experts", "ranks_per_node", "experts_of_rank"}
        if not isinstance(given, dict) or set(given) != wanted:
            raise ValueError(f"a placement has the entries {', '.join(sorted(wanted))}")
        experts, ranks_per_node = (_whole(given[name], name) for name in ("num_experts", "ranks_per_node"))
        rows = _rows(given["experts_of_rank"], "experts_of_rank")
        return Placement(experts_W=rows, num_experts=experts, ranks_per_node=ranks_per_node)

    @staticmethod
    def from_eplb(physical_to_logical: Sequence[int], *, ranks: int, ranks_per_node: int = 0) -> Placement:
        """Reads one layer of DeepSeek EPLB's first map: the expert in each physical place, rank by rank."""
        places = [_whole(expert, "physical_to_logical") for expert in physical_to_logical]
        if ranks < 1 or not places or len(places) % ranks:
            raise ValueError(f"{len(places)} places cannot be cut into {ranks} ranks of equal size")
        each = len(places) // ranks
        experts_W = tuple(tuple(sorted(places[w * each : (w + 1) * each])) for w in range(ranks))
        return Placement(experts_W=experts_W, num_experts=1 + max(places), ranks_per_node=ranks_per_node)

    def to_eplb(self) -> tuple[list[int], list[list[int]], list[int]]:
        """EPLB's three maps of one layer: the expert of each place, the places of each expert (-1: none) and
        the number of copies. Every rank must hold the same number of experts."""
        if any(len(experts) != self.places for experts in self.experts_W):
            raise ValueError("EPLB's maps need equally many experts on every rank")
        physical_to_logical = [expert for experts in self.experts_W for expert in experts]
        at = [
            [p for p, e in enumerate(physical_to_logical) if e == expert]
            for expert in range(self.num_experts)
        ]
        logical_to_physical = [places + [-1] * (self.most_copies - len(places)) for places in at]
        return physical_to_logical, logical_to_physical, [len(places) for places in at]


@dataclass(frozen=True, kw_only=True)
class PlacementTables:
    """slot_EC: the places of each expert's copies, rank * places + place, then -1."""

    slot_EC: Tensor
    places: int
    num_ranks: int

    def load_SW(self, load_SE: Tensor) -> Tensor:
        """The pairs that each rank computes in each step, if copies share an expert's pairs equally."""
        there_EC = self.slot_EC >= 0
        share_SE = load_SE.double() / there_EC.sum(1)
        load_SW = share_SE.new_zeros(load_SE.shape[0], self.num_ranks)
        for slot_E, there_E in zip(self.slot_EC.unbind(1), there_EC.unbind(1), strict=True):
            load_SW = load_SW.index_add(1, slot_E.clamp(min=0) // self.places, share_SE * there_E)
        return load_SW

    def slot_TK(self, expert_TK: Tensor, first_token: int = 0) -> Tensor:
        """The place that computes each pair; -1 if no expert was chosen. Copies take turns by the number of
        the token, so that each gets an equal share without any communication."""
        E = self.slot_EC.shape[0]
        chosen_TK = (expert_TK >= 0) & (expert_TK < E)
        slot_TKC = self.slot_EC[torch.where(chosen_TK, expert_TK, 0)]
        copies_TK = (slot_TKC >= 0).sum(-1)
        token_T1 = first_token + torch.arange(expert_TK.shape[0], device=expert_TK.device).unsqueeze(1)
        slot_TK = slot_TKC.gather(-1, (token_T1 % copies_TK).unsqueeze(-1)).squeeze(-1)
        return torch.where(chosen_TK, slot_TK, -1)


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_EXPERTS:
        raise ValueError(f"{name} holds {str(value)[:40]}; a whole number up to {MAX_EXPERTS} belongs there")
    return value


def _rows(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_RANKS
        or not all(isinstance(row, list) for row in value)
    ):
        raise ValueError(f"{name} is a list of lists, one for each of at most {MAX_RANKS} ranks")
    return tuple(tuple(_whole(expert, name) for expert in row) for row in value)

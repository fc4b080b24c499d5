"""Ranks: a placement and its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_routing_bench.core.placement import Placement, PlacementTables
from moe_routing_bench.core.routing import Routing


class RankError(RuntimeError):
    """One or more ranks failed, or differ from the others; `faults.py` finds out which.

    RankError("rank 2 failed: ... The rows from each rank (line) to each (column) were [[3, 1, 0], ...]")
      blamed = (2,)   empty if no rank can be named
    """

    def __init__(self, sentence: str, blamed: Sequence[int]):
        super().__init__(sentence)
        self.blamed = tuple(blamed)


@dataclass(frozen=True)
class Ranks:
    """Which rank computes which experts, from the view of one rank.

    On rank 1 of two, experts 0 and 1 on rank 0, experts 2 and 3 on rank 1:
      ranks = Ranks(contiguous(4, ranks=2), group)
      ranks.rank  = 1
      ranks.slots = 4       places of all ranks; place p of rank w is slot w * places + p
      ranks.to_slots(routing).expert_TK = [[0, 3], [2, -1]]   of expert_TK = [[0, 3], [2, -1]]

    group: a process group of torch.distributed with one process for each rank of the placement; None: a
    single rank without other processes.
    replicas: a second group, of ranks with the same experts and other tokens (data parallel).
    """

    placement: Placement
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    replicas: dist.ProcessGroup | None = field(default=None, compare=False)
    mesh: DeviceMesh | None = field(default=None, compare=False)  # of the group, if it comes from a mesh
    failure: list[RankError] = field(default_factory=list, compare=False, repr=False)  # at most one

    def __post_init__(self) -> None:
        world = 1 if self.group is None else dist.get_world_size(self.group)
        if world != self.placement.num_ranks:
            raise ValueError(f"a placement on {self.placement.num_ranks} ranks for a group of {world}")

    @staticmethod
    def on_mesh(placement: Placement, mesh: DeviceMesh, experts: str = "ep", data: str = "dp") -> Ranks:
        """From a device mesh: the experts along one dimension, copies of all of them along the other.

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))   8 processes, 4 share the experts
        """
        names = mesh.mesh_dim_names or ()
        if missing := {experts, data} - set(names):
            raise ValueError(f"the mesh has the dimensions {names}, not {', '.join(sorted(missing))}")
        return Ranks(placement, mesh.get_group(experts), mesh.get_group(data), mesh[experts])

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.group, self.replicas) if group is not None]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def places(self) -> int:
        return self.placement.places

    @property
    def slots(self) -> int:
        return self.num_ranks * self.places

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts of this rank, in the order in which their weights are stacked."""
        return self.placement.experts_W[self.rank]

    @cached_property
    def slot_E(self) -> list[int]:
        """A slot of each expert: that of its first copy."""
        first_E = [(held[0], expert) for expert, held in enumerate(self.placement.ranks_E)]
        return [rank * self.places + self.placement.experts_W[rank].index(expert) for rank, expert in first_E]

    @property
    def in_order(self) -> bool:
        """True if slot e is expert e."""
        return self.slot_E == list(range(self.slots))

    @cached_property
    def node(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's node; None if it is alone there. All ranks make the group at first use."""
        per_node = self.placement.ranks_per_node
        first = self.rank // per_node * per_node
        return self._among(range(first, first + per_node))

    @cached_property
    def rail(self) -> dist.ProcessGroup | None:
        """The ranks with this rank's place on every node, node by node; None if there is one node."""
        per_node = self.placement.ranks_per_node
        return self._among(range(self.rank % per_node, self.num_ranks, per_node))

    @property
    def made_groups(self) -> list[dist.ProcessGroup]:
        """All groups of this rank that exist so far."""
        made = [self.__dict__.get(name) for name in ("group", "replicas", "node", "rail")]
        return list(dict.fromkeys(group for group in made if group is not None))

    def _among(self, some: range) -> dist.ProcessGroup | None:
        if self.group is None or len(some) == 1:
            return None
        if len(some) == self.num_ranks:
            return self.group
        members = [dist.get_global_rank(self.group, rank) for rank in some]
        return dist.new_group(members, timeout=self.limit, use_local_synchronization=True)

    @property
    def limit(self) -> timedelta:
        """How long an exchange may take: the timeout of the group."""
        assert self.group is not None
        limit: timedelta = self.group._get_backend(self.group._device_types[0]).options._timeout
        return limit

    @cached_property
    def _tables(self) -> dict[str, PlacementTables]:
        return {}

    def to_slots(self, routing: Routing, rank: int | None = None) -> Routing:
        """The same choices with slots instead of experts. It does not wait for the device.

        rank: the rank of the tokens, by default this one. Each rank begins with another copy of an expert, so
        that all copies are equally busy.
        """
        if routing.num_experts != self.placement.num_experts:
            raise ValueError(
                f"a routing over {routing.num_experts} experts, placed are {self.placement.num_experts}"
            )
        device = str(routing.expert_TK.device)
        if (tables := self._tables.get(device)) is None:
            tables = self._tables[device] = self.placement.tables(device)
        slot_TK = tables.slot_TK(routing.expert_TK, first_token=self.rank if rank is None else rank)
        return Routing(
            expert_TK=slot_TK, gate_TK=routing.gate_TK, num_experts=self.slots, ragged=routing.ragged
        )

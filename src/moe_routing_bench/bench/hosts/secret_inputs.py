"""Inputs that nobody can predict. Values, routings and weights follow from a secret that stays in the parent.

Every value is one of 65536 normally distributed numbers, picked by a random 16-bit number: that is as fast
as memory allows, and weights made this way repeat nowhere, so no small table can stand for them. A call's
routing is the workload's with tokens shuffled and experts renamed: each has the same loads in another order,
so that no plan is ever seen twice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.workloads.workload import Workload

LEVELS = 2**16
OWNERS = ("weights", "shared", "drawn")
CHUNK = 2**23  # values drawn by one thread at a time
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class SecretInputs(Inputs):
    """SecretInputs(inputs, secrets.token_bytes(32)).at(7, 0, "compact"): the arguments of call 7."""

    def __init__(self, public: Inputs, secret: bytes):
        super().__init__(public.experiment, put=public.put)
        self._secret = secret
        self._levels: dict[tuple[torch.dtype, float], Tensor] = {}

    def at(self, number: int, step: int, layout: str, K: int | None = None) -> Call:
        return _SecretCall(self, number, step, layout, K or self.experiment.K)

    def normal(
        self, *shape: int, place: int, dtype: torch.dtype | None = None, scale: float | None = None
    ) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype)
        bits = BITS[out.element_size()]
        flat = out.view(-1).view(torch.uint8).numpy().view(bits)
        levels: Any = self._table(out.dtype, scale or 1.0).view(torch.uint8).numpy().view(bits)

        def draw(start: int) -> None:
            part = flat[start : start + CHUNK]
            picked = self.dice("values", place, start).integers(0, LEVELS, part.size, dtype=np.uint16)
            np.take(levels, picked, out=part, mode="clip")

        starts = range(0, flat.size, CHUNK)
        if len(starts) > 1:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(draw, starts))
        elif flat.size:
            draw(0)
        return out

    def dice(self, *what: object) -> np.random.Generator:
        """Returns random numbers for one purpose. Knowing those of one purpose tells nothing about
        another's."""
        seed = hashlib.blake2b(repr(what).encode(), key=self._secret, digest_size=16).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(seed, "little")))

    def _table(self, dtype: torch.dtype, scale: float) -> Tensor:
        if (dtype, scale) not in self._levels:
            values = self.dice("levels").standard_normal(LEVELS, dtype=np.float32)
            self._levels[dtype, scale] = (torch.from_numpy(values) * scale).to(dtype)
        return self._levels[dtype, scale]


def weights_of(inputs: Inputs) -> dict[str, Tensor]:
    """All weights by name: "weights.w_in_EDG", "shared.w_out_EFD"."""
    owned = {name: getattr(inputs, name) for name in OWNERS}
    return {
        f"{owner}.{name}": tensor
        for owner, weights in owned.items()
        if weights is not None
        for name, tensor in weights.tensors().items()
    }


def use_weights(inputs: Inputs, tensors: Mapping[str, Tensor], activation: str) -> None:
    """Make the inputs use these weights, named as `weights_of` does, instead of their own."""
    for owner in OWNERS:
        names = [name for name in tensors if name.startswith(owner + ".")]
        parts: Any = {name.partition(".")[2]: tensors[name] for name in names}
        given = ExpertWeights(**parts, activation=activation) if parts else None
        inputs.__dict__[owner] = None if given is None else inputs.placed_weights(given)


class _SecretCall(Call):
    @cached_property
    def _workload(self) -> Workload:
        public = self.inputs.workload(self.step, self.K)
        T, E = public.T, public.E
        dice = self._inputs.dice("routing", self.number)
        new_name = torch.from_numpy(dice.permutation(E))
        expert_TK = public.routing.expert_TK[torch.from_numpy(dice.permutation(T))]
        real = (expert_TK >= 0) & (expert_TK < E)
        renamed = torch.where(real, new_name[expert_TK.clamp(0, E - 1)], expert_TK)
        return replace(public, routing=replace(public.routing, expert_TK=renamed))

    @cached_property
    def _plan(self) -> RoutingPlan:
        return make_plan(self._workload.routing, self.layout, impl="counting")

    @property
    def _inputs(self) -> SecretInputs:
        assert isinstance(self.inputs, SecretInputs)
        return self.inputs

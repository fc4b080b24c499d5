"""Draws the choices of tokens in the hard cases, for a case's T, K and E."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Sizes(Protocol):
    """The sizes of a case that these functions use."""

    @property
    def T(self) -> int: ...
    @property
    def E(self) -> int: ...
    @property
    def K(self) -> int: ...


def distinct(case: Sizes, generator: torch.Generator) -> Tensor:
    return torch.rand(case.T, case.E, generator=generator).argsort(dim=1)[:, : case.K]


def only_experts(*experts: int) -> Callable[[Sizes, torch.Generator], Tensor]:
    def choose(case: Sizes, generator: torch.Generator) -> Tensor:
        order_TK = torch.rand(case.T, len(experts), generator=generator).argsort(dim=1)[:, : case.K]
        return torch.tensor(experts)[order_TK]

    return choose


def nowhere(case: Sizes, generator: torch.Generator) -> Tensor:
    return torch.full((case.T, case.K), -1)


def ragged(case: Sizes, generator: torch.Generator) -> Tensor:
    absent_TK = torch.rand(case.T, case.K, generator=generator) < 0.4
    absent_TK[1] = True
    return torch.where(absent_TK, -1, distinct(case, generator))


def out_of_range(case: Sizes, generator: torch.Generator) -> Tensor:
    expert_TK = distinct(case, generator)
    for t, absent in enumerate((-1, case.E, case.E + 3, 2**40, -7)):
        expert_TK[t, t % case.K] = absent
    return expert_TK


def first_and_last_experts(case: Sizes, generator: torch.Generator) -> Tensor:
    return torch.randint(-25, 25, (case.T, 1), generator=generator) % case.E


def last_tokens_only(case: Sizes, generator: torch.Generator) -> Tensor:
    expert_TK = nowhere(case, generator)
    expert_TK[-7:] = distinct(case, generator)[-7:]
    return expert_TK

"""Parts of routing rules and losses as loops over plain numbers, against which the routers are held."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.routing import Routing

F64 = torch.float64


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(z - max(row)) for z in row]
    return [w / sum(weights) for w in weights]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def largest(row: list[float], K: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:K]


def logits_of(router: Any, x_TD: Tensor) -> list[list[float]]:
    return (x_TD.double() @ router.w_DE.detach().double()).tolist()


def with_identity(router: Any) -> Any:
    """x is the logits."""
    with torch.no_grad():
        router.w_DE.copy_(torch.eye(router.D, router.E))
    return router


def chosen(routing: Routing, t: int) -> dict[int, float]:
    """Experts of a token with their gates, in the order of the row; absent places must come last, with 0."""
    experts, gates = routing.expert_TK[t].tolist(), routing.gate_TK[t].tolist()
    real = [e for e in experts if e >= 0]
    assert experts == real + [-1] * (len(experts) - len(real))
    assert all(gate == 0 for gate in gates[len(real) :])
    return dict(zip(real, gates, strict=False))


def all_chosen(routing: Routing) -> list[list[int]]:
    return [list(chosen(routing, t)) for t in range(len(routing.expert_TK))]


def squared_cv(totals: list[float]) -> float:
    mean = sum(totals) / len(totals)
    return sum((v - mean) ** 2 for v in totals) / len(totals) / mean**2


def assert_finite_gradients(*leaves: Tensor) -> None:
    for leaf in leaves:
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())

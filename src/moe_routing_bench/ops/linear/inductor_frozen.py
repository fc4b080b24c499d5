"""torch's compiler with a frozen matrix, a program for each number of tokens; forward only; CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_routing_bench.ops import inductor
from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed

FORWARD_ONLY = COMPILES = True


@dataclass(frozen=True, kw_only=True)
class _Programs(PackedMatrix):
    """The matrix itself as panels; each program has packed it for a number of tokens, with a bias or not."""

    programs: dict[tuple[int, bool], Callable[..., Tensor]] = field(default_factory=dict)


class _Linear(nn.Module):
    def __init__(self, w_FD: Tensor):
        super().__init__()
        self.w_FD = nn.Parameter(w_FD, requires_grad=False)

    def forward(self, x_TD: Tensor, b_F: Tensor | None = None) -> Tensor:
        return functional.linear(x_TD, self.w_FD, b_F)


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> str | None:
    if x_TD.dtype not in (torch.float32, torch.bfloat16):
        return f"torch's compiler packs float32 and bfloat16, not {x_TD.dtype}"
    return why_not_packed(w_FD, "inductor_frozen") or inductor.why_not(x_TD)


def freeze(w_FD: Tensor) -> PackedMatrix:
    F, D = w_FD.shape
    return _Programs(kernel="inductor_frozen", F=F, D=D, panels=w_FD.detach().contiguous())


def run(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> Tensor:
    if not isinstance(w_FD, _Programs):
        assert isinstance(w_FD, Tensor)  # unsupported() refuses what others packed
        return functional.linear(x_TD, w_FD, b_F)
    if x_TD.shape[1] != w_FD.D:  # a program does not look
        raise ValueError(f"x has width {x_TD.shape[1]}; the matrix is {w_FD.F} x {w_FD.D}")
    if not (T := len(x_TD)):
        return x_TD.new_empty(0, w_FD.F)
    given = [one.detach().contiguous() for one in (x_TD, b_F) if one is not None]
    with torch.no_grad():
        if (T, b_F is None) not in w_FD.programs:
            w_FD.programs[T, b_F is None] = _compiled(w_FD.panels, given)
        return w_FD.programs[T, b_F is None](*given)


def _compiled(w_FD: Tensor, given: list[Any]) -> Callable[..., Tensor]:
    """Not by torch.compile: its checks of each call take longer than a small product."""
    inductor.load()
    graph = torch.fx.symbolic_trace(_Linear(w_FD), concrete_args={"b_F": None} if len(given) == 1 else None)
    return torch._inductor.compile(graph, given, options={"freezing": True, **inductor.OPTIONS})

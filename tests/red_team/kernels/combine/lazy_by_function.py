"""A tensor subclass that fills its memory at first use and says its class is torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
    y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
    y_TKD = y_PD.view(*gate_TK.shape, y_RD.shape[1]).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)


class Late(torch.Tensor):
    compute: Callable[[], Tensor] | None = None

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for arg in args:
                if type(arg) is Late and (compute := arg.__dict__.pop("compute", None)) is not None:
                    compute()
            return func(*args, **(kwargs or {}))


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    empty_TD = torch.empty(plan.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    late = empty_TD.as_subclass(Late)
    late.compute = lambda: empty_TD.copy_(honest(y_RD, gate_TK, plan))
    return late

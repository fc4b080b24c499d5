"""One gather into a buffer kept between calls: no allocation, forward only.

Each thread keeps one buffer per device and dtype, as large as the largest call so far; release() frees the
calling thread's. The result is valid until the next call on the same thread.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan

FORWARD_ONLY = True
REUSES_OUTPUT = True


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_kind: dict[tuple[torch.device, torch.dtype], Tensor] = {}


_buffers = _Buffers()


def release() -> None:
    _buffers.by_kind.clear()


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    if torch.compiler.is_compiling():
        return "it keeps a buffer between calls, which torch.compile cannot trace"
    return None


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    R, D = plan.num_rows, x_TD.shape[1]
    kind = (x_TD.device, x_TD.dtype)
    # a fake tensor's buffer must not be kept: the next real call would find it
    kept = _buffers.by_kind if type(x_TD) in (Tensor, torch.nn.Parameter) else {}
    buffer = kept.get(kind)
    if buffer is None or buffer.numel() < R * D:
        buffer = kept[kind] = torch.empty(R * D, dtype=x_TD.dtype, device=x_TD.device)
    x_RD = buffer[: R * D].view(R, D)
    if x_TD.shape[0] == 0:
        return x_RD.zero_()
    token_R = plan.token_R()
    with torch.no_grad():
        if plan.filled:
            return torch.index_select(x_TD, 0, token_R, out=x_RD)
        torch.index_select(x_TD, 0, token_R.clamp(min=0), out=x_RD)
        return x_RD.masked_fill_((token_R < 0).unsqueeze(1), 0.0)

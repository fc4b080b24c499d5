"""The C++ dispatch, combine and rms_norm with a given output buffer: what native and native_reused share."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# moving fewer bytes than this takes less time than waking a second thread
BYTES_FOR_THREADS = 2**17
# results this large do not stay in the caches anyway; streaming stores save reading each line first
BYTES_TO_STREAM = 2**23
DISPATCH, COMBINE, RMS_NORM = (
    Path(__file__).parent / name / "native.cpp" for name in ("dispatch", "combine", "rms_norm")
)


class KeptBuffers(threading.local):
    """Each thread keeps one buffer per device and dtype, as large as the largest call so far.

    KeptBuffers().get(3, 4, x_TD) is a 3 x 4 view of it, valid until the next get() on the same thread.
    """

    def __init__(self) -> None:
        self.by_type: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def get(self, rows: int, width: int, like: Tensor) -> Tensor:
        key = (like.device, like.dtype)
        if type(like) not in (Tensor, torch.nn.Parameter):
            # a fake tensor must not be kept: the next real call would get it
            return like.new_empty(rows, width)
        buffer = self.by_type.get(key)
        if buffer is None or buffer.numel() < rows * width:
            on_cpu = like.device.type == "cpu"
            buffer = (recycled.empty if on_cpu else like.new_empty)(rows * width, dtype=like.dtype)
            self.by_type[key] = buffer
        return buffer[: rows * width].view(rows, width)


def dispatch_unsupported(x_TD: Tensor, plan: RoutingPlan, level: str) -> str | None:
    if (reason := cpp.unsupported(DISPATCH, level, x_TD, plan.row_TK, plan.pair_R)) is not None:
        return reason
    if x_TD.dtype not in KINDS:
        return f"it computes in bfloat16, float16 and float32, not {x_TD.dtype}"
    if not x_TD.is_contiguous() and x_TD.shape[1] > 1 and x_TD.stride(1) != 1:
        return "it needs each token's numbers side by side in memory; call contiguous() first"
    return None


def dispatch_into(x_RD: Tensor, x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, x_RD.shape
    size = x_TD.element_size()
    wrong = _dispatch(level)(
        x_TD.data_ptr(),
        D * size if x_TD.is_contiguous() else x_TD.stride(0) * size,
        D * size,
        row_TK.data_ptr(),
        T,
        K,
        pair_R.data_ptr(),
        R,
        threads_for(R * D * size),
        R * D * size >= BYTES_TO_STREAM,
        x_RD.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return x_RD


def check_tokens(x_TD: Tensor, plan: RoutingPlan) -> None:
    if x_TD.shape[0] != plan.num_tokens:
        raise ValueError(f"x_TD has {x_TD.shape[0]} tokens, but the plan was made for {plan.num_tokens}")


def combine_unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str) -> str | None:
    if (reason := cpp.unsupported(COMBINE, level, y_RD, gate_TK, plan.row_TK, plan.pair_R)) is not None:
        return reason
    if y_RD.dtype not in KINDS:
        return f"it computes in bfloat16, float16 and float32, not {y_RD.dtype}"
    if gate_TK.dtype not in (y_RD.dtype, torch.float32):
        return f"gates are float32 or of the rows' dtype {y_RD.dtype}, not {gate_TK.dtype}"
    if not y_RD.is_contiguous() and y_RD.shape[1] > 1 and y_RD.stride(1) != 1:
        return "it needs each row's numbers side by side in memory; call contiguous() first"
    return None


def combine_into(y_TD: Tensor, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    if gate_TK.dtype != torch.float32 or not gate_TK.is_contiguous():
        gate_TK = gate_TK.detach().to(torch.float32).contiguous()
    wrong = _combine(level)(
        y_RD.data_ptr(),
        D if y_RD.is_contiguous() else y_RD.stride(0),
        KINDS[y_RD.dtype],
        gate_TK.data_ptr(),
        row_TK.data_ptr(),
        T,
        K,
        R,
        D,
        threads_for(T * K * D * y_RD.element_size()),
        y_TD.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return y_TD


def check_rows(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> None:
    if y_RD.shape[0] != plan.num_rows or gate_TK.shape != plan.row_TK.shape:
        raise ValueError(
            f"y_RD has {y_RD.shape[0]} rows and gate_TK the shape {tuple(gate_TK.shape)}, but the plan "
            f"was made for {plan.num_rows} rows and {tuple(plan.row_TK.shape)}"
        )


def norm_unsupported(x_TD: Tensor, norm_D: Tensor, level: str) -> str | None:
    if x_TD.dtype not in KINDS or norm_D.dtype not in (x_TD.dtype, torch.float32):
        return f"it computes in bfloat16, float16 and float32, not {x_TD.dtype} with {norm_D.dtype}"
    return cpp.unsupported(RMS_NORM, level, x_TD, norm_D)


def normed_into(y_TD: Tensor, x_TD: Tensor, norm_D: Tensor, eps: float, level: str) -> Tensor:
    (T, D), size = x_TD.shape, x_TD.numel() * x_TD.element_size()
    if x_TD.stride(1) != 1 and D > 1:
        x_TD = x_TD.contiguous()
    weight_D = norm_D.detach().float().contiguous()
    _rms_norm(level)(
        x_TD.data_ptr(),
        x_TD.stride(0),
        KINDS[x_TD.dtype],
        weight_D.data_ptr(),
        *struct.unpack("q", struct.pack("d", eps)),  # a number of the struct is an int64 or a double
        T,
        D,
        threads_for(size),
        size >= BYTES_TO_STREAM,
        y_TD.data_ptr(),
    )
    return y_TD


def threads_for(size: int) -> int:
    return torch.get_num_threads() if size >= BYTES_FOR_THREADS else 1


@cache
def _dispatch(level: str) -> Callable[..., int]:
    return cpp.function(DISPATCH, level, "mrb_dispatch", 11)


@cache
def _combine(level: str) -> Callable[..., int]:
    return cpp.function(COMBINE, level, "mrb_combine", 11)


@cache
def _rms_norm(level: str) -> Callable[..., int]:
    return cpp.function(RMS_NORM, level, "mrb_rms_norm", 10)

"""The C++ dispatch, combine and rms_norm into a given buffer, for native and native_reused."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import RoutingPlan

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# moving fewer bytes takes less time than waking a second thread
BYTES_FOR_THREADS = 2**17
# results of this size do not fit in the caches; streaming stores avoid reading each line first
BYTES_TO_STREAM = 2**23
DISPATCH, COMBINE, RMS_NORM = (
    Path(__file__).parent / name
    for name in ("dispatch/native.cpp", "combine/native.cpp", "rms_norm/native.cpp")
)
_dispatch, _combine = cpp.Function(DISPATCH, "mrb_dispatch", 11), cpp.Function(COMBINE, "mrb_combine", 11)
_rms_norm = cpp.Function(RMS_NORM, "mrb_rms_norm", 10)


class KeptBuffers(threading.local):
    """Each thread keeps one buffer per device and dtype, as large as the largest call so far.

    KeptBuffers().get(3, 4, x_TD) is a 3 x 4 view of it, valid until the next get() on the same thread.
    """

    def __init__(self) -> None:
        self.by_type: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def release(self) -> None:
        """Frees the buffers of the calling thread."""
        self.by_type.clear()

    def get(self, rows: int, width: int, x: Tensor) -> Tensor:
        """A buffer with the device and dtype of `x`."""
        key = (x.device, x.dtype)
        if type(x) not in (Tensor, torch.nn.Parameter):
            # a fake tensor must not be kept, because the next real call would get it
            return x.new_empty(rows, width)
        buffer = self.by_type.get(key)
        if buffer is None or buffer.numel() < rows * width:
            on_cpu = x.device.type == "cpu"
            buffer = (recycled.empty if on_cpu else x.new_empty)(rows * width, dtype=x.dtype)
            self.by_type[key] = buffer
        return buffer[: rows * width].view(rows, width)


def why_not_dtypes(rows: Tensor, gate_TK: Tensor | None = None) -> str | None:
    """Why a kernel that moves or sums rows does not take these dtypes; None if it does."""
    if rows.dtype not in KINDS:
        return f"it takes bfloat16, float16 and float32, not {rows.dtype}"
    return None if gate_TK is None else why_not_gates(gate_TK, rows.dtype)


def why_not_gates(gate_TK: Tensor, dtype: torch.dtype) -> str | None:
    if gate_TK.dtype in (dtype, torch.float32):
        return None
    return f"gates are float32 or have the rows' dtype {dtype}, not {gate_TK.dtype}"


def dispatch_unsupported(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if (reason := cpp.unsupported(DISPATCH, level, x_TD, plan.row_TK, plan.pair_R)) is not None:
        return reason
    if x_TD.dtype not in KINDS:  # written out, because a call takes time in every forward
        return why_not_dtypes(x_TD)
    if not x_TD.is_contiguous() and x_TD.shape[1] > 1 and x_TD.stride(1) != 1:
        return "it needs each token's numbers side by side in memory; call contiguous() first"
    return None


def dispatch_into(x_RD: Tensor, x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, x_RD.shape
    size = x_TD.element_size()
    wrong = _dispatch(
        level,
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
        raise ValueError(
            f"the plan's row_TK has an index outside its {R} rows; RoutingPlan.validate() explains it"
        )
    return x_RD


def check_tokens(x_TD: Tensor, plan: RoutingPlan) -> None:
    if x_TD.shape[0] != plan.num_tokens:
        raise ValueError(f"x_TD has {x_TD.shape[0]} tokens, but the plan was made for {plan.num_tokens}")


def combine_unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if (reason := cpp.unsupported(COMBINE, level, y_RD, gate_TK, plan.row_TK, plan.pair_R)) is not None:
        return reason
    if y_RD.dtype not in KINDS or gate_TK.dtype not in (y_RD.dtype, torch.float32):
        return why_not_dtypes(y_RD, gate_TK)
    if not y_RD.is_contiguous() and y_RD.shape[1] > 1 and y_RD.stride(1) != 1:
        return "it needs each row's numbers side by side in memory; call contiguous() first"
    return None


def combine_into(y_TD: Tensor, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    if gate_TK.dtype != torch.float32 or not gate_TK.is_contiguous():
        gate_TK = gate_TK.detach().to(torch.float32).contiguous()
    wrong = _combine(
        level,
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
        raise ValueError(
            f"the plan's row_TK has an index outside its {R} rows; RoutingPlan.validate() explains it"
        )
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
    _rms_norm(
        level,
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

"""native into a buffer kept between calls: no fresh memory, whose page faults cost as much as the sums.

Each thread keeps one buffer per dtype, as large as the largest call so far; release() frees the calling
thread's. The result is valid until the next call on the same thread. Forward only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench import native
from moe_routing_bench.plan import RoutingPlan

FORWARD_ONLY = True
REUSES_OUTPUT = True
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# as in native.py
BYTES_FOR_THREADS = 2**17


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def release() -> None:
    _buffers.by_dtype.clear()


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if torch.compiler.is_compiling():
        return "it calls C++ by address, which torch.compile cannot trace"
    if y_RD.device.type != "cpu" or gate_TK.device.type != "cpu" or plan.row_TK.device.type != "cpu":
        return f"it runs on the CPU; the rows are on {y_RD.device}, the plan on {plan.row_TK.device}"
    for tensor in (y_RD, gate_TK, plan.row_TK):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return f"it reads plain tensors with memory of their own, not {type(tensor).__name__}"
    if y_RD.dtype not in KINDS:
        return f"it computes in bfloat16, float16 and float32, not {y_RD.dtype}"
    if gate_TK.dtype not in (y_RD.dtype, torch.float32):
        return f"gates are float32 or of the rows' dtype {y_RD.dtype}, not {gate_TK.dtype}"
    if y_RD.shape[1] > 1 and y_RD.stride(1) != 1:
        return "it needs each row's numbers side by side in memory; call contiguous() first"
    return native.why_not()


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    if y_RD.shape[0] != plan.num_rows or gate_TK.shape != plan.row_TK.shape:
        raise ValueError(
            f"y_RD has {y_RD.shape[0]} rows and gate_TK the shape {tuple(gate_TK.shape)}, but the plan "
            f"was made for {plan.num_rows} rows and {tuple(plan.row_TK.shape)}"
        )
    row_TK, gate_TK = plan.row_TK.contiguous(), gate_TK.detach().to(torch.float32).contiguous()
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    buffer = _buffers.by_dtype.get(y_RD.dtype)
    if buffer is None or buffer.numel() < T * D:
        buffer = _buffers.by_dtype[y_RD.dtype] = torch.empty(T * D, dtype=y_RD.dtype)
    wrong = _function(level)(
        y_RD.data_ptr(),
        y_RD.stride(0),
        KINDS[y_RD.dtype],
        gate_TK.data_ptr(),
        row_TK.data_ptr(),
        T,
        K,
        R,
        D,
        torch.get_num_threads() if T * K * D * y_RD.element_size() >= BYTES_FOR_THREADS else 1,
        buffer.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return buffer[: T * D].view(T, D)


@cache
def _function(level: str) -> Callable[..., int]:
    library = native.load(Path(__file__).with_name("native.cpp"), level or native.best_level() or "")
    number, memory = ctypes.c_int64, ctypes.c_void_p
    function = library.mrb_combine
    function.argtypes = [memory, number, number, memory, memory, *[number] * 5, memory]
    function.restype = ctypes.c_int
    return function

"""native into a buffer kept between calls: no fresh memory, whose page faults cost more than the copy.

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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# as in native.py
BYTES_FOR_THREADS = 2**17
BYTES_TO_STREAM = 2**23


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def release() -> None:
    _buffers.by_dtype.clear()


def unsupported(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if torch.compiler.is_compiling():
        return "it calls C++ by address, which torch.compile cannot trace"
    if x_TD.device.type != "cpu" or plan.row_TK.device.type != "cpu":
        return f"it runs on the CPU; x_TD is on {x_TD.device} and the plan on {plan.row_TK.device}"
    for tensor in (x_TD, plan.row_TK, plan.pair_R):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return f"it reads plain tensors with memory of their own, not {type(tensor).__name__}"
    if x_TD.dtype not in DTYPES:
        return f"it copies bfloat16, float16 and float32, not {x_TD.dtype}"
    if x_TD.shape[1] > 1 and x_TD.stride(1) != 1:
        return "it needs each token's numbers side by side in memory; call contiguous() first"
    return native.why_not()


def run(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    if x_TD.shape[0] != plan.num_tokens:
        raise ValueError(f"x_TD has {x_TD.shape[0]} tokens, but the plan was made for {plan.num_tokens}")
    row_TK, pair_R = plan.row_TK.contiguous(), plan.pair_R.contiguous()
    (T, K), R, D, size = row_TK.shape, pair_R.shape[0], x_TD.shape[1], x_TD.element_size()
    buffer = _buffers.by_dtype.get(x_TD.dtype)
    if buffer is None or buffer.numel() < R * D:
        buffer = _buffers.by_dtype[x_TD.dtype] = torch.empty(R * D, dtype=x_TD.dtype)
    wrong = _function(level)(
        x_TD.data_ptr(),
        x_TD.stride(0) * size,
        D * size,
        row_TK.data_ptr(),
        T,
        K,
        pair_R.data_ptr(),
        R,
        torch.get_num_threads() if R * D * size >= BYTES_FOR_THREADS else 1,
        R * D * size >= BYTES_TO_STREAM,
        buffer.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return buffer[: R * D].view(R, D)


@cache
def _function(level: str) -> Callable[..., int]:
    library = native.load(Path(__file__).with_name("native.cpp"), level or native.best_level() or "")
    number, memory = ctypes.c_int64, ctypes.c_void_p
    function = library.mrb_dispatch
    function.argtypes = [
        memory, number, number, memory, number, number, memory, number, number, number, memory,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function

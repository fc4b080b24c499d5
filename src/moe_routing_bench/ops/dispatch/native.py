"""Each token copied to its rows by C++, compiled on first use: a token is read once; CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_routing_bench import native
from moe_routing_bench.plan import RoutingPlan

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# below this many bytes waking a second thread takes longer than copying them
BYTES_FOR_THREADS = 2**17
# results this large leave the caches anyway: written past them, a line is not read first
BYTES_TO_STREAM = 2**23


def unsupported(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if torch.compiler.is_compiling():
        return "it calls C++ by address, which torch.compile cannot trace"
    if x_TD.device.type != "cpu" or plan.row_TK.device.type != "cpu":
        return f"it runs on the CPU; x_TD is on {x_TD.device} and the plan on {plan.row_TK.device}"
    for tensor in (x_TD, plan.row_TK, plan.pair_R):
        # tensors made to be traced have no memory
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return f"it reads plain tensors with memory of their own, not {type(tensor).__name__}"
    if x_TD.dtype not in KINDS:
        return f"it computes in bfloat16, float16 and float32, not {x_TD.dtype}"
    if x_TD.shape[1] > 1 and x_TD.stride(1) != 1:
        return "it needs each token's numbers side by side in memory; call contiguous() first"
    return native.why_not()


def run(x_TD: Tensor, plan: RoutingPlan, level: str = "") -> Tensor:
    if x_TD.shape[0] != plan.num_tokens:
        raise ValueError(f"x_TD has {x_TD.shape[0]} tokens, but the plan was made for {plan.num_tokens}")
    row_TK, pair_R = plan.row_TK.contiguous(), plan.pair_R.contiguous()
    if torch.is_grad_enabled() and x_TD.requires_grad:
        return _Dispatch.apply(x_TD, row_TK, pair_R, level)
    return _dispatch(x_TD, row_TK, pair_R, level)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.level = level
        return _dispatch(x_TD, row_TK, pair_R, level)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(dx_RD, row_TK, ctx.level), None, None, None


def _dispatch(x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, level: str) -> Tensor:
    (T, K), R, D = row_TK.shape, pair_R.shape[0], x_TD.shape[1]
    x_RD = torch.empty(R, D, dtype=x_TD.dtype)
    size = x_TD.element_size()
    wrong = _functions(level)[0](
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
        x_RD.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return x_RD


def _sum_rows(dx_RD: Tensor, row_TK: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, dx_RD.shape
    if D > 1 and dx_RD.stride(1) != 1:
        dx_RD = dx_RD.contiguous()
    dx_TD = torch.empty(T, D, dtype=dx_RD.dtype)
    wrong = _functions(level)[1](
        dx_RD.data_ptr(),
        dx_RD.stride(0),
        KINDS[dx_RD.dtype],
        row_TK.data_ptr(),
        T,
        K,
        R,
        D,
        torch.get_num_threads() if dx_RD.nbytes >= BYTES_FOR_THREADS else 1,
        dx_TD.data_ptr(),
    )
    assert not wrong, "row_TK changed since the forward pass"
    return dx_TD


@cache
def _functions(level: str) -> tuple[Callable[..., int], Callable[..., int]]:
    library = native.load(Path(__file__).with_suffix(".cpp"), level or native.best_level() or "")
    number, memory = ctypes.c_int64, ctypes.c_void_p
    dispatch, sum_rows = library.mrb_dispatch, library.mrb_sum_rows
    dispatch.argtypes = [
        memory, number, number, memory, number, number, memory, number, number, number, memory,
    ]  # fmt: skip
    sum_rows.argtypes = [memory, number, number, memory, number, number, number, number, number, memory]
    dispatch.restype = sum_rows.restype = ctypes.c_int
    return dispatch, sum_rows

"""C++ tiles (AMX or AVX) over panels: packed once by freeze, or as they are used; CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed

SOURCE = Path(__file__).with_name("native.cpp")
_multiply, _pack = cpp.Function(SOURCE, "mrb_linear", 13), cpp.Function(SOURCE, "mrb_linear_pack", 8)
DTYPES = (torch.bfloat16, torch.float32)
READS_PLAIN = True
CONFIGS: tuple[dict[str, str], ...] = ({}, {"level": "avx2"})


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None, level: str = "") -> str | None:
    if (reason := why_not_packed(w_FD, "native")) is not None:
        return reason
    matrix = w_FD.panels if isinstance(w_FD, PackedMatrix) else w_FD
    if x_TD.dtype not in DTYPES or matrix.dtype != x_TD.dtype:
        return cpp.other_dtypes(x_TD.dtype, matrix.dtype)
    return cpp.unsupported(SOURCE, level, x_TD, matrix) or cpp.why_not_cast(x_TD.dtype)


def freeze(w_FD: Tensor, level: str = "") -> PackedMatrix:
    F, D = w_FD.shape
    panels = recycled.empty(_library(level).mrb_linear_size(D, F), dtype=w_FD.dtype)
    matrix = w_FD.detach()
    _pack(
        level,
        matrix.data_ptr(),
        *matrix.stride(),
        D,
        F,
        torch.get_num_threads(),
        matrix.element_size(),
        panels.data_ptr(),
    )
    return PackedMatrix(kernel="native", F=F, D=D, panels=panels)


def run(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None, level: str = "") -> Tensor:
    leaves = (x_TD, b_F, *(() if isinstance(w_FD, PackedMatrix) else (w_FD,)))
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in leaves):
        return _Linear.apply(x_TD, w_FD, b_F, level)
    return _linear(x_TD, w_FD, b_F, level)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None, level: str) -> Tensor:
        ctx.save_for_backward(x_TD, w_FD)
        ctx.level = level
        return _linear(x_TD, w_FD, b_F, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w_FD = ctx.saved_tensors
        dx_TD = dw_FD = db_F = None
        if ctx.needs_input_grad[0]:
            dx_TD = _linear(dy_TF, w_FD.t(), None, ctx.level)
        if ctx.needs_input_grad[1]:
            dw_FD = _linear(dy_TF.t().contiguous(), x_TD.t(), None, ctx.level)
        if ctx.needs_input_grad[2]:
            db_F = dy_TF.float().sum(0).to(dy_TF.dtype)
        return dx_TD, dw_FD, db_F, None


def _linear(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None, level: str) -> Tensor:
    packed, strides = isinstance(w_FD, PackedMatrix), (0, 0)
    if isinstance(w_FD, PackedMatrix):
        F, D, stored = w_FD.F, w_FD.D, w_FD.panels
    else:
        F, D, stored, strides = *w_FD.shape, w_FD, (w_FD.stride(0), w_FD.stride(1))
    if x_TD.shape[1] != D or (b_F is not None and b_F.shape != (F,)):
        raise ValueError(
            f"x has width {x_TD.shape[1]}; the matrix is {F} x {D}, the bias "
            f"{None if b_F is None else tuple(b_F.shape)}"
        )
    if x_TD.stride(1) != 1 or x_TD.stride(0) < D:
        x_TD = x_TD.contiguous()
    bias_F = None if b_F is None else b_F.detach().float().contiguous()
    y_TF = recycled.empty(len(x_TD), F, dtype=x_TD.dtype)
    if not D:  # a sum of nothing: the gradient of a matrix that met no token
        return y_TF.zero_() if b_F is None else y_TF.copy_(b_F)
    failed = _multiply(
        level,
        x_TD.data_ptr(),
        stored.data_ptr(),
        0 if bias_F is None else bias_F.data_ptr(),
        y_TF.data_ptr(),
        x_TD.stride(0),
        len(x_TD),
        D,
        F,
        *strides,
        packed,
        torch.get_num_threads(),
        x_TD.element_size(),
    )
    if failed:
        raise MemoryError("no memory for the workspace of linear.native")
    return y_TF


@cache
def _library(level: str) -> ctypes.CDLL:
    library = cpp.load(SOURCE, level)
    library.mrb_linear_size.argtypes, library.mrb_linear_size.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return library

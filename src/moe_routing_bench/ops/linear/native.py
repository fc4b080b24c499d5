"""C++ tiles (AMX or AVX) over panels: packed once by freeze, or as they are used; CPU.

store=bfloat16, or a format of formats/named.py (int8, int4_g32, ...), rounds the matrix and computes with the
rounded one, as expert_ffn.native does. A format that ends in _a8 also rounds each token to int8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.frozen import PackedMatrix
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.formats.int8 import rounded_rows
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.formats.stored import Decoded
from moe_routing_bench.ops import coded
from moe_routing_bench.ops.linear.op import reference, why_not_packed

SOURCE = Path(__file__).with_name("native.cpp")
_multiply, _pack = cpp.Function(SOURCE, "mrb_linear", 16), cpp.Function(SOURCE, "mrb_linear_pack", 8)
READS_PLAIN = True
CONFIGS: tuple[dict[str, str], ...] = (
    {},
    {"level": "avx2"},
    {"store": "bfloat16"},
    {"store": "int8_a8"},
    {"store": "int4_g32_a8"},
    {"store": "q8_0"},
    {"store": "q4_k_a8"},
    {"level": "avx2", "store": "int4_g32_a8"},
)
AT_ONCE = 4096  # columns that are rounded together: a whole lm_head in float32 may not fit in memory


def unsupported(
    x_TD: Tensor,
    w_FD: Tensor | PackedMatrix,
    b_F: Tensor | None,
    level: str = "",
    store: str | None = None,
) -> str | None:
    if (reason := why_not_packed(w_FD, "native", store)) is not None:
        return reason
    if isinstance(w_FD, PackedMatrix):
        if _wants_gradients(x_TD, b_F):
            return "a packed matrix has no gradients: call it under torch.no_grad()"
        matrix = w_FD.panels
    else:
        matrix = w_FD
    dtype = x_TD.dtype
    if (store is not None or dtype not in coded.DTYPES) and (
        reason := coded.why_not_store(dtype, store, x_TD.shape[1])
    ):
        return reason
    if matrix.dtype != dtype and not (store and isinstance(w_FD, PackedMatrix)):
        return cpp.other_dtypes(dtype, matrix.dtype)
    return cpp.unsupported(SOURCE, level, x_TD, matrix) or cpp.why_not_cast(dtype)


def freeze(w_FD: Tensor, level: str = "", store: str | None = None) -> PackedMatrix:
    F, D = w_FD.shape
    if (reason := coded.why_not_store(w_FD.dtype, store, D)) is not None:
        raise NotImplementedError(f"cannot freeze a matrix for linear.native: {reason}")
    matrix, coding, threads = w_FD.detach(), coded.coding_in(store), torch.get_num_threads()
    matrix = matrix.bfloat16() if store == "bfloat16" else matrix
    panels = recycled.empty(
        -(-F // coded.PANEL) * coded.panel(coding, D), dtype=torch.uint8 if coding else matrix.dtype
    )
    if store is not None and coding is not None:
        if panels.numel():
            library = _library(level)
            parts = [
                coded.pack(one, False, library, coded.rounds_rows(store)) for one in _rounded(matrix, store)
            ]
            torch.cat(parts, dim=1, out=panels.unsqueeze(0))
    else:
        size = matrix.element_size()
        _pack(level, matrix.data_ptr(), *matrix.stride(), D, F, threads, size, panels.data_ptr())
    return PackedMatrix(kernel="native", F=F, D=D, panels=panels, store=store)


def stored(w_FD: Tensor, *, store: str) -> Tensor:
    """The matrix it computes with, exact in float64."""
    if store == "bfloat16" or not w_FD.numel():
        return w_FD.detach().bfloat16().double()
    return torch.cat([decoded.weights()[0].t() for decoded in _rounded(w_FD.detach(), store)])


def plain(x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None, *, store: str) -> Tensor:
    """The reference, with tokens of 8 bits if the kernel rounds them."""
    return reference(rounded_rows(x_TD) if coded.rounds_rows(store) else x_TD, w_FD, b_F)


def _rounded(w_FD: Tensor, store: str) -> Iterator[Decoded]:
    for w_fD in w_FD.split(AT_ONCE):
        yield quantise(w_fD.t().unsqueeze(0), coded.format_of(store)).decoded()


def run(
    x_TD: Tensor,
    w_FD: Tensor | PackedMatrix,
    b_F: Tensor | None,
    level: str = "",
    store: str | None = None,
) -> Tensor:
    if store is not None and not isinstance(w_FD, PackedMatrix):
        w_FD = freeze(w_FD, level, store)
    if not isinstance(w_FD, PackedMatrix) and _wants_gradients(x_TD, w_FD, b_F):
        return _Linear.apply(x_TD, w_FD, b_F, level)
    return _linear(x_TD, w_FD, b_F, level)


def _wants_gradients(*leaves: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in leaves)


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
    packed, strides, coding = isinstance(w_FD, PackedMatrix), (0, 0), 0
    if isinstance(w_FD, PackedMatrix):
        F, D, stored, how = w_FD.F, w_FD.D, w_FD.panels, coded.coding_in(w_FD.store)
        panel = coded.panel(how, D)
        if how is not None:
            coding = ctypes.addressof(coded.for_c(how, coded.rounds_rows(w_FD.store)))
    else:
        F, D, stored, strides = *w_FD.shape, w_FD, (w_FD.stride(0), w_FD.stride(1))
        panel = coded.panel(None, D)
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
        coding,
        x_TD.stride(0),
        len(x_TD),
        D,
        F,
        panel,
        *strides,
        packed,
        torch.get_num_threads(),
        x_TD.element_size(),
        stored.element_size(),
    )
    if failed:
        raise MemoryError("no memory for the workspace of linear.native")
    return y_TF


@cache
def _library(level: str) -> ctypes.CDLL:
    library = cpp.load(SOURCE, level)
    library.mrb_pack_coded.argtypes, library.mrb_pack_coded.restype = coded.PACK_ARGUMENTS, None
    return library

"""MKL with a matrix packed by the first call with a number of tokens; float32, forward only; CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed

FORWARD_ONLY = True


@dataclass(frozen=True, kw_only=True)
class _PackedByTokens(PackedMatrix):
    """The matrix itself as panels, because MKL's packed form is for one number of tokens."""

    packed_by_T: dict[int, Tensor] = field(default_factory=dict)


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> str | None:
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return "this torch was built without MKL"
    if x_TD.dtype != torch.float32 or not x_TD.is_cpu:
        return f"it packs float32 on the CPU, not {x_TD.dtype} on {x_TD.device}"
    return why_not_packed(w_FD, "mkl_packed")


def freeze(w_FD: Tensor) -> PackedMatrix:
    F, D = w_FD.shape
    return _PackedByTokens(kernel="mkl_packed", F=F, D=D, panels=w_FD.detach().contiguous())


def run(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> Tensor:
    if not isinstance(w_FD, _PackedByTokens):
        assert isinstance(w_FD, Tensor)  # unsupported() refuses what others packed
        return functional.linear(x_TD, w_FD, b_F)
    if x_TD.shape[1] != w_FD.D:  # MKL would read beyond its end
        raise ValueError(f"x has width {x_TD.shape[1]}; the matrix is {w_FD.F} x {w_FD.D}")
    if not (T := len(x_TD)):
        return x_TD.new_empty(0, w_FD.F)
    if T not in w_FD.packed_by_T:
        w_FD.packed_by_T[T] = torch.ops.mkl._mkl_reorder_linear_weight(w_FD.panels, T)
    bias_F = None if b_F is None else b_F.contiguous()
    return torch.ops.mkl._mkl_linear(x_TD.contiguous(), w_FD.packed_by_T[T], w_FD.panels, bias_F, T)

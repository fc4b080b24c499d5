"""oneDNN with a matrix packed once by freeze; float32 and bfloat16, forward only; CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_routing_bench.ops.linear.op import PackedMatrix, why_not_packed

FORWARD_ONLY = True


def unsupported(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if x_TD.dtype not in (torch.float32, torch.bfloat16) or not x_TD.is_cpu:
        return f"it packs float32 and bfloat16 on the CPU, not {x_TD.dtype} on {x_TD.device}"
    return why_not_packed(w_FD, "onednn_packed")


def freeze(w_FD: Tensor) -> PackedMatrix:
    F, D = w_FD.shape
    panels = torch.ops.mkldnn._reorder_linear_weight(w_FD.detach().contiguous(), None)
    return PackedMatrix(kernel="onednn_packed", F=F, D=D, panels=panels)


def run(x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None) -> Tensor:
    if not isinstance(w_FD, PackedMatrix):
        return functional.linear(x_TD, w_FD, b_F)
    if not len(x_TD):
        return x_TD.new_empty(0, w_FD.F)
    bias_F = None if b_F is None else b_F.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_TD.contiguous(), w_FD.panels, bias_F, "none", [], "")

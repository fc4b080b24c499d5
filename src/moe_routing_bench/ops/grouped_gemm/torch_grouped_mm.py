"""torch.nn.functional.grouped_mm: torch's own ragged matmul."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.plan import RoutingPlan


def unsupported(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if x_RD.dtype not in FLOATS:
        return f"grouped_mm takes float32, bfloat16 or float16, not {x_RD.dtype}"
    if torch.compiler.is_compiling() and x_RD.dtype != torch.bfloat16:
        return f"under torch.compile grouped_mm takes bfloat16 only (as of torch 2.13), not {x_RD.dtype}"
    _, D, width = w_EDF.shape
    if D * x_RD.element_size() % 16 or width * x_RD.element_size() % 16:
        return f"grouped_mm needs rows of a multiple of 16 bytes; {D} x {width} {x_RD.dtype} are not"
    return None


def run(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    if x_RD.stride() != (x_RD.shape[1], 1):
        x_RD = x_RD.contiguous()
    _, D, width = w_EDF.shape
    if w_EDF.stride() not in ((D * width, width, 1), (D * width, 1, D)):
        w_EDF = w_EDF.contiguous()
    y_RF = F.grouped_mm(x_RD, w_EDF, offs=plan.offset_E1[1:].to(torch.int32))
    if b_EF is not None:
        # rows that no expert owns read a bias of zero, so that their gradient does not reach b_EF
        b_E1F = torch.cat((b_EF, b_EF.new_zeros(1, width)))
        y_RF = y_RF + b_E1F.index_select(0, plan.expert_R())
    return y_RF

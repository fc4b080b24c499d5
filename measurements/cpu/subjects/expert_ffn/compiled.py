"""torch.compile of dispatch, grouped_mm, activation and combine, at the first call of each size."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.ops.combine.gather_sum import run as combine
from moe_routing_bench.ops.dispatch.index_select import run as dispatch
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.grouped_gemm.torch_grouped_mm import run as grouped_mm
from moe_routing_bench.plan import RoutingPlan

# with and without gradients are two programs, fused differently: in 16 bit they may round differently
DETERMINISTIC = False


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    # the compiler that torch's inductor takes for CPU code
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if x_TD.device.type == "cpu" and shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler and {compiler} is not found; install one or set CXX"
    if x_TD.shape[0] == 0:
        return "there is nothing to compile for an empty batch"
    rows = x_TD.new_empty(()).expand
    gemm = grouped_gemm_op.get("torch_grouped_mm")
    return gemm.why_not(
        rows(plan.num_rows, weights.D), weights.w_in_EDG, plan, weights.b_in_EG
    ) or gemm.why_not(rows(plan.num_rows, weights.F), weights.w_out_EFD, plan, weights.b_out_ED)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    tensors = (x_TD, gate_TK, *weights.tensors().values())
    kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
    key = kinds, plan.layout, plan.filled, weights.activation, torch.is_grad_enabled()
    return _compiled(key)(x_TD, gate_TK, plan, weights)


@lru_cache(maxsize=256)
def _compiled(key: Any) -> Callable[..., Tensor]:
    # torch keeps compiled code with the code object, looks through it in a row and after 8 sizes goes back
    # to plain torch in silence: each size has a code object of its own
    return torch.compile(FunctionType(_staged.__code__.replace(), globals()), dynamic=False)


def _staged(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    # torch 2.13 compiles grouped_mm for bfloat16 only; in other dtypes it is called between compiled parts
    gemm = grouped_mm if x_TD.dtype == torch.bfloat16 else _grouped_mm_as_it_is
    h_RG = gemm(dispatch(x_TD, plan), weights.w_in_EDG, plan, weights.b_in_EG)
    y_RD = gemm(activate(h_RG, weights.activation), weights.w_out_EFD, plan, weights.b_out_ED)
    return combine(y_RD, gate_TK, plan)


@torch.compiler.disable
def _grouped_mm_as_it_is(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None) -> Tensor:
    return grouped_mm(x_RD, w_EDF, plan, b_EF)

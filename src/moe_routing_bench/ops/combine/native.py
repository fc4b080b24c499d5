"""Gather, weigh and sum a token's rows in one C++ pass, compiled on first use; CPU."""

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
# below this many bytes waking a second thread takes longer than adding them
BYTES_FOR_THREADS = 2**17


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan, level: str = "") -> str | None:
    if torch.compiler.is_compiling():
        return "it calls C++ by address, which torch.compile cannot trace"
    if y_RD.device.type != "cpu" or gate_TK.device.type != "cpu" or plan.row_TK.device.type != "cpu":
        return f"it runs on the CPU; the rows are on {y_RD.device}, the plan on {plan.row_TK.device}"
    for tensor in (y_RD, gate_TK, plan.row_TK, plan.pair_R):
        # tensors made to be traced have no memory
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
    row_TK = plan.row_TK.contiguous()
    if torch.is_grad_enabled() and (y_RD.requires_grad or gate_TK.requires_grad):
        return _Combine.apply(y_RD, gate_TK, row_TK, plan.pair_R.contiguous(), level)
    return _combine(y_RD, gate_TK, row_TK, level)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor, level: str
    ) -> Tensor:
        ctx.save_for_backward(y_RD, gate_TK, row_TK, pair_R)
        ctx.level = level
        return _combine(y_RD, gate_TK, row_TK, level)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        y_RD, gate_TK, row_TK, pair_R = ctx.saved_tensors
        wants_y, wants_gate = ctx.needs_input_grad[:2]
        dy_RD, dgate_TK = _backward(dy_TD, y_RD, gate_TK, row_TK, pair_R, wants_y, wants_gate, ctx.level)
        return dy_RD, dgate_TK, None, None, None


def _combine(y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, level: str) -> Tensor:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    gate_TK = gate_TK.to(torch.float32).contiguous()
    y_TD = torch.empty(T, D, dtype=y_RD.dtype)
    wrong = _functions(level)[0](
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
        y_TD.data_ptr(),
    )
    if wrong:
        raise ValueError(f"the plan's row_TK points past its {R} rows; RoutingPlan.validate() says more")
    return y_TD


def _backward(
    dy_TD: Tensor,
    y_RD: Tensor,
    gate_TK: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    wants_y: bool,
    wants_gate: bool,
    level: str,
) -> tuple[Tensor | None, Tensor | None]:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    if D > 1 and dy_TD.stride(1) != 1:
        dy_TD = dy_TD.contiguous()
    wide_TK = gate_TK.to(torch.float32).contiguous()
    dy_RD = torch.empty(R, D, dtype=y_RD.dtype) if wants_y else None
    dgate_TK = torch.empty(T, K, dtype=torch.float32) if wants_gate else None
    size = R * D * y_RD.element_size()
    wrong = _functions(level)[1](
        y_RD.data_ptr(),
        y_RD.stride(0),
        KINDS[y_RD.dtype],
        wide_TK.data_ptr(),
        row_TK.data_ptr(),
        pair_R.data_ptr(),
        dy_TD.data_ptr(),
        dy_TD.stride(0),
        T,
        K,
        R,
        D,
        torch.get_num_threads() if size >= BYTES_FOR_THREADS else 1,
        None if dy_RD is None else dy_RD.data_ptr(),
        None if dgate_TK is None else dgate_TK.data_ptr(),
    )
    assert not wrong, "row_TK changed since the forward pass"
    return dy_RD, None if dgate_TK is None else dgate_TK.to(gate_TK.dtype)


@cache
def _functions(level: str) -> tuple[Callable[..., int], Callable[..., int]]:
    library = native.load(Path(__file__).with_suffix(".cpp"), level or native.best_level() or "")
    number, memory = ctypes.c_int64, ctypes.c_void_p
    combine, backward = library.mrb_combine, library.mrb_combine_backward
    combine.argtypes = [memory, number, number, memory, memory, *[number] * 5, memory]
    backward.argtypes = [
        memory, number, number, memory, memory, memory, memory, *[number] * 6, memory, memory,
    ]  # fmt: skip
    combine.restype = backward.restype = ctypes.c_int
    return combine, backward

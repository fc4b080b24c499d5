"""One C++ kernel from gather to weighted sum, AMX or AVX on packed weights, compiled on first use; CPU.

store=bfloat16 and store=int8 round the weights to that type and compute with the rounded ones, so results are
judged against `stored(weights)`. int8 is symmetric, with a factor for each expert and column.

If gradients are needed it is `staged` with the native dispatch, grouped_gemm and combine: weights that change
at every step are packed in strips as they are used, and what backward needs is kept.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench import cpp
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.plan import RoutingPlan
from moe_routing_bench.prepared import Prepared
from moe_routing_bench.recycled import recycled

CONFIGS: tuple[dict[str, str], ...] = (
    {},
    {"level": "avx512"},
    {"level": "avx2"},
    {"store": "bfloat16"},
    {"store": "int8"},
    {"level": "avx2", "store": "int8"},
)
STORES = ("bfloat16", "int8")
SOURCE = Path(__file__).with_name("native.cpp")
# the enum of native.cpp
ACTIVATIONS = {
    name: i for i, name in enumerate(("gelu", "relu", "silu", "relu2", "geglu", "swiglu", "swiglu_oai"))
}
# return codes of mrb_forward: the weights changed since they were packed; the plan points outside
STALE, WRONG_PLAN = 2, 3
# at least this many weights of each matrix are compared on every call, to find writes torch does not count
SAMPLES = 64


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w_in", "w_out", "b_in", "b_out", "gate")),
        *((name, ctypes.c_void_p) for name in ("s_in", "s_out")),
        *((name, ctypes.c_void_p) for name in ("pair_R", "offset_E1", "count_E", "y")),
        *((name, ctypes.c_void_p) for name in ("unpacked_in", "unpacked_out", "sampled_at", "sampled")),
        *((name, ctypes.c_int64) for name in ("ldx", "T", "K", "D", "F", "E")),
        *(
            (name, ctypes.c_int64)
            for name in ("in_stride", "out_stride", "activation", "threads", "samples", "R")
        ),
    )


@dataclass(frozen=True)
class Packed:
    """The two matrices in panels of 32 columns. A stride of 0 means that experts share memory."""

    w_in: Tensor
    w_out: Tensor
    in_stride: int
    out_stride: int
    scale_in: Tensor | None  # int8: a factor for each expert and column
    scale_out: Tensor | None
    sampled_at: Tensor  # byte offsets of some unpacked weights: of w_in, then of w_out
    sampled: Tensor  # their values when they were packed

    @property
    def nbytes(self) -> int:
        return self.w_in.nbytes + self.w_out.nbytes


@cache
def _library(level: str | None) -> ctypes.CDLL:
    library = cpp.load(SOURCE, level)
    library.mrb_packed_elements.restype = ctypes.c_int64
    library.mrb_packed_elements.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.mrb_pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 6 + [ctypes.c_int] * 3
    library.mrb_pack.restype = None
    library.mrb_forward.argtypes = [ctypes.POINTER(_Problem), ctypes.c_int, ctypes.c_int]
    return library


def stored(weights: ExpertWeights, *, store: str) -> ExpertWeights:
    """The weights it computes with, in float32."""
    matrices: dict[str, Any] = {}
    for name in ("w_in_EDG", "w_out_EFD"):
        w_EKN, scale_EN = _narrow(getattr(weights, name).detach(), store)
        matrices[name] = w_EKN.float() if scale_EN is None else w_EKN.float() * scale_EN.unsqueeze(1)
    return replace(weights.to(dtype=torch.float32), **matrices)


def _narrow(w_EKN: Tensor, store: str | None) -> tuple[Tensor, Tensor | None]:
    if store != "int8":
        return (w_EKN if store is None else w_EKN.to(torch.bfloat16)), None
    scale_EN = w_EKN.abs().amax(dim=1).float() / 127
    scale_EN = torch.where(scale_EN > 0, scale_EN, 1.0)
    # expert by expert, because all of them in float32 may not fit in memory
    each = zip(w_EKN, scale_EN, strict=True)
    return torch.stack([w_KN.float().div(s_N).round_().to(torch.int8) for w_KN, s_N in each]), scale_EN


def pack(weights: ExpertWeights, store: str | None = None) -> Packed:
    library = _library(None)  # the panels are the same at every level
    gated = int(weights.validate().gated)

    def panels(w_EKN: Tensor, gated: int) -> tuple[Tensor, int, Tensor | None]:
        w_EKN, scale_EN = _narrow(w_EKN, store)
        E, depth, columns = w_EKN.shape
        E = 1 if w_EKN.stride(0) == 0 else E
        each = library.mrb_packed_elements(depth, columns, gated)
        packed = recycled.empty(E * each, dtype=w_EKN.dtype)
        library.mrb_pack(
            packed.data_ptr(), w_EKN.data_ptr(), *w_EKN.stride(), E, depth, columns, gated,
            w_EKN.element_size(), torch.get_num_threads(),
        )  # fmt: skip
        return packed, 0 if E == 1 else each, scale_EN

    w_in, in_stride, scale_in = panels(weights.w_in_EDG.detach(), gated)
    w_out, out_stride, scale_out = panels(weights.w_out_EFD.detach(), 0)
    samples = [_sample(w.detach()) for w in (weights.w_in_EDG, weights.w_out_EFD)]
    sampled_at, sampled = (torch.cat(parts) for parts in zip(*samples, strict=True))
    return Packed(w_in, w_out, in_stride, out_stride, scale_in, scale_out, sampled_at, sampled)


def _sample(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """Byte offsets and values of some elements, at least one of every expert."""
    E = w_EKN.shape[0]
    generator = torch.Generator().manual_seed(E)
    place = [torch.randint(n, (max(SAMPLES, E),), generator=generator) for n in w_EKN.shape]
    place[0][:E] = torch.arange(E)
    offset = torch.stack(place, dim=1) @ torch.tensor(w_EKN.stride())
    return offset * w_EKN.element_size(), w_EKN[tuple(place)]


packed = Prepared(pack, nbytes=lambda p: p.nbytes)
_packed_as = {None: packed} | {
    store: Prepared(partial(pack, store=store), nbytes=lambda p: p.nbytes) for store in STORES
}


def unsupported(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    level: str | None = None,
    store: str | None = None,
) -> str | None:
    if store is not None and store not in STORES:
        return f"it stores weights as {' or '.join(STORES)}, not as {store}"
    if store == str(x_TD.dtype).removeprefix("torch."):
        return f"these weights are {store} already; leave store out"
    if x_TD.dtype not in (torch.bfloat16, torch.float32) or weights.w_in_EDG.dtype != x_TD.dtype:
        return f"it computes bfloat16 or float32 throughout, not {x_TD.dtype} with {weights.w_in_EDG.dtype}"
    reason = cpp.unsupported(SOURCE, level, x_TD, plan.pair_R, weights.w_in_EDG)
    return reason or cpp.why_not_cast(x_TD.dtype)


def run(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    level: str | None = None,
    store: str | None = None,
) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()  # needed by the parts and by the kernel
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((x_TD, gate_TK, weights))):
        part = f"native(level={level})" if level else "native"
        staged = op.get(f"staged(dispatch={part},grouped_gemm={part},combine={part})")
        return staged.run(x_TD, gate_TK, plan, weights)
    T, D = x_TD.shape
    if tuple(gate_TK.shape) != (plan.num_tokens, plan.num_choices):
        wanted = f"{plan.num_tokens} x {plan.num_choices}"
        raise ValueError(f"gate_TK has shape {tuple(gate_TK.shape)}, the plan was made for {wanted}")
    if T != plan.num_tokens or D != weights.D or plan.num_experts != weights.num_experts:
        raise ValueError(
            f"x is {T} x {D}, the plan for {plan.num_tokens} tokens and {plan.num_experts} experts, "
            f"the weights for width {weights.D} and {weights.num_experts} experts"
        )
    library, p = _library(level), _packed_as[store](weights)
    y_TD = recycled.empty(T, D, dtype=x_TD.dtype)
    gate_TK = gate_TK.float().contiguous()
    b_in_EG, b_out_ED = (
        None if b is None else b.detach().float().contiguous() for b in (weights.b_in_EG, weights.b_out_ED)
    )
    problem = _Problem(
        x_TD.data_ptr(), p.w_in.data_ptr(), p.w_out.data_ptr(), _pointer(b_in_EG), _pointer(b_out_ED),
        gate_TK.data_ptr(), _pointer(p.scale_in), _pointer(p.scale_out),
        plan.pair_R.data_ptr(), plan.offset_E1.data_ptr(), plan.count_E.data_ptr(),
        y_TD.data_ptr(), weights.w_in_EDG.data_ptr(), weights.w_out_EFD.data_ptr(), p.sampled_at.data_ptr(),
        p.sampled.data_ptr(), x_TD.stride(0), T, max(plan.num_choices, 1), D, weights.F, weights.num_experts,
        p.in_stride, p.out_stride, ACTIVATIONS[weights.activation], torch.get_num_threads(),
        p.sampled.shape[0] // 2, plan.pair_R.shape[0],
    )  # fmt: skip
    failed = library.mrb_forward(problem, x_TD.element_size(), p.w_in.element_size())
    if failed == STALE:
        _packed_as[store].forget(weights)
        return run(x_TD, gate_TK, plan, weights, level=level, store=store)
    if failed == WRONG_PLAN:
        raise ValueError("the plan points past its rows or tokens; validate() says where")
    if failed:
        raise MemoryError("no memory for the workspace of expert_ffn.native")
    return y_TD


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

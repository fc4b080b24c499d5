"""C++: blocks of queries over packed keys, or keys as they are for few queries; CPU."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.ops.attention.op import Rotary, attended, rotated, visible
from moe_routing_bench.ops.rows import KINDS

SOURCE = Path(__file__).with_name("native.cpp")
_function = cpp.Function(SOURCE, "mrb_attention", 26)
CONFIGS: tuple[dict[str, str], ...] = ({}, {"level": "avx2"})


def unsupported(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None,
    level: str = "",
) -> str | None:  # fmt: skip
    if q_BHNA.dtype not in KINDS or not q_BHNA.dtype == k_BJMA.dtype == v_BJMA.dtype:
        return (
            f"it computes in bfloat16, float16 and float32, not {q_BHNA.dtype} with {k_BJMA.dtype} and "
            f"{v_BJMA.dtype}"
        )
    return cpp.unsupported(SOURCE, level, q_BHNA, k_BJMA, v_BJMA)


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None,
    level: str = "",
) -> Tensor:  # fmt: skip
    if torch.is_grad_enabled() and any(one.requires_grad for one in (q_BHNA, k_BJMA, v_BJMA)):
        return _Attention.apply(q_BHNA, k_BJMA, v_BJMA, causal, window, rotary, level)
    return _attention(q_BHNA, k_BJMA, v_BJMA, causal, window, rotary, level)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int,
        rotary: Rotary | None, level: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q_BHNA, k_BJMA, v_BJMA)
        ctx.sees, ctx.rotary = (causal, window), rotary
        return _attention(q_BHNA, k_BJMA, v_BJMA, causal, window, rotary, level)

    @staticmethod
    @cpp.differentiable_once
    def backward(ctx: Any, dy_BHNA: Tensor) -> tuple[Tensor | None, ...]:
        """torch's, a sequence at a time."""
        given, rotary = ctx.saved_tensors, ctx.rotary
        H, J = given[0].shape[1], given[1].shape[1]
        grads = [torch.empty_like(one) for one in given]
        seen_NM = visible(given[0].shape[2], given[1].shape[2], *ctx.sees)
        for b in range(len(dy_BHNA)):
            with torch.enable_grad():
                q, k, v = leaves = [one[b].detach().requires_grad_() for one in given]
                k_HMA, v_HMA = (one.repeat_interleave(H // J, dim=0) for one in (rotated(k, rotary), v))
                y_HNA = attended(rotated(q, rotary), k_HMA, v_HMA, seen_NM)
            for grad, one in zip(grads, torch.autograd.grad(y_HNA, leaves, dy_BHNA[b]), strict=True):
                grad[b] = one
        return (*grads, None, None, None, None)


def _attention(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None,
    level: str,
) -> Tensor:  # fmt: skip
    (B, H, N, A), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    given = [one if one.stride(3) == 1 else one.contiguous() for one in (q_BHNA, k_BJMA, v_BJMA)]
    angles = (
        () if rotary is None else (rotary.cos_MC.float().contiguous(), rotary.sin_MC.float().contiguous())
    )
    y_BHNA = recycled.empty(B, H, N, A, dtype=q_BHNA.dtype)
    failed = _function(
        level,
        *(one.data_ptr() for one in given),
        *(one.data_ptr() for one in angles) if angles else (0, 0),
        y_BHNA.data_ptr(),
        *(step for one in given for step in one.stride()[:3]),
        KINDS[q_BHNA.dtype],
        *(B, H, J, N, M, A),
        *struct.unpack("q", struct.pack("d", A**-0.5)),
        causal,
        window,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the workspace of attention.native")
    return y_BHNA

"""C++ keeps the K best of each row in registers, one token per lane. Compiled at first use; CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.ops.rows import KINDS

SOURCE = Path(__file__).with_name("native.cpp")
MAX_CHOICES = 16  # the constant MOST of native.cpp
# about 50 us for one thread; less work is finished before a second thread wakes up
STEPS_FOR_THREADS = 2**19
_select = cpp.Function(SOURCE, "mrb_topk", fields=9)


def unsupported(score_TE: Tensor, K: int, level: str = "") -> str | None:
    if score_TE.dtype not in KINDS:
        return f"it takes float32, bfloat16 and float16, not {score_TE.dtype}"
    if not 1 <= K <= MAX_CHOICES or K > score_TE.shape[1]:
        return f"it keeps 1 to {MAX_CHOICES} choices of {score_TE.shape[1]} experts in registers, not {K}"
    return cpp.unsupported(SOURCE, level, score_TE)


def run(score_TE: Tensor, K: int, level: str = "") -> tuple[Tensor, Tensor]:
    if score_TE.requires_grad and torch.is_grad_enabled():
        expert_TK = _topk(score_TE.detach(), K, level)[1]
        return score_TE.gather(1, expert_TK), expert_TK
    return _topk(score_TE, K, level)


def _topk(score_TE: Tensor, K: int, level: str) -> tuple[Tensor, Tensor]:
    T, E = score_TE.shape
    stride = E
    if not score_TE.is_contiguous():
        score_TE = score_TE if score_TE.stride(1) == 1 else score_TE.contiguous()
        stride = score_TE.stride(0)
    value_TK, expert_TK = score_TE.new_empty(T, K), torch.empty(T, K, dtype=torch.int64)
    _select(
        level,
        score_TE.data_ptr(),
        stride,
        KINDS[score_TE.dtype],
        T,
        E,
        K,
        torch.get_num_threads() if T * E * (K + 4) >= STEPS_FOR_THREADS else 1,
        value_TK.data_ptr(),
        expert_TK.data_ptr(),
    )
    return value_TK, expert_TK

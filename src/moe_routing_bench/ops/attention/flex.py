"""torch's flex_attention, compiled by its first call with these sizes; forward only; CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.ops import inductor
from moe_routing_bench.ops.attention.op import Rotary, rotated

FORWARD_ONLY = COMPILES = True
MAX_PROGRAMS = 256  # torch.compile gives up after 8
_compiled_for: set[tuple[object, ...]] = set()


@cache
def _attention() -> Callable[..., Tensor]:
    inductor.load()
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True, options=inductor.OPTIONS)


@cache
def _mask(N: int, M: int, causal: bool, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        ahead = m - n - (M - N)
        return (ahead <= 0 if causal else ahead < window) & (ahead > -window if window else ahead <= M)

    return create_block_mask(seen, None, None, N, M, device="cpu") if causal or window else None


def unsupported(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> str | None:
    if q_BHNA.dtype not in (torch.float32, torch.bfloat16):
        return f"it is compiled for float32 and bfloat16, not for {q_BHNA.dtype}"
    if not k_BJMA.shape[2]:
        return "torch's compiled attention needs at least one key"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "torch compiles flex_attention for x86 processors with AVX2 or AVX-512"
    return inductor.why_not(q_BHNA, k_BJMA, v_BJMA)


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Tensor:
    if not q_BHNA.numel():
        return torch.empty_like(q_BHNA)
    q, k, v = (
        one.detach().contiguous() for one in (rotated(q_BHNA, rotary), rotated(k_BJMA, rotary), v_BJMA)
    )
    program = (q.shape, k.shape, q.dtype, causal, window, torch.get_num_threads())
    limit = (
        torch._dynamo.config.patch(recompile_limit=MAX_PROGRAMS)
        if program not in _compiled_for
        else nullcontext()
    )
    mask = _mask(q.shape[2], k.shape[2], causal, window)
    with torch.no_grad(), limit:
        y_BHNA = _attention()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    _compiled_for.add(program)
    return y_BHNA

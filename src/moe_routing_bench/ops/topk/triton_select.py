"""Triton: K rounds that each find the largest integer key of score and id; one program per block of tokens.

The upper bits of the key are the score's bits, changed so that they sort like the numbers; below them is an
id that counts down. So the largest key is the highest score, and of equal scores the lower id. NaN comes
before infinity and -inf comes last, as in torch.sort. A round is one maximum over E, so a token needs K * E
steps: this is for small K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.targets import Target, target_of

# one program holds a row of scores in its registers
MAX_EXPERTS = 4096
TILE_SCORES = 2048  # scores of one program: 16 of 64-bit keys in each of 128 lanes
NUM_WARPS = 4


def unsupported(score_TE: Tensor, K: int) -> str | None:
    if score_TE.dtype not in FLOATS:
        return f"a {score_TE.dtype} score leaves no room for the expert id in a 64-bit key"
    if score_TE.shape[1] > MAX_EXPERTS:
        return f"it holds all scores of a token at once, up to {MAX_EXPERTS} experts, not {score_TE.shape[1]}"
    return gpu.why_not(score_TE)


def run(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    return topk_select(score_TE, K)


@triton_op("moe_routing_bench::topk_select", mutates_args={})
@gpu.on_its_device
def topk_select(score_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    T, E = score_TE.shape
    value_TK = score_TE.new_empty(T, K)
    expert_TK = score_TE.new_empty(T, K, dtype=torch.int64)
    if T:
        constants = _constants(E, K)
        grid = (triton.cdiv(T, constants["TILE_TOKENS"]),)
        wrap_triton(_select)[grid](
            score_TE,
            value_TK,
            expert_TK,
            T,
            score_TE.stride(0),
            score_TE.stride(1),
            **constants,
            num_warps=target_of(score_TE.device).warps(NUM_WARPS),
        )
    return value_TK, expert_TK


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.num_experts = inputs[0].shape[1]


def _backward(ctx: Any, d_value_TK: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (expert_TK,) = ctx.saved_tensors
    d_score_TE = d_value_TK.new_zeros(expert_TK.shape[0], ctx.num_experts)
    return d_score_TE.scatter(1, expert_TK, d_value_TK), None


topk_select.register_autograd(_backward, setup_context=_remember)


def _constants(E: int, K: int) -> dict[str, int]:
    padded = triton.next_power_of_2(E)
    return {"E": E, "K": K, "E_PADDED": padded, "TILE_TOKENS": max(1, TILE_SCORES // padded)}


@triton.jit(do_not_specialize=["T"])
def _select(
    score_TE,
    value_TK,
    expert_TK,
    T,
    stride_t,
    stride_e,
    E: tl.constexpr,
    K: tl.constexpr,
    E_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    token_t = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    expert_E = tl.arange(0, E_PADDED)
    here_t = token_t < T
    score_t = score_TE + token_t * stride_t
    real_tE = here_t[:, None] & (expert_E < E)[None, :]
    x_tE = tl.load(score_t[:, None] + expert_E[None, :] * stride_e, mask=real_tE, other=0.0).to(tl.float32)
    key_tE = gpu.key_of(x_tE, expert_E[None, :], E_PADDED)
    key_tE = tl.where((expert_E < E)[None, :], key_tE, gpu.NO_KEY)
    for k in range(K):
        best_t = tl.max(key_tE, axis=1)
        key_tE = tl.where(key_tE == best_t[:, None], gpu.NO_KEY, key_tE)
        chosen_t = gpu.id_of(best_t, E_PADDED)
        # read again, so that it is an exact copy in any type
        value_t = tl.load(score_t + chosen_t * stride_e, mask=here_t, other=0.0)
        tl.store(value_TK + token_t * K + k, value_t, mask=here_t)
        tl.store(expert_TK + token_t * K + k, chosen_t, mask=here_t)


def compilations(sizes: MoEShape, target: Target) -> Iterator[gpu.Compilation]:
    constants = _constants(sizes.E, sizes.K)
    tile = constants["TILE_TOKENS"]
    yield gpu.Compilation(
        name="select",
        kernel=_select,
        signature={
            "score_TE": "*fp32", "value_TK": "*fp32", "expert_TK": "*i64",
            "T": "i32", "stride_t": "i32:16", "stride_e": "i32:1",
        },
        constexprs=constants,
        num_warps=target.warps(NUM_WARPS),
        num_stages=1,
        expects=("vector_load",),
        flops=tile * sizes.E * sizes.K,
        bytes=tile * (4 * sizes.E + 12 * sizes.K),
    )  # fmt: skip

"""Triton: scores, groups, K rounds of the largest key, and gates in one kernel; one program per block of
tokens.

A program holds a row of logits in registers as GROUPS x SIZE places, both rounded up to a power of two. The
key contains s + bias and the expert, as in topk.triton_select. Logits are read once; gates and ids are
written once. The backward kernel computes the scores again from the logits.
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
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.ops.targets import Target, target_of

# one program holds all places of a token in its registers
MAX_PLACES = 4096
TILE_PLACES = 1024  # logits of one program
NUM_WARPS = 4


def unsupported(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule) -> str | None:
    E = logits_TE.shape[1]
    if logits_TE.dtype not in FLOATS:
        return f"it computes in float32, which is not precise enough for {logits_TE.dtype} logits"
    if (places := _places(E, rule.groups)) > MAX_PLACES:
        return f"it holds all {places} places of a token at once, up to {MAX_PLACES}"
    return gpu.why_not(logits_TE, bias_E)


def run(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    return score_topk_fused(
        logits_TE,
        None if bias_E is None else bias_E.detach(),
        K,
        rule.score,
        rule.renormalise,
        rule.scale,
        rule.groups,
        rule.keep_groups,
        rule.group_score,
    )


@triton_op("moe_routing_bench::score_topk_fused", mutates_args={})
@gpu.on_its_device
def score_topk_fused(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    K: int,
    score: str,
    renormalise: bool,
    scale: float,
    groups: int,
    keep_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    T, E = logits_TE.shape
    gate_TK = logits_TE.new_empty(T, K, dtype=torch.float32)
    expert_TK = logits_TE.new_empty(T, K, dtype=torch.int64)
    if T:
        constants = _constants(E, K, score, renormalise, groups, keep_groups, group_score, bias_E is not None)
        wrap_triton(_score_topk)[(triton.cdiv(T, constants["TILE_TOKENS"]),)](
            logits_TE,
            logits_TE if bias_E is None else bias_E.contiguous(),  # not read without a bias
            gate_TK,
            expert_TK,
            scale,
            T,
            logits_TE.stride(0),
            logits_TE.stride(1),
            **constants,
            num_warps=target_of(logits_TE.device).warps(NUM_WARPS),
        )
    return gate_TK, expert_TK


@triton_op("moe_routing_bench::score_topk_fused_backward", mutates_args={})
@gpu.on_its_device
def score_topk_fused_backward(
    d_gate_TK: Tensor,
    gate_TK: Tensor,
    expert_TK: Tensor,
    logits_TE: Tensor,
    score: str,
    renormalise: bool,
    scale: float,
) -> Tensor:
    (T, K), E = gate_TK.shape, logits_TE.shape[1]
    d_logits_TE = logits_TE.new_empty(T, E)
    if T:
        constants = _backward_constants(E, K, score, renormalise)
        wrap_triton(_d_score_topk)[(triton.cdiv(T, constants["TILE_TOKENS"]),)](
            d_gate_TK.contiguous(),
            gate_TK,
            expert_TK,
            logits_TE,
            d_logits_TE,
            scale,
            T,
            logits_TE.stride(0),
            logits_TE.stride(1),
            **constants,
            num_warps=target_of(logits_TE.device).warps(NUM_WARPS),
        )
    return d_logits_TE


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_TE, _, _, ctx.score, ctx.renormalise, ctx.scale, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits_TE, *output)


def _backward(ctx: Any, d_gate_TK: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_TE, gate_TK, expert_TK = ctx.saved_tensors
    d_logits_TE = score_topk_fused_backward(
        d_gate_TK, gate_TK, expert_TK, logits_TE, ctx.score, ctx.renormalise, ctx.scale
    )
    return d_logits_TE, *[None] * 8


score_topk_fused.register_autograd(_backward, setup_context=_remember)


def _places(E: int, groups: int) -> int:
    return triton.next_power_of_2(groups) * triton.next_power_of_2(E // groups)


def _constants(
    E: int, K: int, score: str, renormalise: bool, groups: int, keep: int, group_score: str, bias: bool
) -> dict[str, Any]:
    if keep == groups:
        groups = keep = 1  # no group is excluded
    return {
        "E": E,
        "K": K,
        "K_PADDED": triton.next_power_of_2(K),
        "SCORE": score,
        "RENORMALISE": renormalise,
        "BIAS": bias,
        "GROUPS": groups,
        "KEEP": keep,
        "BEST": 1 if group_score == "max" else 2,
        "GROUPS_PADDED": triton.next_power_of_2(groups),
        "SIZE_PADDED": triton.next_power_of_2(E // groups),
        "TILE_TOKENS": max(1, TILE_PLACES // _places(E, groups)),
    }


def _backward_constants(E: int, K: int, score: str, renormalise: bool) -> dict[str, Any]:
    padded = triton.next_power_of_2(E)
    return {
        "E": E,
        "K": K,
        "K_PADDED": triton.next_power_of_2(K),
        "E_PADDED": padded,
        "SCORE": score,
        "RENORMALISE": renormalise,
        "TILE_TOKENS": max(1, TILE_PLACES // padded),
    }


@triton.jit
def _log1p(u):
    """log(1 + u) for 0 <= u <= 1 that keeps small u: the quotient undoes the rounding of 1 + u (Kahan)."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _softplus(z):
    return tl.where(z > 0.0, z, 0.0) + _log1p(tl.exp(-tl.abs(z)))


@triton.jit
def _score_and_log(z_tF, real_tF, SCORE: tl.constexpr):
    """s and log s."""
    if SCORE == "softmax":
        shifted_tF = z_tF - tl.max(tl.where(real_tF, z_tF, float("-inf")), axis=1)[:, None]
        power_tF = tl.where(real_tF, tl.exp(shifted_tF), 0.0)
        total_t1 = tl.sum(power_tF, axis=1)[:, None]
        return power_tF / total_t1, shifted_tF - tl.log(total_t1)
    elif SCORE == "sigmoid":
        small_tF = tl.exp(-tl.abs(z_tF))
        score_tF = tl.where(z_tF < 0.0, small_tF, 1.0) / (1.0 + small_tF)
        return score_tF, tl.where(z_tF < 0.0, z_tF, 0.0) - _log1p(small_tF)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        soft_tF = _softplus(z_tF)
        # below -40 softplus(z) is exp(z) to the last bit, and soon underflows
        log_tF = tl.where(z_tF < -40.0, z_tF, tl.log(tl.where(z_tF < -40.0, 1.0, soft_tF)))
        return tl.sqrt(soft_tF), 0.5 * log_tF


@triton.jit(do_not_specialize=["T"])
def _score_topk(
    logits_TE,
    bias_E,
    gate_TK,
    expert_TK,
    scale,
    T,
    stride_t,
    stride_e,
    E: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    BEST: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    PLACES: tl.constexpr = GROUPS_PADDED * SIZE_PADDED
    SIZE: tl.constexpr = E // GROUPS
    token_t = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    here_t = token_t < T
    place_F = tl.arange(0, PLACES)
    expert_F = place_F // SIZE_PADDED * SIZE + place_F % SIZE_PADDED
    real_F = (place_F // SIZE_PADDED < GROUPS) & (place_F % SIZE_PADDED < SIZE)
    real_tF = real_F[None, :] & here_t[:, None]
    z_tF = tl.load(
        logits_TE + token_t[:, None] * stride_t + expert_F[None, :] * stride_e, mask=real_tF, other=0.0
    ).to(tl.float32)
    score_tF, log_tF = _score_and_log(z_tF, real_F[None, :], SCORE)
    if BIAS:
        score_tF += tl.load(bias_E + expert_F, mask=real_F, other=0.0).to(tl.float32)[None, :]
    by_tF = z_tF if SCORE == "softmax" and not BIAS else score_tF
    key_tF = tl.where(real_F[None, :], gpu.key_of(by_tF, place_F[None, :], PLACES), gpu.NO_KEY)

    if KEEP < GROUPS:
        score_tgs = tl.reshape(score_tF, (TILE_TOKENS, GROUPS_PADDED, SIZE_PADDED))
        rank_tF = tl.where(real_F[None, :], gpu.key_of(score_tF, place_F[None, :], PLACES), gpu.NO_KEY)
        rank_tgs = tl.reshape(rank_tF, (TILE_TOKENS, GROUPS_PADDED, SIZE_PADDED))
        total_tg = tl.zeros((TILE_TOKENS, GROUPS_PADDED), tl.float32)
        for _ in tl.static_range(BEST):
            best_tg = tl.max(rank_tgs, axis=2)
            first_tgs = rank_tgs == best_tg[:, :, None]
            # groups that do not exist have NO_KEY everywhere; their sums are meaningless and never read
            total_tg += tl.sum(tl.where(first_tgs, score_tgs, 0.0), axis=2)
            rank_tgs = tl.where(first_tgs, gpu.NO_KEY, rank_tgs)
        group_g = tl.arange(0, GROUPS_PADDED)
        group_key_tg = gpu.key_of(total_tg, group_g[None, :], GROUPS_PADDED)
        group_key_tg = tl.where((group_g < GROUPS)[None, :], group_key_tg, gpu.NO_KEY)
        kept_tg = tl.zeros((TILE_TOKENS, GROUPS_PADDED), tl.int32)
        for _ in tl.static_range(KEEP):
            best_t1 = tl.max(group_key_tg, axis=1)[:, None]
            kept_tg = tl.where(group_key_tg == best_t1, 1, kept_tg)
            group_key_tg = tl.where(group_key_tg == best_t1, gpu.NO_KEY, group_key_tg)
        kept_tgs = tl.broadcast_to(kept_tg[:, :, None], (TILE_TOKENS, GROUPS_PADDED, SIZE_PADDED))
        key_tF = tl.where(tl.reshape(kept_tgs, (TILE_TOKENS, PLACES)) > 0, key_tF, gpu.NO_KEY)

    choice_K = tl.arange(0, K_PADDED)
    log_tK = tl.full((TILE_TOKENS, K_PADDED), float("-inf"), tl.float32)
    chosen_tK = tl.zeros((TILE_TOKENS, K_PADDED), tl.int64)
    for k in range(K):
        best_t = tl.max(key_tF, axis=1)
        chosen_tF = key_tF == best_t[:, None]
        log_t = tl.sum(tl.where(chosen_tF, log_tF, 0.0), axis=1)
        key_tF = tl.where(chosen_tF, gpu.NO_KEY, key_tF)
        log_tK = tl.where((choice_K == k)[None, :], log_t[:, None], log_tK)
        place_t = gpu.id_of(best_t, PLACES)
        expert_t = place_t // SIZE_PADDED * SIZE + place_t % SIZE_PADDED
        chosen_tK = tl.where((choice_K == k)[None, :], expert_t[:, None], chosen_tK)
    if RENORMALISE:
        power_tK = tl.exp(log_tK - tl.max(log_tK, axis=1)[:, None])
        gate_tK = power_tK / tl.sum(power_tK, axis=1)[:, None]
    else:
        gate_tK = tl.exp(log_tK)
    mask_tK = here_t[:, None] & (choice_K < K)[None, :]
    out_tK = token_t[:, None] * K + choice_K[None, :]
    tl.store(gate_TK + out_tK, gate_tK * scale, mask=mask_tK)
    tl.store(expert_TK + out_tK, chosen_tK, mask=mask_tK)


@triton.jit(do_not_specialize=["T"])
def _d_score_topk(
    d_gate_TK,
    gate_TK,
    expert_TK,
    logits_TE,
    d_logits_TE,
    scale,
    T,
    stride_t,
    stride_e,
    E: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """With l = log s of the chosen experts, g = gate and d_ the gradients:
    d_l_k = g_k d_g_k; renormalised: g_k sum_j g_j / scale (d_g_k - d_g_j), which loses no digits if one gate
    is almost 1.
    d_z_e = d_l_e (1 - s_e) for sigmoid, d_l_e sigmoid(z_e) / (2 softplus(z_e)) for sqrtsoftplus, and
    d_l_e - s_e sum_k d_l_k for softmax; this sum is zero if the gates are renormalised."""
    token_t = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    here_t = token_t < T
    choice_K = tl.arange(0, K_PADDED)
    mask_tK = here_t[:, None] & (choice_K < K)[None, :]
    pair_tK = token_t[:, None] * K + choice_K[None, :]
    gate_tK = tl.load(gate_TK + pair_tK, mask=mask_tK, other=0.0)
    d_gate_tK = tl.load(d_gate_TK + pair_tK, mask=mask_tK, other=0.0)

    expert_E = tl.arange(0, E_PADDED)
    real_tE = here_t[:, None] & (expert_E < E)[None, :]
    d_log_tE = tl.zeros((TILE_TOKENS, E_PADDED), tl.float32)
    for k in range(K):
        pair_t = token_t * K + k
        chosen_t = tl.load(expert_TK + pair_t, mask=here_t, other=-1)
        gate_t = tl.load(gate_TK + pair_t, mask=here_t, other=0.0)
        d_gate_t = tl.load(d_gate_TK + pair_t, mask=here_t, other=0.0)
        if RENORMALISE:
            d_gate_t = tl.sum(gate_tK * (d_gate_t[:, None] - d_gate_tK), axis=1) / scale
        d_log_t = gate_t * d_gate_t
        d_log_tE = tl.where(expert_E[None, :] == chosen_t[:, None], d_log_t[:, None], d_log_tE)
    z_tE = tl.load(
        logits_TE + token_t[:, None] * stride_t + expert_E[None, :] * stride_e, mask=real_tE, other=0.0
    ).to(tl.float32)
    if SCORE == "softmax":
        if RENORMALISE:
            d_z_tE = d_log_tE
        else:
            score_tE, _ = _score_and_log(z_tE, (expert_E < E)[None, :], SCORE)
            d_z_tE = d_log_tE - score_tE * tl.sum(gate_tK * d_gate_tK, axis=1)[:, None]
    else:
        small_tE = tl.exp(-tl.abs(z_tE))
        if SCORE == "sigmoid":
            d_z_tE = d_log_tE * tl.where(z_tE < 0.0, 1.0, small_tE) / (1.0 + small_tE)
        else:
            sigmoid_tE = tl.where(z_tE < 0.0, small_tE, 1.0) / (1.0 + small_tE)
            ratio_tE = sigmoid_tE / tl.where(z_tE < -40.0, 1.0, _softplus(z_tE))
            d_z_tE = d_log_tE * 0.5 * tl.where(z_tE < -40.0, 1.0, ratio_tE)
    out_tE = d_logits_TE + token_t[:, None] * E + expert_E[None, :]
    tl.store(out_tE, d_z_tE.to(d_logits_TE.dtype.element_ty), mask=real_tE)


def compilations(sizes: MoEShape, target: Target) -> Iterator[gpu.Compilation]:
    E, K, num_warps = sizes.E, sizes.K, target.warps(NUM_WARPS)
    # DeepSeek-V3's rule where 8 groups fit, and Mixtral's
    rules = {"softmax": ("softmax", True, 1, 1, "max", False)}
    if E % 8 == 0 and E >= 64:
        rules["sigmoid_groups"] = ("sigmoid", True, 8, 4, "top2_sum", True)
    strides = {"scale": "fp32", "T": "i32", "stride_t": "i32:16", "stride_e": "i32:1"}
    for name, rule in rules.items():
        constants = _constants(E, K, *rule)
        tile = constants["TILE_TOKENS"]
        yield gpu.Compilation(
            name=f"forward_{name}",
            kernel=_score_topk,
            signature={
                "logits_TE": "*fp32", "bias_E": "*fp32", "gate_TK": "*fp32", "expert_TK": "*i64", **strides,
            },
            constexprs=constants,
            num_warps=num_warps,
            num_stages=1,
            expects=("vector_load",),
            flops=tile * E * (K + 8),
            bytes=tile * (4 * E + 12 * K),
        )  # fmt: skip
        constants = _backward_constants(E, K, *rule[:2])
        tile = constants["TILE_TOKENS"]
        yield gpu.Compilation(
            name=f"backward_{name}",
            kernel=_d_score_topk,
            signature={
                "d_gate_TK": "*fp32", "gate_TK": "*fp32", "expert_TK": "*i64", "logits_TE": "*fp32",
                "d_logits_TE": "*fp32", **strides,
            },
            constexprs=constants,
            num_warps=num_warps,
            num_stages=1,
            flops=tile * E * (K + 8),
            bytes=tile * (8 * E + 16 * K),
        )  # fmt: skip

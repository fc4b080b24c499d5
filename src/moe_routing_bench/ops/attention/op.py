"""attention: each query's mean of the values, weighted by its keys.   q_BHNA, k_BJMA, v_BJMA, ... -> y_BHNA

y = softmax(q k^T / sqrt(A)) v. H / J neighbouring heads of the queries share one head of keys and values. The
queries are the last N of M positions: with a cache of keys, query n stands at position M - N + n.
causal: a query sees no later key. window: it sees only keys fewer than so many positions away; 0 means all.
A query that sees no key gets exactly zero. With rotary, queries and keys are turned by the angles of their
positions first; None: they are used as they are. The softmax is computed in at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.core.accuracy import judge as judge_values
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosine and sine of the angle of each position and pair: Rotary(cos_MC=angle.cos(), sin_MC=angle.sin()).

    Number c of a query or key is paired with number c + C, where C is half of A.
    """

    cos_MC: Tensor
    sin_MC: Tensor


def visible(N: int, M: int, causal: bool, window: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Which query sees which key, N x M; None: every query sees all."""
    if not causal and not window:
        return None
    position_N1 = torch.arange(M - N, M, device=device).unsqueeze(1)
    key_M = torch.arange(M, device=device)
    seen_NM = torch.ones(N, M, dtype=torch.bool, device=device)
    if causal:
        seen_NM &= key_M <= position_N1
    if window:
        seen_NM &= (key_M - position_N1).abs() < window
    return seen_NM


def rotated(x: Tensor, rotary: Rotary | None) -> Tensor:
    """Queries or keys, ... x positions x A; they stand at the last positions."""
    if rotary is None:
        return x
    cos, sin = (table[len(table) - x.shape[-2] :] for table in (rotary.cos_MC, rotary.sin_MC))
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attended(q_NA: Tensor, k_MA: Tensor, v_MA: Tensor, seen_NM: Tensor | None) -> Tensor:
    """Computes one head, or many with more dimensions in front."""
    score_NM = q_NA @ k_MA.transpose(-1, -2) * q_NA.shape[-1] ** -0.5
    score_NM = score_NM.to(torch.promote_types(score_NM.dtype, torch.float32))
    if seen_NM is None:
        return score_NM.softmax(dim=-1).to(v_MA.dtype) @ v_MA
    some_N1 = seen_NM.any(dim=-1, keepdim=True)  # where there is none, softmax would divide 0 by 0
    share_NM = score_NM.masked_fill(~seen_NM & some_N1, -torch.inf).softmax(dim=-1)
    return share_NM.masked_fill(~seen_NM, 0.0).to(v_MA.dtype) @ v_MA


def reference(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Tensor:
    """Head by head: scores of all heads at once would be B x H x N x M numbers."""
    (B, H, N, _), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    seen_NM = visible(N, M, causal, window, q_BHNA.device)
    q_BHNA, k_BJMA = rotated(q_BHNA, rotary), rotated(k_BJMA, rotary)
    heads = [
        attended(q_BHNA[b, h], k_BJMA[b, h * J // H], v_BJMA[b, h * J // H], seen_NM)
        for b in range(B)
        for h in range(H)
    ]
    return torch.stack(heads).view(q_BHNA.shape) if heads else torch.zeros_like(q_BHNA)


def cost(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Cost:
    (B, H, N, A), M = q_BHNA.shape, k_BJMA.shape[2]
    seen_NM = visible(N, M, causal, window)
    pairs = N * M if seen_NM is None else int(seen_NM.sum())
    keys = M if seen_NM is None else int(seen_NM.any(dim=0).sum())
    flops = 4 * B * H * pairs * A
    read = 2 * k_BJMA.shape[0] * k_BJMA.shape[1] * keys * A + 2 * q_BHNA.numel()
    return Cost(useful_flops=flops, executed_flops=flops, activation_bytes=read * q_BHNA.element_size())


def judge_gradient(of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
    """Allows twice as much as usual: flash kernels compute the weights again, from a rounded sum."""
    oracle, baseline, others = expected.oracle, expected.baseline, expected.more(gradient.numel())

    def doubled(oracle: Tensor, baseline: Tensor) -> Tensor:
        return (oracle + 2 * (baseline.to(oracle.dtype) - oracle)).to(baseline.dtype)

    others = [(one, doubled(one, plain)) for one, plain in others]
    return [judge_values(gradient, oracle, doubled(oracle, baseline), others)]


op = Op(
    __package__, reference, cost=cost, judge_gradient=judge_gradient, default="plain", stage=11,
    usual=("plain", "sdpa", "sdpa_folded", "flex", "native"),
)  # fmt: skip


def attention(
    q_BHNA: Tensor,
    k_BJMA: Tensor,
    v_BJMA: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    rotary: Rotary | None = None,
    impl: str = "auto",
) -> Tensor:
    """Let each query see the values of the keys before it.

    >>> q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[[[0.0, 2.0], [4.0, 6.0]]]])
    >>> mrb.attention(q, k, v).tolist()  # equal weights: the mean of both values
    [[[[2.0, 4.0]]]]
    """
    (B, H, _, A), (B_k, J, M, A_k) = q_BHNA.shape, k_BJMA.shape
    if (B_k, A_k) != (B, A) or v_BJMA.shape != k_BJMA.shape or H % max(J, 1):
        raise ValueError(
            f"queries {tuple(q_BHNA.shape)} do not fit keys {tuple(k_BJMA.shape)} and values "
            f"{tuple(v_BJMA.shape)}: sequences and widths must agree, and J must divide H"
        )
    if rotary is not None and not rotary.cos_MC.shape == rotary.sin_MC.shape == (M, A // 2):
        raise ValueError(f"the angles have the shape {tuple(rotary.cos_MC.shape)}, not {(M, A // 2)}")
    return resolve(op, impl)(q_BHNA, k_BJMA, v_BJMA, causal, window, rotary)

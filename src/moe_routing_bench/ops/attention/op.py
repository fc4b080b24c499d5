"""attention: each query's mean of the values, weighted by its keys.   q_BHNA, k_BJMA, v_BJMA, ... -> y_BHNA

y = softmax(q k^T / sqrt(A)) v. H / J neighbouring heads of the queries share one head of keys and values. The
queries are the last N of M positions: with a cache of keys, query n stands at position M - N + n.
causal: a query sees no later key. window: it sees only keys fewer than so many positions away; 0 means all.
A query that sees no key gets exactly zero. rotary_2MC holds cosine and sine of the angle of each position and
pair of numbers (C = A / 2): queries and keys are rotated by it first, number c with number c + C. None: they
are used as they are. The softmax is computed in at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


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


def rotated(x: Tensor, rotary_2MC: Tensor | None) -> Tensor:
    """Of queries or keys, the last two dimensions being positions and numbers; queries have the last angles."""
    if rotary_2MC is None:
        return x
    cos, sin = rotary_2MC[:, rotary_2MC.shape[1] - x.shape[-2] :].unbind(0)
    first, second = x.to(torch.promote_types(x.dtype, rotary_2MC.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attended(q_NA: Tensor, k_MA: Tensor, v_MA: Tensor, seen_NM: Tensor | None) -> Tensor:
    """Of one head, or of many with more dimensions in front."""
    score_NM = q_NA @ k_MA.transpose(-1, -2) * q_NA.shape[-1] ** -0.5
    score_NM = score_NM.to(torch.promote_types(score_NM.dtype, torch.float32))
    if seen_NM is None:
        return score_NM.softmax(dim=-1).to(v_MA.dtype) @ v_MA
    some_N1 = seen_NM.any(dim=-1, keepdim=True)  # where there is none, softmax would divide 0 by 0
    share_NM = score_NM.masked_fill(~seen_NM & some_N1, -torch.inf).softmax(dim=-1)
    return share_NM.masked_fill(~seen_NM, 0.0).to(v_MA.dtype) @ v_MA


def reference(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary_2MC: Tensor | None
) -> Tensor:
    """Head by head: scores of all heads at once would be B x H x N x M numbers."""
    (B, H, N, _), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    seen_NM = visible(N, M, causal, window, q_BHNA.device)
    q_BHNA, k_BJMA = rotated(q_BHNA, rotary_2MC), rotated(k_BJMA, rotary_2MC)
    heads = [
        attended(q_BHNA[b, h], k_BJMA[b, h * J // H], v_BJMA[b, h * J // H], seen_NM)
        for b in range(B)
        for h in range(H)
    ]
    return torch.stack(heads).view(q_BHNA.shape) if heads else torch.zeros_like(q_BHNA)


def cost(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary_2MC: Tensor | None
) -> Cost:
    (B, H, N, A), M = q_BHNA.shape, k_BJMA.shape[2]
    seen_NM = visible(N, M, causal, window)
    pairs = N * M if seen_NM is None else int(seen_NM.sum())
    keys = M if seen_NM is None else int(seen_NM.any(dim=0).sum())
    flops = 4 * B * H * pairs * A
    read = 2 * k_BJMA.shape[0] * k_BJMA.shape[1] * keys * A + 2 * q_BHNA.numel()
    return Cost(useful_flops=flops, executed_flops=flops, activation_bytes=read * q_BHNA.element_size())


op = Op(__package__, reference, cost=cost, default="plain", stage=11)


def attention(
    q_BHNA: Tensor,
    k_BJMA: Tensor,
    v_BJMA: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    rotary_2MC: Tensor | None = None,
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
    if rotary_2MC is not None and rotary_2MC.shape != (2, M, A // 2):
        raise ValueError(f"rotary_2MC has the shape {tuple(rotary_2MC.shape)}, not {(2, M, A // 2)}")
    return resolve(op, impl)(q_BHNA, k_BJMA, v_BJMA, causal, window, rotary_2MC)

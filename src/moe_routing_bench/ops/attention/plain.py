"""Two products and a softmax over all scores at once: B x H x N x M numbers."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.ops.attention.op import Rotary, attended, rotated, visible


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Tensor:
    (_, H, N, _), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    seen_NM = visible(N, M, causal, window, q_BHNA.device)
    q_BHNA, k_BJMA = rotated(q_BHNA, rotary), rotated(k_BJMA, rotary)
    k_BHMA, v_BHMA = (one.repeat_interleave(H // J, dim=1) for one in (k_BJMA, v_BJMA))
    return attended(q_BHNA, k_BHMA, v_BHMA, seen_NM)

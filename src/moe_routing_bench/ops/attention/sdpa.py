"""torch's scaled_dot_product_attention, with its own sharing of keys among heads."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_routing_bench.ops.attention.op import Rotary, rotated, visible


def unsupported(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> str | None:
    if not k_BJMA.shape[2]:
        return "torch's attention needs at least one key"
    if causal and q_BHNA.shape[2] > k_BJMA.shape[2]:
        return "torch's attention gives NaN to queries that see no key"
    return None


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Tensor:
    N, M = q_BHNA.shape[2], k_BJMA.shape[2]
    plain_causal = causal and not window and N == M and N > 1
    seen_NM = (
        None if plain_causal or (N == 1 and not window) else visible(N, M, causal, window, q_BHNA.device)
    )
    return scaled_dot_product_attention(
        rotated(q_BHNA, rotary),
        rotated(k_BJMA, rotary),
        v_BJMA,
        attn_mask=seen_NM,
        is_causal=plain_causal,
        enable_gqa=q_BHNA.shape[1] != k_BJMA.shape[1],
    )

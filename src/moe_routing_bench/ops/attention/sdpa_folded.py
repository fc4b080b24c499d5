"""torch's attention for one query per sequence: heads that share keys become its queries."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_routing_bench.ops.attention.op import Rotary, rotated


def unsupported(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> str | None:
    if q_BHNA.shape[2] != 1:
        return f"it folds the heads of one query, not of {q_BHNA.shape[2]}: each would need its own mask"
    return None if k_BJMA.shape[2] else "torch's attention needs at least one key"


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> Tensor:
    B, H, _, A = q_BHNA.shape
    q_BHNA, k_BJMA = rotated(q_BHNA, rotary), rotated(k_BJMA, rotary)
    if window:  # the query is the last position
        k_BJMA, v_BJMA = k_BJMA[:, :, -window:], v_BJMA[:, :, -window:]
    J = k_BJMA.shape[1]
    y_BJGA = scaled_dot_product_attention(q_BHNA.view(B, J, H // J, A), k_BJMA, v_BJMA)
    return y_BJGA.reshape(B, H, 1, A)

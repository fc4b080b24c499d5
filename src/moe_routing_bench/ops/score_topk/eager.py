"""Plain torch: scores, a stable sort of s + bias, and a softmax of the chosen log s."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.ops.score_topk.op import ScoreRule, reference

BATCH_INVARIANT = True


def run(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    return reference(logits_TE, bias_E, K, rule)

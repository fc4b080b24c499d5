"""What an operation has to do at least: floating-point operations and bytes, from the actual plan.

Useful work counts pairs, executed work the rows that spans own (padding in). Bytes count a tensor once, and
weights only of experts that have pairs: an expert nobody chose is not loaded. These are the denominators of
every rate, so they are models of the work, not of an implementation; `dense_all_experts` executes more.
Reads counts on the host: for benchmarks, not for the hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

INDEX_BYTES = 8  # plans are int64


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least work of one call.

    grouped_gemm of 6 pairs over 2 active experts in Layout.block(4), D=8, F=16, bfloat16:
      useful_flops   = 2 * 8 * 16 * 6 = 1536       multiply and add per weight and pair
      executed_flops = 2 * 8 * 16 * 8 = 2048       spans own 8 rows
      weight_bytes   = 2 * 8 * 16 * 2 = 512        two experts' matrices, once each
      activation_bytes = 6 * (8 + 16) * 2 = 288    rows read and written
    """

    useful_flops: int = 0
    executed_flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes

    @property
    def waste(self) -> float:
        """The share of executed operations that padding wastes."""
        return 1 - self.useful_flops / self.executed_flops if self.executed_flops else 0.0

    @property
    def intensity(self) -> float:
        """Useful operations per byte: left of machine balance, memory limits; right of it, arithmetic."""
        return self.useful_flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            useful_flops=self.useful_flops + other.useful_flops,
            executed_flops=self.executed_flops + other.executed_flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
        )


def cost_of(op: str, *args: Any) -> Cost:
    """The cost of calling the op with these arguments."""
    found: dict[str, Callable[..., Cost]] = {
        "topk": topk_cost,
        "score_topk": score_topk_cost,
        "make_plan": make_plan_cost,
        "dispatch": dispatch_cost,
        "grouped_gemm": grouped_gemm_cost,
        "combine": combine_cost,
        "expert_ffn": expert_ffn_cost,
    }
    if op not in found:
        raise NotImplementedError(f"there is no cost model for the op {op!r}; add one to cost.py")
    return found[op](*args)


def topk_cost(score_TE: Tensor, K: int) -> Cost:
    T = score_TE.shape[0]
    read = score_TE.numel() * score_TE.element_size()
    return Cost(activation_bytes=read + T * K * (score_TE.element_size() + INDEX_BYTES))


def score_topk_cost(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: object) -> Cost:
    """Logits in, gates and ids out; scores need not touch memory. The exponentials are not counted: machines
    are rated by their multiplications."""
    T, size = logits_TE.shape[0], logits_TE.element_size()
    read = logits_TE.numel() * size + (0 if bias_E is None else bias_E.numel() * bias_E.element_size())
    return Cost(activation_bytes=read + T * K * (max(size, 4) + INDEX_BYTES))


def make_plan_cost(routing: Routing, layout: Layout) -> Cost:
    T, K, E = routing.num_tokens, routing.num_choices, routing.num_experts
    # ids in, row_TK and pair_R out; with drop=probs the gates are read too
    indices = 2 * T * K + layout.num_rows(T, K, E)
    gates = (
        routing.gate_TK.element_size() * T * K if layout.kind == "padded" and layout.drop == "probs" else 0
    )
    return Cost(activation_bytes=indices * INDEX_BYTES + gates)


def dispatch_cost(x_TD: Tensor, plan: RoutingPlan) -> Cost:
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    used_tokens = int((plan.row_TK >= 0).any(dim=1).sum())
    # each token that goes anywhere is read once; rows are written with their padding
    return Cost(activation_bytes=(used_tokens + plan.num_rows) * row_bytes + plan.num_rows * INDEX_BYTES)


def grouped_gemm_cost(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Cost:
    _, D, F = w_EDF.shape
    pairs, owned, active = _counts(plan)
    size = x_RD.element_size()
    bias = 0 if b_EF is None else active * F * size
    return Cost(
        useful_flops=2 * D * F * pairs,
        executed_flops=2 * D * F * owned,
        weight_bytes=active * D * F * w_EDF.element_size() + bias,
        activation_bytes=pairs * (D + F) * size,
    )


def combine_cost(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Cost:
    pairs, _, _ = _counts(plan)
    T, K, D = plan.num_tokens, plan.num_choices, y_RD.shape[1]
    return Cost(
        useful_flops=2 * pairs * D,
        executed_flops=2 * pairs * D,
        activation_bytes=(pairs + T) * D * y_RD.element_size()
        + T * K * (gate_TK.element_size() + INDEX_BYTES),
    )


def expert_ffn_cost(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Cost:
    """Both projections and the gates; nothing between them need touch memory, so only x and y do."""
    pairs, owned, active = _counts(plan)
    matrices = weights.w_in_EDG[0].numel() + weights.w_out_EFD[0].numel()
    parameters = sum(tensor[0].numel() for tensor in weights.tensors().values())
    size, D = x_TD.element_size(), weights.D
    used_tokens = int((plan.row_TK >= 0).any(dim=1).sum())
    return Cost(
        useful_flops=2 * matrices * pairs + 2 * D * pairs,
        executed_flops=2 * matrices * owned + 2 * D * pairs,
        weight_bytes=active * parameters * weights.w_in_EDG.element_size(),
        activation_bytes=(used_tokens + plan.num_tokens) * D * size
        + plan.num_tokens * plan.num_choices * (gate_TK.element_size() + INDEX_BYTES),
    )


def pack_bytes(convention: str, T: int, K: int, D: int, element_size: int) -> int:
    """Bytes of dispatch and combine together by the two conventions in use, by name:
    bw_2pass    2 * K * D per token: K rows written, K rows read
    bw_strict   2 * (K + 1) * D per token: the token read and the result written as well
    """
    rows = {"bw_2pass": 2 * K, "bw_strict": 2 * (K + 1)}
    if convention not in rows:
        raise ValueError(f"there is no bandwidth convention {convention!r}; there are {', '.join(rows)}")
    return T * rows[convention] * D * element_size


def _counts(plan: RoutingPlan) -> tuple[int, int, int]:
    """Pairs kept, rows that spans own, experts with pairs."""
    return int(plan.count_E.sum()), int(plan.offset_E1[-1]), int((plan.count_E > 0).sum())

"""The least work of a call: floating-point operations and bytes, from the actual plan.

The cost of each operation is in its op.py.

Useful work counts pairs; executed work counts the rows that spans own, padding included. Bytes count each
tensor once, and only the weights of experts with pairs: an expert that no token chose is not loaded. All
rates are computed from this, so it models the work, not an implementation; `dense_all_experts` executes more.
Reads counts on the host, so it is for benchmarks, not for the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_routing_bench.core.plan import RoutingPlan

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
    again_bytes: int = 0  # of the activations, those that were written and are read back

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes

    @property
    def working_set(self) -> int:
        """Bytes that are different ones."""
        return self.bytes - self.again_bytes

    @property
    def intensity(self) -> float:
        """Useful operations per byte: below the machine balance memory limits, above it arithmetic."""
        return self.useful_flops / self.bytes if self.bytes else 0.0

    def times(self, *, flops: int, bytes: int) -> Cost:
        """The cost multiplied, as for a backward pass."""
        return Cost(
            useful_flops=flops * self.useful_flops,
            executed_flops=flops * self.executed_flops,
            weight_bytes=bytes * self.weight_bytes,
            activation_bytes=bytes * self.activation_bytes,
            again_bytes=bytes * self.again_bytes,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            useful_flops=self.useful_flops + other.useful_flops,
            executed_flops=self.executed_flops + other.executed_flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
            again_bytes=self.again_bytes + other.again_bytes,
        )


def pack_bytes(convention: str, T: int, K: int, D: int, element_size: int) -> int:
    """Bytes of dispatch and combine together by the two conventions in use, by name:
    bw_2pass    2 * K * D per token: K rows written, K rows read
    bw_strict   2 * (K + 1) * D per token: also the token read and the result written
    """
    rows = {"bw_2pass": 2 * K, "bw_strict": 2 * (K + 1)}
    if convention not in rows:
        raise ValueError(f"there is no bandwidth convention {convention!r}; there are {', '.join(rows)}")
    return T * rows[convention] * D * element_size


def counts(plan: RoutingPlan) -> tuple[int, int, int]:
    """Pairs kept, rows that spans own, experts with pairs."""
    return int(plan.count_E.sum()), int(plan.offset_E1[-1]), int((plan.count_E > 0).sum())


def tokens_with_a_row(plan: RoutingPlan) -> int:
    return int((plan.row_TK >= 0).any(dim=1).sum())

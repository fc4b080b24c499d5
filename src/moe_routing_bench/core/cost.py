"""The least work of a call: floating-point operations and bytes, from the actual plan.

The cost of each operation is in its op.py.

Useful work counts pairs. Executed work counts the rows of all spans, with padding. Bytes count each tensor
once, and only the weights of experts with pairs, because an expert that no token chose is not loaded. All
rates use this cost, so it models the work and not an implementation; `dense_all_experts` executes more work.
It reads counts on the host, so it is for benchmarks and not for every call.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
    again_bytes: int = 0  # the part of the activations that is written and then read back

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes

    @property
    def working_set(self) -> int:
        """Bytes without those that are counted twice because they are read back."""
        return self.bytes - self.again_bytes

    @property
    def intensity(self) -> float:
        """Useful operations per byte. Below the machine's balance memory is the limit, above it
        arithmetic."""
        return self.useful_flops / self.bytes if self.bytes else 0.0

    def times(self, *, flops: int, bytes: int) -> Cost:
        """The cost multiplied, as for a backward pass."""
        factor = {"useful_flops": flops, "executed_flops": flops}
        return Cost(**{name: number * factor.get(name, bytes) for name, number in asdict(self).items()})

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: number + getattr(other, name) for name, number in asdict(self).items()})


def pack_bytes(convention: str, T: int, K: int, D: int, element_size: int) -> int:
    """Bytes of dispatch and combine together, by one of the two usual conventions:
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

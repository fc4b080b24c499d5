"""The row of every (token, choice) pair: Layout is the rule, RoutingPlan the numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

TENSORS = ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E")  # of a RoutingPlan


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows are assigned to experts. All three kinds use the same weights.

    With loads [3, 0, 1] over three experts:
      Layout.compact()            spans [3, 0, 1]   no padding, nothing dropped
      Layout.padded(capacity=2)   spans [2, 2, 2]   one pair of expert 0 is dropped, three rows are padding
      Layout.block(2)             spans [4, 0, 2]   each span rounded up to a multiple of 2

    `capacity_factor` gives capacity = ceil(T * K / E * factor), Megatron's formula. Dropping by `position`
    keeps the first pairs in (token, choice) order: this is causal, but a token depends on earlier tokens.
    Dropping by `probs` keeps the largest gates, so a token also depends on later tokens.

    >>> mrb.Layout.parse("padded(capacity_factor=1.25)").capacity_for(T=128, K=2, E=8)
    40
    """

    kind: Literal["compact", "padded", "block"]
    capacity: int | None = None
    capacity_factor: float | None = None
    drop: Literal["position", "probs"] = "position"
    block_rows: int | None = None
    # capacity_factor as a fraction, computed once because torch.compile cannot trace Fraction
    _factor: tuple[int, int] = field(init=False, repr=False, compare=False, default=(0, 1))

    @staticmethod
    def compact() -> Layout:
        return Layout(kind="compact")

    @staticmethod
    def padded(
        *,
        capacity: int | None = None,
        capacity_factor: float | None = None,
        drop: Literal["position", "probs"] = "position",
    ) -> Layout:
        return Layout(kind="padded", capacity=capacity, capacity_factor=capacity_factor, drop=drop)

    @staticmethod
    def block(block_rows: int = 64) -> Layout:
        return Layout(kind="block", block_rows=block_rows)

    def __post_init__(self) -> None:
        if self.kind not in ("compact", "padded", "block"):
            raise ValueError(f"layout {self.kind!r} is unknown; there are compact, padded and block")
        if self.drop not in ("position", "probs"):
            raise ValueError(f"drop policy {self.drop!r} is unknown; there are position and probs")
        if self.kind == "padded" and (self.capacity is None) == (self.capacity_factor is None):
            raise ValueError("the padded layout needs either a capacity or a capacity_factor")
        if self.kind == "block" and (self.block_rows is None or self.block_rows < 1):
            raise ValueError("the block layout needs a block of at least one row")
        if self.capacity is not None and self.capacity < 0:
            raise ValueError("capacity must not be negative")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError("capacity_factor must be positive and finite")
        if self.capacity_factor is not None:
            exact = Fraction(self.capacity_factor).limit_denominator(1_000_000)
            object.__setattr__(self, "_factor", exact.as_integer_ratio())

    @staticmethod
    def parse(text: str) -> Layout:
        """Read what str(layout) writes: `compact`, `padded(capacity_factor=1.25,drop=probs)`, `block(64)`."""
        match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
        kind, inside = match.groups() if match else (text, None)
        words = [word.strip() for word in inside.split(",")] if inside else []
        try:
            if kind == "compact" and not words:
                return Layout.compact()
            if kind == "block" and len(words) <= 1:
                return Layout.block(*map(int, words))
            if kind == "padded":
                given = dict(word.split("=", 1) for word in words)
                return Layout(
                    kind="padded",
                    capacity=int(given.pop("capacity")) if "capacity" in given else None,
                    capacity_factor=(
                        float(given.pop("capacity_factor")) if "capacity_factor" in given else None
                    ),
                    **given,  # type: ignore[arg-type]  # what is left must be drop=...
                )
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read the layout {text!r}: {error}") from None
        raise ValueError(
            f"cannot read the layout {text!r}; write compact, padded(capacity_factor=1.25), "
            "padded(capacity=8,drop=probs) or block(64)"
        )

    def __str__(self) -> str:
        if self.kind == "compact":
            return "compact"
        if self.kind == "block":
            return f"block({self.block_rows})"
        size = (
            f"capacity={self.capacity}"
            if self.capacity is not None
            else f"capacity_factor={self.capacity_factor:g}"
        )
        return f"padded({size},drop={self.drop})"

    @property
    def causal(self) -> bool:
        """False if later tokens can decide whether a token's pairs are dropped."""
        return not (self.kind == "padded" and self.drop == "probs")

    @property
    def batch_dependent(self) -> bool:
        """True if other tokens can decide whether a token's pairs are dropped."""
        return self.kind == "padded"

    def capacity_for(self, T: int, K: int, E: int) -> int:
        """Rows each expert owns in the padded layout."""
        assert self.kind == "padded"
        if self.capacity is not None:
            return self.capacity
        # exact: in floats 10 * 1.1 is above 11 and would round up to 12
        above, below = self._factor
        return -(-T * K * above // (E * below))

    def num_rows(self, T: int, K: int, E: int) -> int:
        """R, the most rows that a routing of this size can need. It depends only on the sizes, because
        reading the exact number would make the host wait. Rows after the last span belong to no expert."""
        pairs = T * K
        if self.kind == "compact":
            return pairs
        if self.kind == "padded":
            return E * self.capacity_for(T, K, E)
        assert self.block_rows is not None
        most = pairs + min(E, pairs) * (self.block_rows - 1)
        return most - most % self.block_rows


@dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """The row of every (token, choice) pair. The three layouts differ only in these numbers, so each
    operation is written once for all of them.

    T=3, K=2, E=3, expert_TK = [[0, 2], [2, 0], [2, -1]], Layout.block(2):
      count_E   = [2, 0, 3]                      pairs kept
      dropped_E = [0, 0, 0]                      pairs over capacity (padded layout only)
      offset_E1 = [0, 2, 2, 6]                   expert e owns rows offset[e] : offset[e + 1]
      pair_R    = [0, 3, 1, 2, 4, -1, -1, -1]    t * K + k; pairs first and in order, then padding (-1)
      row_TK    = [[0, 2], [3, 1], [4, -1]]      -1: no expert was chosen, or the pair was dropped

    Row 5 is padding inside expert 2's span. Rows 6 and 7 belong to no expert, because R depends only on the
    sizes (Layout.num_rows). All numbers are int64, because a row times D can exceed 2^31.

    >>> expert_TK = torch.tensor([[0, 2], [2, 0], [2, -1]])
    >>> routing = mrb.Routing(expert_TK=expert_TK, gate_TK=torch.ones(3, 2), num_experts=3)
    >>> mrb.make_plan(routing, mrb.Layout.block(2)).pair_R.tolist()
    [0, 3, 1, 2, 4, -1, -1, -1]
    """

    row_TK: Tensor
    pair_R: Tensor
    offset_E1: Tensor
    count_E: Tensor
    dropped_E: Tensor
    layout: Layout
    filled: bool = False  # every row holds a pair, so operations need no masks

    @property
    def num_tokens(self) -> int:
        return self.row_TK.shape[0]

    @property
    def num_choices(self) -> int:
        return self.row_TK.shape[1]

    @property
    def num_rows(self) -> int:
        return self.pair_R.shape[0]

    @property
    def num_experts(self) -> int:
        return self.count_E.shape[0]

    def token_R(self) -> Tensor:
        """The token in each row; -1 if the row is empty."""
        token_R = torch.div(self.pair_R, max(self.num_choices, 1), rounding_mode="floor")
        return token_R if self.filled else torch.where(self.pair_R >= 0, token_R, -1)

    def expert_R(self) -> Tensor:
        """The expert that owns each row; num_experts if the row belongs to none."""
        row_R = torch.arange(self.num_rows, device=self.offset_E1.device)
        return torch.searchsorted(self.offset_E1[1:], row_R, right=True)

    def expert_TK(self) -> Tensor:
        """The expert that computes each pair; -1 if the pair has no row."""
        expert_TK = torch.searchsorted(self.offset_E1[1:], self.row_TK.contiguous(), right=True)
        return expert_TK if self.filled else torch.where(self.row_TK >= 0, expert_TK, -1)

    def to(self, device: torch.device | str) -> RoutingPlan:
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in TENSORS}
        return replace(self, **moved)

    def validate(self) -> RoutingPlan:
        """Raises ValueError if the numbers contradict each other. It reads values on the host."""
        T, K, R, E = self.num_tokens, self.num_choices, self.num_rows, self.num_experts
        for name in TENSORS:
            if (dtype := getattr(self, name).dtype) != torch.int64:
                raise ValueError(f"{name} is {dtype}; a plan is int64 throughout")
        if self.offset_E1.shape != (E + 1,):
            raise ValueError(f"offset_E1 has shape {tuple(self.offset_E1.shape)} for {E} experts")
        if R != self.layout.num_rows(T, K, E):
            raise ValueError(
                f"{R} rows, but {self.layout} of {T} x {K} pairs over {E} experts has "
                f"{self.layout.num_rows(T, K, E)}"
            )
        span_E = self.offset_E1.diff()
        if bool((span_E < 0).any()) or self.offset_E1[0] != 0 or self.offset_E1[-1] > R:
            raise ValueError(
                f"the spans must run upwards from 0 to at most {R}: {self.offset_E1.tolist()[:20]}"
            )

        def each_expert(wrong_E: Tensor, complaint: str) -> None:
            if bool(wrong_E.any()):
                e = int(wrong_E.nonzero()[0])
                numbers = f"{span_E[e]} rows, {self.count_E[e]} pairs, {self.dropped_E[e]} dropped"
                raise ValueError(f"expert {e} has {numbers}: {complaint}")

        each_expert((self.count_E < 0) | (self.count_E > span_E), "the count must fit its rows")
        each_expert(self.dropped_E < 0, "dropped pairs cannot be negative")
        if self.layout.kind == "padded":
            each_expert(span_E != self.layout.capacity_for(T, K, E), "each span must be the capacity")
            each_expert((self.dropped_E > 0) & (self.count_E < span_E), "it dropped pairs with rows to spare")
        else:
            block = self.layout.block_rows or 1
            whole_E = (self.count_E + block - 1) // block * block
            each_expert(span_E != whole_E, f"in {self.layout} it needs {block}-row blocks for its pairs")
            each_expert(self.dropped_E > 0, "only the padded layout drops")

        expert_R, here_R = self.expert_R(), torch.arange(R, device=self.pair_R.device)
        owned_R = expert_R < E
        owner_R = expert_R.clamp(max=E - 1)
        rank_R = here_R - self.offset_E1[owner_R]
        if not torch.equal(self.pair_R >= 0, owned_R & (rank_R < self.count_E[owner_R])):
            raise ValueError("a span must hold its pairs first and then padding; other rows hold nothing")
        later_R = (rank_R[1:] > 0) & (rank_R[1:] < self.count_E[owner_R[1:]]) & owned_R[1:]
        if bool((later_R & (self.pair_R[1:] <= self.pair_R[:-1])).any()):
            raise ValueError("the pairs of a span must be in (token, choice) order and distinct")
        if bool((self.pair_R >= T * K).any()) or bool((self.row_TK >= R).any()):
            raise ValueError("pair_R or row_TK points outside the tokens or rows")
        row_of_pair = self.row_TK.flatten()
        has_row, has_pair = row_of_pair >= 0, self.pair_R >= 0
        pair_back = self.pair_R[row_of_pair[has_row]]
        row_back = row_of_pair[self.pair_R[has_pair]]
        pair_here = torch.arange(T * K, device=row_of_pair.device)[has_row]
        if not torch.equal(pair_back, pair_here) or not torch.equal(row_back, here_R[has_pair]):
            raise ValueError("row_TK and pair_R are not inverse to one another")
        if self.filled and not bool(has_pair.all()):
            raise ValueError("filled=True promises a pair in every row, but some rows are padding")
        return self

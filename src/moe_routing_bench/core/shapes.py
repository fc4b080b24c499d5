"""The letters, and the five numbers that size a Mixture-of-Experts layer.

A tensor's name ends with the letters of its dimensions, outermost first: `x_TD` has T rows of D numbers.
A capital is a logical dimension, independent of sharding. A count of things is called `num_things`.
"""

from __future__ import annotations

from dataclasses import dataclass

LETTERS = {
    "T": "tokens",
    "D": "model width",
    "F": "expert hidden width",
    "G": "width of an expert's first projection: 2F if it is gated (gate columns, then up), else F",
    "E": "experts",
    "E1": "E + 1: the boundaries of E spans",
    "K": "choices per token (the widest row; -1 = no expert)",
    "P": "pairs of token and choice: T * K",
    "R": "rows given to experts (padding in, dropped out)",
    "C": "rows of one expert (capacity) or of one tile",
    "B": "sequences: what Soft-MoE mixes separately, what a token attends to",
    "N": "tokens of one sequence",
    "S": "soft slots of one sequence",
    "L": "values of a token's label (its domain, its position)",
    "W": "ranks",
    "Q": "rows that arrived from all ranks",
    "H": "heads of an attention",
    "J": "heads of its keys and values",
    "A": "width of one head",
}


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The size of one MoE layer and of the batch it sees.

    Qwen3-30B-A3B decoding 16 tokens is MoEShape(T=16, D=2048, F=768, E=128, K=8): each expert sees one
    token on average, and 128 (token, choice) pairs are computed.

    >>> mrb.MoEShape(T=16, D=2048, F=768, E=128, K=8).num_pairs
    128
    """

    T: int
    D: int
    F: int
    E: int
    K: int

    def __post_init__(self) -> None:
        for letter in ("D", "F", "E", "K"):
            if getattr(self, letter) < 1:
                raise ValueError(f"{letter} ({LETTERS[letter]}) must be at least 1")
        if self.T < 0:
            raise ValueError("T (tokens) must not be negative")
        if self.K > self.E:
            raise ValueError(f"K={self.K} choices per token, but there are only E={self.E} experts")

    @property
    def num_pairs(self) -> int:
        return self.T * self.K

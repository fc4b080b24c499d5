"""Swizzles: each row of shared memory is permuted differently, so that a column uses several banks."""

from __future__ import annotations

from dataclasses import dataclass

from moe_routing_bench.layouts.layout import Layout


@dataclass(frozen=True)
class Swizzle:
    """CuTe's Swizzle<bits, base, shift>: `bits` bits of a place, beginning at base + shift, are combined by
    xor with the bits beginning at base.

    Swizzle(3, 3, 3) on rows of 64 16-bit numbers: the 8 groups of 8 numbers (16 bytes) of row i are
    exchanged by i % 8. Place 64 = row 1, group 0 -> 72 = row 1, group 1.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise ValueError(f"{self} overlaps itself: shift must be at least bits, and none below 0")

    def __call__(self, place: int) -> int:
        mask = (1 << self.bits) - 1
        return place ^ ((place >> (self.base + self.shift) & mask) << self.base)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True)
class Swizzled:
    """A layout, then a swizzle of its places: what CuTe writes S<3,3,3> o 0 o (8,64):(64,1)."""

    swizzle: Swizzle
    layout: Layout

    @property
    def size(self) -> int:
        return self.layout.size

    def places(self) -> list[int]:
        return [self.swizzle(place) for place in self.layout.places()]

    def __call__(self, coordinate: object) -> int:
        return self.swizzle(self.layout(coordinate))

    def __str__(self) -> str:
        return f"{self.swizzle} o 0 o {self.layout}"

"""MXFP4 as gpt-oss stores it: numbers of 4 bits (e2m1), and a power of two for every 32 of a column."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import (
    E2M1,
    Coding,
    Decoded,
    check,
    check_tensor,
    from_nibbles,
    groups_of,
    nibbles,
)

GROUP = 32
CODING = Coding(code="nibble", group=GROUP, numbers=E2M1, scale="exponent")


@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """w = E2M1[code] * 2^(exponent - 127). One column of depth 32:

    block_ENgB     [[[[0x72, 0x0F, 0, .. 0]]]]    codes 2, 7, 15, 0, ..: the first in the lower half
    exponent_ENg   [[[128]]]                      so the weights are 2, 12, -12, 0, ..

    The names in a checkpoint end in _blocks and _scales. depth may be less than 32 times the groups.
    """

    name: ClassVar[str] = "mxfp4"
    block_ENgB: Tensor
    exponent_ENg: Tensor
    depth: int

    @property
    def size(self) -> tuple[int, int, int]:
        return self.block_ENgB.shape[0], self.depth, self.block_ENgB.shape[1]

    def decoded(self) -> Decoded:
        E, K, N = self.size
        wanted = E, N, -(-K // GROUP)
        for what, tensor, shape in (
            ("blocks", self.block_ENgB, (*wanted, GROUP // 2)),
            ("scales", self.exponent_ENg, wanted),
        ):
            check_tensor(self, what, tensor, shape)
            check(tensor.dtype == torch.uint8, f"MXFP4 {what} are bytes, not {tensor.dtype}")
        check(not bool((self.exponent_ENg == 255).any()), "an MXFP4 scale is 255, which is not a number")
        return Decoded(
            coding=CODING,
            code_ENK=from_nibbles(self.block_ENgB).flatten(2)[:, :, :K],
            scale_ENg=torch.exp2(self.exponent_ENg.double() - 127),
        )


def quantise(w_EKN: Tensor) -> MXFP4:
    """The rule of the OCP specification. The exponent is that of the largest weight of a group minus 2,
    because 4 is the largest power of two in e2m1. Weights are then rounded to the nearest number, at most
    6."""
    blocks, exponents = [], []
    halfway = [(low + high) / 2 for low, high in pairwise(E2M1[:8])]
    for w_eNgi in groups_of(w_EKN, GROUP):
        _, exponent_eNg = torch.frexp(w_eNgi.abs().amax(dim=-1))  # amax = m * 2^exponent, m in .5 .. 1
        exponent_eNg = (exponent_eNg - 1 - 2 + 127).clamp(0, 254)
        # a power of two, so the products are exact, except where they are too small to matter
        w_eNgi = w_eNgi * torch.exp2(127 - exponent_eNg.double()).float().unsqueeze(-1)
        code_eNgi = (w_eNgi < 0).to(torch.uint8) << 3
        size_eNgi = w_eNgi.abs_()
        for border in halfway:  # 10x faster than torch.bucketize
            code_eNgi += size_eNgi > border
        blocks.append(nibbles(code_eNgi))
        exponents.append(exponent_eNg.to(torch.uint8))
    return MXFP4(block_ENgB=torch.cat(blocks), exponent_ENg=torch.cat(exponents), depth=w_EKN.shape[1])

"""int4: codes 0 .. 15 in groups of a column, each with a scale and, if asymmetric, a zero point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import (
    Coding,
    Decoded,
    check,
    check_tensor,
    from_nibbles,
    groups_of,
    nibbles,
    positive,
)


@dataclass(frozen=True, kw_only=True)
class Int4:
    """w = (code - zero) * scale; the symmetric zero is 8 and is not stored. One column of depth 4, one group:

    code_ENH    [[[0xF0, 0x98]]]        codes 0, 15, 8, 9: the first in the lower half
    scale_ENg   [[[0.5]]]
    zero_ENg    None                    so the weights are -4, 3.5, 0, 0.5
    zero_ENg    [[[1]]]                 would make them -0.5, 7, 3.5, 4

    depth is the number of codes of a column that are used: an odd depth does not use the last half byte.
    """

    code_ENH: Tensor
    scale_ENg: Tensor
    zero_ENg: Tensor | None = None
    group: int
    depth: int

    @property
    def name(self) -> str:
        return f"int4_g{self.group}" + ("" if self.zero_ENg is None else "_asym")

    @property
    def size(self) -> tuple[int, int, int]:
        E, N, _ = self.code_ENH.shape
        return E, self.depth, N

    def decoded(self) -> Decoded:
        E, K, N = self.size
        check(self.code_ENH.dtype == torch.uint8, f"int4 codes are bytes, not {self.code_ENH.dtype}")
        check(self.code_ENH.shape[2] == -(-K // 2), f"depth {K} is {-(-K // 2)} bytes of int4, not "
              f"{self.code_ENH.shape[2]}")  # fmt: skip
        for what, tensor in (("scales", self.scale_ENg), ("zero points", self.zero_ENg)):
            if tensor is not None:
                check_tensor(self, what, tensor, (E, N, -(-K // self.group)))
        scale_ENg = self.scale_ENg.double()
        return Decoded(
            coding=coding(self.group, self.zero_ENg is not None),
            code_ENK=from_nibbles(self.code_ENH)[:, :, :K],
            scale_ENg=scale_ENg,
            offset_ENg=None if self.zero_ENg is None else -self.zero_ENg.double() * scale_ENg,
        )


def coding(group: int, asymmetric: bool) -> Coding:
    first = 0 if asymmetric else -8
    return Coding(
        code="nibble", group=group, numbers=tuple(float(first + i) for i in range(16)), offsets=asymmetric
    )


def quantise(w_EKN: Tensor, group: int, *, asymmetric: bool = False) -> Int4:
    """Symmetric: the largest weight of a group is 7.5 scales, as in compressed-tensors. Asymmetric: 15 steps
    from the smallest (at most 0) to the largest (at least 0). Scales are bfloat16."""
    K = w_EKN.shape[1]
    codes, scales, zeros = [], [], []
    for w_eNgi in groups_of(w_EKN, group):
        low, high = w_eNgi.amin(dim=-1).clamp(max=0), w_eNgi.amax(dim=-1).clamp(min=0)
        span = (high - low) / 15 if asymmetric else torch.maximum(-low, high) / 7.5
        scale = positive(span.to(torch.bfloat16))
        zero = (-low / scale.float()).round().clamp(0, 15) if asymmetric else torch.full_like(low, 8)
        code_eNgi = w_eNgi.div(scale.float().unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, 15)
        codes.append(nibbles(code_eNgi.to(torch.uint8).flatten(2)[:, :, :K]))
        scales.append(scale)
        zeros.append(zero.to(torch.uint8))
    return Int4(
        code_ENH=torch.cat(codes), scale_ENg=torch.cat(scales),
        zero_ENg=torch.cat(zeros) if asymmetric else None, group=group, depth=K,
    )  # fmt: skip

"""int8: a code in -127 .. 127 for every weight, and a scale for every column or every group of a column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import Coding, Decoded, check, check_tensor, groups_of, positive


@dataclass(frozen=True, kw_only=True)
class Int8:
    """One expert, one column of depth 4 in groups of 2, weights 1, -2 | 0.5, 0.25:

    code_ENK    [[[64, -127, 127, 64]]]                 compressed-tensors' "int-quantized" weight
    scale_ENg   [[[2 / 127, .5 / 127]]]
    decoded().weights()[0, :, 0]   1.008, -2, 0.5, 0.252
    """

    code_ENK: Tensor
    scale_ENg: Tensor
    group: int | None = None

    @property
    def name(self) -> str:
        return "int8" if self.group is None else f"int8_g{self.group}"

    @property
    def size(self) -> tuple[int, int, int]:
        E, N, K = self.code_ENK.shape
        return E, K, N

    def decoded(self) -> Decoded:
        E, K, N = self.size
        groups = 1 if self.group is None else -(-K // self.group)
        check(self.code_ENK.dtype == torch.int8, f"int8 codes are int8, not {self.code_ENK.dtype}")
        check_tensor(self, "scales", self.scale_ENg, (E, N, groups))
        return Decoded(coding=coding(self.group), code_ENK=self.code_ENK, scale_ENg=self.scale_ENg.double())


def coding(group: int | None) -> Coding:
    return Coding(code="int8", group=group)


def rounded_rows(x_RK: Tensor) -> Tensor:
    """Rounds each row as kernels with int8 rows do: 255 steps, where the largest number is 127 steps."""
    x = x_RK if x_RK.dtype == torch.float64 else x_RK.float()
    scale_R1 = positive(x.abs().amax(dim=-1, keepdim=True) / 127)
    return (x.div(scale_R1).round_().clamp_(-127, 127) * scale_R1).to(x_RK.dtype)


def quantise(w_EKN: Tensor, group: int | None = None) -> Int8:
    """The largest weight of a group becomes 127 or -127; scales are float32."""
    K = w_EKN.shape[1]
    codes, scales = [], []
    for w_eNgi in groups_of(w_EKN, group or K):
        scale_eNg = positive(w_eNgi.abs().amax(dim=-1) / 127)
        code_eNgi = w_eNgi.div(scale_eNg.unsqueeze(-1)).round_().clamp_(-127, 127)
        codes.append(code_eNgi.flatten(2)[:, :, :K].to(torch.int8))
        scales.append(scale_eNg)
    return Int8(code_ENK=torch.cat(codes), scale_ENg=torch.cat(scales), group=group)
